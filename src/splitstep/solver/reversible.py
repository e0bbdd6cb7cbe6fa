"""A scheme that can be run backwards, so that training needs no memory for the depth (McCallum & Foster 2024).

Two states take turns, each moved by the increment Phi of the scheme from where the other is:

    y' = l y + (1 - l) z + Phi_h(z)         z' = z - Phi_-h(y')

and back, exactly but for round-off:

    z = z' + Phi_-h(y')                     y = (y' - (1 - l) z - Phi_h(z)) / l

The backward pass goes back this way and evaluates each increment again, with the random numbers of the first time.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from splitstep.solver import flow
from splitstep.solver.schedules import Schedule, Step
from splitstep.solver.schemes import Scheme

COUPLING = 0.9  # l: how much of y stays; round-off on the way back grows by 1 / l a step


@dataclass(frozen=True)
class March:
    """The way through a stack: the increments of its steps, there and back."""

    schedule: Schedule
    scheme: Scheme
    dynamics: "flow.Dynamics"

    def ahead(self, z: Tensor, now: Step) -> Tensor:
        """Phi_h(z)."""
        return flow.step(z, now, scheme=self.scheme, dynamics=self.dynamics) - z

    def back(self, y: Tensor, now: Step) -> Tensor:
        """Phi_-h(y), from the end of the step."""
        return flow.step(y, self.schedule.reverse(now), scheme=self.scheme, dynamics=self.dynamics) - y


def integrate_reversibly(x: Tensor, march: March) -> Tensor:
    """Carry all particles from the first layer to the last, keeping nothing on the way."""
    inputs = [tensor for now in march.schedule.steps for tensor in march.dynamics.inputs(now)]
    unique = list({id(tensor): tensor for tensor in inputs}.values())
    return _Reversible.apply(x, march, *unique)


class _Reversible(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, march: March, *inputs: Tensor) -> Tensor:
        y = z = x
        ctx.march, ctx.random = march, []
        for now in march.schedule.steps:
            ctx.random.append(_random_state(x.device))
            y = COUPLING * y + (1 - COUPLING) * z + march.ahead(z, now)
            ctx.random.append(_random_state(x.device))
            z = z - march.back(y, now)
            march.dynamics.end(y, now)
        ctx.save_for_backward(y, z)
        ctx.autocast = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else None
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        march: March = ctx.march
        y, z = ctx.saved_tensors
        to_y, to_z = gradients[0], torch.zeros_like(z)
        gathered: dict[int, Tensor] = {}
        for now in reversed(march.schedule.steps):
            with _as_then(ctx, y.device):
                start = y.detach().requires_grad_()
                moved = march.back(start, now)
            to_y = to_y + _pulled(moved, start, -to_z, march.dynamics.inputs(now), gathered)
            z = z + moved.detach()
            with _as_then(ctx, y.device):
                start = z.detach().requires_grad_()
                moved = march.ahead(start, now)
            to_z = to_z + (1 - COUPLING) * to_y + _pulled(moved, start, to_y, march.dynamics.inputs(now), gathered)
            y = (y - (1 - COUPLING) * z - moved.detach()) / COUPLING
            to_y = COUPLING * to_y
        inputs = {id(tensor): tensor for now in march.schedule.steps for tensor in march.dynamics.inputs(now)}
        return to_y + to_z, None, *(gathered.get(number) for number in inputs)


def _pulled(
    moved: Tensor, start: Tensor, gradient: Tensor, inputs: Sequence[Tensor], gathered: dict[int, Tensor]
) -> Tensor:
    """The gradient of the state that an increment started from; those of its weights are added to the others."""
    found = torch.autograd.grad(moved, [start, *inputs], gradient.to(moved.dtype), allow_unused=True)
    for tensor, part in zip(inputs, found[1:], strict=True):
        if part is not None:
            before = gathered.get(id(tensor))
            gathered[id(tensor)] = part if before is None else before + part
    assert found[0] is not None
    return found[0]


@contextmanager
def _as_then(ctx: Any, device: torch.device) -> Iterator[None]:
    """The random numbers and the precision of the forward pass, whose last increment is taken back first."""
    now = _random_state(device)
    _generator(device).set_rng_state(ctx.random.pop())
    try:
        with torch.enable_grad(), torch.autocast(device.type, ctx.autocast, enabled=ctx.autocast is not None):
            yield
    finally:
        _generator(device).set_rng_state(now)


def _generator(device: torch.device) -> Any:
    return torch if device.type == "cpu" else torch.get_device_module(device)


def _random_state(device: torch.device) -> Tensor:
    return _generator(device).get_rng_state()
