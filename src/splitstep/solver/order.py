"""The measured order of any scheme on any equation."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

import torch
from torch import Tensor

from splitstep.solver.flow import Equation, Time, integrate
from splitstep.solver.schedules import Schedule
from splitstep.solver.schemes import Scheme
from splitstep.solver.splittings import Splitting, Substep
from splitstep.solver.tableaus import TABLEAUS

Terms = Mapping[str, Callable[[Tensor, Time], Tensor]]

FLOOR = 1e-12  # Round-off hides the slope below this error, so stop there.
FINEST = 4096
SETTLED = 0.02  # The limit is reached when halving the step moves the slope by no more than this.
REFERENCE_STEPS = 512


@dataclass(frozen=True)
class Measurement:
    """The slope of the error when the step is halved, at the finest steps looked at."""

    order: float
    steps: int
    settled: bool

    @property
    def note(self) -> str:
        """What a reader of a table must know of this figure."""
        return "" if self.settled else f"not settled at {self.steps} steps: round-off ends the measurement"


def solve(terms: Terms, x: Tensor, *, scheme: Scheme, steps: int) -> Tensor:
    """The state at t = 1, after that many equal steps from t = 0."""
    schedule = Schedule(num_layers=steps, num_independent_layers=1, step_size=1 / steps)
    with torch.no_grad():
        return integrate(x, schedule=schedule, scheme=scheme, dynamics=Equation(terms, scheme=scheme))


def reference(terms: Terms, x: Tensor) -> Tensor:
    """The solution at t = 1 to round-off: nothing split, fifth order, fine steps."""
    unsplit = Splitting((Substep(Fraction(1), tuple(terms)),))
    return solve(terms, x, scheme=Scheme(unsplit, replace(TABLEAUS["dopri5"], embedded=None)), steps=REFERENCE_STEPS)


def measure_order(terms: Terms, x: Tensor, *, scheme: Scheme, exact: Tensor, coarsest: int = 8) -> Measurement:
    """Halve the step until the slope of the error settles, or round-off would hide it."""
    steps, error = coarsest, _error(terms, x, scheme, coarsest, exact)
    slopes: list[float] = []
    while steps < FINEST:
        finer = _error(terms, x, scheme, 2 * steps, exact)
        if finer < FLOOR:
            break
        slopes.append(math.log2(error / finer))
        steps, error = 2 * steps, finer
        if len(slopes) > 1 and abs(slopes[-1] - slopes[-2]) < SETTLED:
            return Measurement(slopes[-1], steps, settled=True)
    return Measurement(slopes[-1], steps, settled=False)


def _error(terms: Terms, x: Tensor, scheme: Scheme, steps: int, exact: Tensor) -> float:
    return float((solve(terms, x, scheme=scheme, steps=steps) - exact).norm())
