"""Which tokens a masked language model must guess, and what it sees in their places (Devlin et al. 2018)."""

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from splitstep.data.settings import Section

Share = Annotated[float, Field(ge=0, le=1)]

# What the code that Macaron Net's authors released does beside.
Quirk = Literal[
    "class_token",  # the class token, which is never hidden, is a target too and counts in the mean
    "spared_token",  # the first ordinary token of the vocabulary is never chosen
    "rounded_count",  # as many tokens are chosen as the rate says, rounded: none of three
]


class Masking(Section):
    """How many tokens are chosen, and how many of those are hidden, exchanged, or left as they are."""

    rate: float = Field(default=0.15, gt=0, le=1)
    hidden: Share = 0.8
    exchanged: Share = 0.1
    quirks: list[Quirk] = []

    @model_validator(mode="after")
    def _fits(self) -> "Masking":
        if self.hidden + self.exchanged > 1:
            raise ValueError("data.masking.hidden and data.masking.exchanged are more than 1 together")
        return self


@dataclass(frozen=True)
class Masker:
    """Masking with a vocabulary: `special` tokens are neither chosen nor put in the place of others."""

    settings: Masking
    vocabulary: int
    special: frozenset[int]
    mask: int

    @cached_property
    def _ordinary(self) -> NDArray[np.int64]:
        return np.setdiff1d(np.arange(self.vocabulary), list(self.special))

    @cached_property
    def _eligible(self) -> NDArray[np.bool_]:
        spared = "spared_token" in self.settings.quirks
        eligible = np.zeros(self.vocabulary, dtype=bool)
        eligible[self._ordinary[spared:]] = True
        return eligible

    def __call__(
        self, tokens: NDArray[np.int32], rng: np.random.Generator
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """What the model sees, and which tokens it must guess. The first is the class token."""
        settings = self.settings
        places = np.flatnonzero(self._eligible[tokens])
        # Rounded up as often as the fraction says, so that the rate holds for short sequences too.
        chance = 0.5 if "rounded_count" in settings.quirks else rng.random()
        count = int(settings.rate * len(places) + chance)
        chosen = rng.permutation(places)[:count]
        fate = rng.random(count)
        seen, target = tokens.copy(), np.zeros(len(tokens), dtype=bool)
        target[chosen] = True
        seen[chosen[fate < settings.hidden]] = self.mask
        exchanged = chosen[(fate >= settings.hidden) & (fate < settings.hidden + settings.exchanged)]
        seen[exchanged] = rng.choice(self._ordinary, len(exchanged))
        if "class_token" in settings.quirks:
            target[0] = True
        return seen, target
