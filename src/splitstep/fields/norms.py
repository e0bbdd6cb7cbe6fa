"""Norms by name, and the placements of a norm around a term."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn

from splitstep.solver.errors import lookup

NORMS: dict[str, Callable[..., nn.Module]] = {
    "layer_norm": nn.LayerNorm,
    "layer_norm_plain": partial(nn.LayerNorm, elementwise_affine=False),
    "rms_norm": nn.RMSNorm,
}


def norm(name: str, size: int, *, eps: float) -> nn.Module:
    """The norm of that name over vectors of that size."""
    return lookup("norm_type", name, NORMS)(size, eps=eps)


@dataclass(frozen=True)
class Placement:
    """Where the norm of a term stands: before it, behind it, or around the whole sub-step."""

    before: bool = False  # f(norm(x)): inside the field
    behind: bool = False  # norm(f(x)): inside the field
    around: bool = False  # norm(x + gamma f(x)): a projection after the sub-step
    joint: bool = False  # terms that act together have one norm, not one each

    @property
    def final(self) -> bool:
        """Whether the stack ends with a norm of its own, because its steps leave the state unnormalised."""
        return not self.around


PLACEMENTS = {
    "pre": Placement(before=True),
    "pre_shared": Placement(before=True, joint=True),
    "post": Placement(around=True, joint=True),
    "branch": Placement(behind=True),
}
