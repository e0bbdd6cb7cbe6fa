"""Sinusoids of time and of position."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from splitstep.solver.errors import lookup

# The frequency of pair p out of `pairs`, from 1 down to about 1/10000.
LADDERS: dict[str, Callable[[Tensor, int], Tensor]] = {
    # tensor2tensor and fairseq: the last frequency is 1/10000 itself
    "tensor2tensor": lambda p, pairs: torch.exp(-math.log(10000.0) * p / max(pairs - 1, 1)),
    # Vaswani et al. 2017 as printed, and Marian
    "vaswani": lambda p, pairs: torch.exp(-math.log(10000.0) * p / pairs),
}


def sinusoid(at: Tensor, dim: int, *, ladder: str = "tensor2tensor") -> Tensor:
    """[sines | cosines] of each given time or position, as vectors of `dim` entries."""
    pairs = dim // 2
    frequency = lookup("frequency ladder", ladder, LADDERS)(
        torch.arange(pairs, dtype=at.dtype, device=at.device), pairs
    )
    angle = at.unsqueeze(-1) * frequency
    waves = torch.cat((angle.sin(), angle.cos()), dim=-1)
    return torch.nn.functional.pad(waves, (0, dim % 2))
