"""The flow of the particles: integrate() and step() advance them; reversible.py takes the same steps in pairs.

A `Dynamics` says what moves the particles. It gives increments only; the residual lives here and nowhere else.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from splitstep.solver.errors import RunError, UserError, lookup
from splitstep.solver.schedules import Schedule, Step
from splitstep.solver.schemes import Scheme
from splitstep.solver.tableaus import TABLEAUS, Tableau

State: TypeAlias = Float[Tensor, "batch particles dim"]
Time: TypeAlias = float | Tensor
Field: TypeAlias = Callable[[Tensor, Time, int], Tensor]  # (x, t, stage) -> dx/dt

# What torchdiffeq calls the embedded pairs of TABLEAUS.
TORCHDIFFEQ_NAMES = {"bogacki_shampine": "bosh3", "dopri5": "dopri5"}


class BudgetError(RunError):
    """An adaptive integrator asked for more evaluations than it was allowed."""


class Dynamics(ABC):
    """What moves the particles, sub-step by sub-step, and what happens to them around a step."""

    @abstractmethod
    def field(self, step: Step, index: int) -> Field:
        """The right-hand side during sub-step `index`: its terms, their weights, one draw of noise for all stages."""

    def project(self, x: State, step: Step, index: int) -> State:
        """What follows a sub-step: the identity, or a norm after it (post-norm is a projection, not a field)."""
        return x

    def begin(self, x: State, step: Step) -> State:
        """The state a step starts from."""
        return x

    def end(self, x: State, step: Step) -> State:
        """The state a step leaves behind."""
        return x

    def inputs(self, step: Step) -> list[Tensor]:
        """What the field of this step is differentiated by beside the state: its weights, and a source."""
        return []


class Equation(Dynamics):
    """One function f(x, t) for each term, the same at every step: a plain ordinary differential equation."""

    def __init__(self, terms: Mapping[str, Callable[[Tensor, Time], Tensor]], *, scheme: Scheme) -> None:
        self.terms = terms
        self.substeps = scheme.splitting.substeps

    def field(self, step: Step, index: int) -> Field:
        """The sum of the terms of this sub-step."""
        functions = [self.terms[term] for term in self.substeps[index].terms]
        return lambda x, t, stage: total([f(x, t) for f in functions])


def integrate(
    x: State, *, schedule: Schedule, scheme: Scheme, dynamics: Dynamics, checkpointing: bool = False
) -> State:
    """Carry all particles from the first layer to the last.

    With `checkpointing` each step keeps only its input and is computed again in the backward pass, with the same random
    numbers.
    """
    if scheme.reversible:
        from splitstep.solver.reversible import March, integrate_reversibly

        return integrate_reversibly(x, March(schedule, scheme, dynamics))
    for current in schedule.steps:
        x = dynamics.begin(x, current)
        if checkpointing and torch.is_grad_enabled():
            # Non-reentrant: the only form that lets shared weights and DDP gather gradients as without it.
            x = checkpoint(step, x, current, scheme=scheme, dynamics=dynamics, use_reentrant=False)
        else:
            x = step(x, current, scheme=scheme, dynamics=dynamics)
        x = dynamics.end(x, current)
    return x


def step(x: State, now: Step, *, scheme: Scheme, dynamics: Dynamics) -> State:
    """Advance all particles from t to t + gamma: one Transformer layer."""
    for index, (start, length) in enumerate(scheme.splitting.intervals):
        field = dynamics.field(now, index)
        t, gamma = now.t + start * now.gamma, length * now.gamma
        if scheme.tableau.adaptive:
            x = _adaptive(x, t, gamma, field, scheme)
        else:
            x = _runge_kutta(x, t, gamma, field, scheme.tableau)
        x = dynamics.project(x, now, index)
    return x


def _runge_kutta(x: State, t: float, gamma: float, field: Field, tableau: Tableau) -> State:
    stages: list[Tensor] = []
    for stage, (c, row) in enumerate(tableau.rows):
        # k_i = f(x + gamma * sum_j a_ij k_j, t + c_i gamma)
        stages.append(field(_moved(x, gamma, row, stages), t + c * gamma, stage))
    # x(t + gamma) = x + gamma * sum_i b_i k_i
    return _moved(x, gamma, tableau.weights, stages)


def _moved(x: State, gamma: float, weights: Sequence[float], stages: Sequence[Tensor]) -> State:
    for weight, k in zip(weights, stages, strict=True):
        if weight:
            x = torch.add(x, k, alpha=gamma * weight)
    return x


def total(increments: Sequence[Tensor]) -> Tensor:
    """The sum of the increments of terms that act together."""
    result = increments[0]
    for increment in increments[1:]:
        result = result + increment
    return result


def _adaptive(x: State, t: float, gamma: float, field: Field, scheme: Scheme) -> State:
    name, odeint = _torchdiffeq(scheme.tableau)
    budget = scheme.tolerance.max_evaluations
    evaluations = 0

    def right_hand_side(now: Tensor, state: Tensor) -> Tensor:
        nonlocal evaluations
        evaluations += 1
        if evaluations > budget:
            raise BudgetError(
                f"{name} spent its {budget} evaluations at t = {float(now.detach()):.4g} of a sub-step from {t:.4g} to "
                f"{t + gamma:.4g}; raise max_evaluations, or loosen rtol = {scheme.tolerance.rtol:g} and "
                f"atol = {scheme.tolerance.atol:g}"
            )
        return field(state, now, 0)

    precision = torch.float32 if x.device.type == "mps" else torch.float64  # which Apple's GPUs do not have
    ends = torch.tensor([t, t + gamma], dtype=precision, device=x.device)
    path: Tensor = odeint(
        right_hand_side,
        x,
        ends,
        rtol=scheme.tolerance.rtol,
        atol=scheme.tolerance.atol,
        method=lookup("integrator that chooses its steps", name, TORCHDIFFEQ_NAMES),
        # The last step must end where the sub-step ends: otherwise it overshoots, and the answer is an interpolation
        # of lower order.
        options={"step_t": ends[1:]},
    )
    return path[-1]


def _torchdiffeq(tableau: Tableau) -> tuple[str, Callable[..., Any]]:
    name = next(name for name, entry in TABLEAUS.items() if entry == tableau)
    try:
        from torchdiffeq import odeint
    except ImportError:
        raise UserError(f"integrator {name!r} needs torchdiffeq: pip install 'splitstep[adaptive]'") from None
    return name, odeint
