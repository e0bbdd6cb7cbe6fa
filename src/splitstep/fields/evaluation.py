"""When a field is evaluated, and among whom."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TypeAlias

from jaxtyping import Bool
from torch import Tensor

from splitstep.fields.noise import Noise

Mask: TypeAlias = Bool[Tensor, "#batch #heads #queries keys"]


class KeyValues(ABC):
    """Keys and values that outlive one evaluation: a cache slot, or a source that stays the same."""

    @abstractmethod
    def recall(self) -> tuple[Tensor, Tensor] | None:
        """The complete keys and values, where nothing needs to be computed."""

    @abstractmethod
    def keep(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values, and return all there are."""


@dataclass
class Sight:
    """Whom the particles see. Without a source they see each other; mask True = visible."""

    source: Tensor | None = None
    mask: Mask | None = None
    causal: bool = False
    rotary: tuple[Tensor, Tensor] | None = None
    store: KeyValues | None = None
    kernel: str = "auto"
    record: list[Tensor] | None = None
    operator: object | None = None  # of evolved attention: what its segment computed when it began


@dataclass
class Evaluation:
    """The time, the noise of the sub-step, whom the particles see, and how many layers deep in its segment it is."""

    t: float | Tensor
    noise: Noise
    sight: Sight
    depth: float | Tensor = 0.0
