"""A scheme that can be run backwards, so that training needs no memory for the depth (McCallum & Foster 2024).

Two states take turns, each moved by the increment Phi of the scheme from where the other is:

    y' = l y + (1 - l) z + Phi_h(z)         z' = z - Phi_-h(y')

and back, exactly but for round-off:

    z = z' + Phi_-h(y')                     y = (y' - (1 - l) z - Phi_h(z)) / l

The backward pass goes back this way and evaluates each increment again, with the random numbers of the first time.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from splitstep.solver import flow
from splitstep.solver.errors import UserError
from splitstep.solver.randomness import random_state, set_random_state
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
    # Asked for once: what a gradient is handed to is what it is taken by.
    inputs = [march.dynamics.inputs(now) for now in march.schedule.steps]
    unique = {id(tensor): tensor for each in inputs for tensor in each}
    return _Reversible.apply(x, march, inputs, *unique.values())


class _Reversible(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, march: March, inputs: list[list[Tensor]], *unique: Tensor) -> Tensor:
        y = z = x
        ctx.march, ctx.inputs, ctx.random = march, inputs, []
        for now in march.schedule.steps:
            march.dynamics.begin(y, now)  # to look on, as at the end: a step is an increment alone
            ahead = random_state(x.device)
            y = COUPLING * y + (1 - COUPLING) * z + march.ahead(z, now)
            back = random_state(x.device)
            z = z - march.back(y, now)
            ctx.random.append((ahead, back))
            march.dynamics.end(y, now)
        ctx.save_for_backward(y, z)
        ctx.autocast = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        march: March = ctx.march
        y, z = ctx.saved_tensors
        to_y, to_z = gradients[0], torch.zeros_like(z)
        gathered: dict[int, Tensor] = {}
        whole = zip(march.schedule.steps, ctx.inputs, ctx.random, strict=True)
        for now, inputs, (ahead, back) in reversed(list(whole)):
            with _as_then(ctx, y.device, back):
                start = y.detach().requires_grad_()
                moved = march.back(start, now)
            to_y = to_y + _pulled(moved, start, -to_z, inputs, gathered)
            z = z + moved.detach()
            with _as_then(ctx, y.device, ahead):
                start = z.detach().requires_grad_()
                moved = march.ahead(start, now)
            to_z = to_z + (1 - COUPLING) * to_y + _pulled(moved, start, to_y, inputs, gathered)
            y = (y - (1 - COUPLING) * z - moved.detach()) / COUPLING
            to_y = COUPLING * to_y
        unique = {id(tensor): tensor for each in ctx.inputs for tensor in each}
        _refuse_loss(unique, gathered)
        return to_y + to_z, None, None, *(gathered[number] for number in unique)


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


def _refuse_loss(inputs: Mapping[int, Tensor], gathered: Mapping[int, Tensor]) -> None:
    """A weight may be without a part in one step, but not in all: then the steps use something in its place."""
    lost = [tensor for number, tensor in inputs.items() if number not in gathered]
    if lost:
        raise UserError(
            f"reversible steps have no gradient for {len(lost)} of their {len(inputs)} weights, the first of shape "
            f"{tuple(lost[0].shape)}: no step uses them as they are; freeze them, or train without sharding"
        )


@contextmanager
def _as_then(ctx: Any, device: torch.device, state: Tensor) -> Iterator[None]:
    """The random numbers and the precision of the forward pass."""
    now = random_state(device)
    set_random_state(device, state)
    try:
        with torch.enable_grad(), torch.autocast(device.type, ctx.autocast, enabled=ctx.autocast is not None):
            yield
    finally:
        set_random_state(device, now)
