"""What the papers say of their schemes, so that a comparison can answer whether it holds at its scale."""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import pairwise

from splitstep.compare.schemes import Contestant, shares_weights


def anything(scheme: Contestant, other: Contestant) -> str:
    """The claim is made whatever the terms."""
    return ""


def fewer_in_the_layers(scheme: Contestant, other: Contestant) -> str:
    """The claim is of a scheme with fewer parameters in its layers."""
    ours, theirs = scheme.parameters.body, other.parameters.body
    return "" if ours < theirs else f"it has {ours:,} parameters in the layers, {other.scheme.name} {theirs:,}"


def weights_shared(scheme: Contestant, other: Contestant) -> str:
    """The claim is of layers that share weights."""
    return "" if shares_weights(other.config) else f"no layers of {other.scheme.name} share weights"


def no_dropout(scheme: Contestant, other: Contestant) -> str:
    """The claim is of training without dropout, of whatever kind."""
    rates = {key: max(getattr(one.config, key) or 0.0 for one in (scheme, other)) for key in NOISE}
    found = ", ".join(f"{key} is {rate}" for key, rate in rates.items() if rate)
    return f"{found}, the claim is of 0" if found else ""


NOISE = ("dropout", "embedding_dropout", "attention_dropout", "activation_dropout", "classifier_dropout", "drop_path")


@dataclass(frozen=True)
class Claim:
    """One scheme is better than another, or no worse, where its premise holds: where `differs` has nothing to say."""

    scheme: str
    other: str
    says: str
    source: str
    no_worse: bool = False
    differs: Callable[[Contestant, Contestant], str] = anything

    def answer(self, verdict: str, *, seeds: int) -> str:
        """What the verdict about the two schemes says of the claim, and by how little."""
        if self.no_worse:
            said = "does not hold" if verdict == "worse" else "not contradicted"
        else:
            said = {"better": "holds", "worse": "the opposite holds"}.get(verdict, "not shown")
        return f"{said}, by one seed" if seeds == 1 else said


LU, ZHONG, DUTTA = "Lu et al. 2019", "Zhong et al. 2022", "Dutta et al. 2021"
AS_WELL = "evolved attention does as well with fewer parameters"

# A new claim is one row.
CLAIMS = (
    Claim("macaron", "transformer", "Macaron is better than the Transformer", LU),
    Claim("parallel", "transformer", "the parallel layer is better than the sequential one", ZHONG, differs=no_dropout),
    Claim("parallel-rk4", "parallel", "RK4 is better than Euler's method for the parallel layer", ZHONG),
    Claim("transevolve-full-1", "transformer", AS_WELL, DUTTA, True, fewer_in_the_layers),
    Claim("transevolve-random-1", "transformer", f"{AS_WELL} and random rotations", DUTTA, True, fewer_in_the_layers),
)


def claims_among(names: Collection[str]) -> list[Claim]:
    """What the papers say of the schemes that a comparison has."""
    stated = [claim for claim in CLAIMS if claim.scheme in names and claim.other in names]
    return stated + (_of_sharing(names) if "parallel" in names else [])


def _of_sharing(names: Collection[str]) -> list[Claim]:
    """Each number of sets of weights against the next smaller one, from a set for each layer on."""
    found = [re.fullmatch(r"parallel/num_independent_layers=(\d+)", name) for name in names]
    counted = sorted((int(match[1]) for match in found if match), reverse=True)
    sets = {"parallel": "weights of its own for each layer"}
    sets |= {f"parallel/num_independent_layers={n}": f"{n} set{'s' * (n > 1)} of weights for all" for n in counted}
    return [
        Claim(more, fewer, f"{sets[more]} is better than {sets[fewer]}", ZHONG, differs=weights_shared)
        for more, fewer in pairwise(sets)
    ]
