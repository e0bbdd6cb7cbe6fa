"""Dropout and stochastic depth that a solver can integrate: one draw for all stages of a sub-step."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from splitstep.solver.randomness import random_state, set_random_state

STEPS = 2**16


def dropped(x: Tensor, rate: float) -> Tensor:
    """The values with a share `rate` of them zeroed and the rest scaled up.

    On a processor torch draws a number in double precision for each value, one after another. Here sixteen bits decide,
    four values a draw, with the rate to one part in 65,536: forward it takes a quarter of the time, and a training step
    of a small translation model (d = 128, 4,096 tokens) 9 % less.
    """
    if rate == 0 or x.device.type != "cpu" or torch.compiler.is_compiling():
        return nn.functional.dropout(x, rate)
    lost = min(round(rate * STEPS), STEPS - 1)
    draws = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
    bits = draws.view(torch.int16)[: x.numel()].view(x.shape)
    return x * (bits >= lost - STEPS // 2).to(x.dtype).mul_(STEPS / (STEPS - lost))


class Noise:
    """The randomness of one sub-step: drawn at its first stage, recalled in the same order at the others.

    With fresh masks at every stage a Runge-Kutta method would integrate noise, and its order would be lost.
    """

    def __init__(self, *, training: bool, stages: int = 1) -> None:
        self.training = training
        self.recalls = stages > 1
        self.drawn: list[Tensor] = []
        self.cursor = 0

    def rewind(self) -> None:
        """Start a stage: what is asked next is what the first stage asked first."""
        self.cursor = 0

    def dropout(self, x: Tensor, rate: float) -> Tensor:
        """The values with a share `rate` of them zeroed and the rest scaled up."""
        if not self.training or rate == 0:
            return x
        if not self.recalls:
            return dropped(x, rate)
        return x * self._recall(lambda: dropped(torch.ones_like(x), rate))

    def drop_path(self, x: Tensor, rate: float) -> Tensor:
        """The increments with a share `rate` of the examples of the batch zeroed and the rest scaled up."""
        if not self.training or rate == 0:
            return x
        shape = (x.shape[0],) + (1,) * (x.ndim - 1)
        return x * self._recall(lambda: dropped(x.new_ones(shape), rate))

    @contextmanager
    def replay(self, device: torch.device) -> Iterator[None]:
        """Random numbers drawn inside are those that were drawn here at the first stage.

        For kernels that make a mask of their own, which would be too large to keep.
        """
        now = random_state(device)
        first_stage = self.cursor == len(self.drawn)
        set_random_state(device, self._recall(lambda: now))
        yield
        if not first_stage:
            set_random_state(device, now)

    def _recall(self, draw: Callable[[], Tensor]) -> Tensor:
        if self.cursor == len(self.drawn):
            self.drawn.append(draw())
        self.cursor += 1
        return self.drawn[self.cursor - 1]
