"""A scheme: a splitting together with the integrator that advances its sub-steps."""

from dataclasses import dataclass
from fractions import Fraction
from math import inf

from splitstep.solver.errors import UserError, lookup
from splitstep.solver.splittings import SPLITTINGS, Splitting
from splitstep.solver.tableaus import TABLEAUS, Tableau


@dataclass(frozen=True)
class Tolerance:
    """When an adaptive integrator accepts a step, and how many evaluations a sub-step may cost."""

    rtol: float = 1e-5
    atol: float = 1e-6
    max_evaluations: int = 1000

    def __post_init__(self) -> None:
        for name in ("rtol", "atol", "max_evaluations"):
            if not 0 < getattr(self, name) < inf:
                raise UserError(f"{name} must be positive and finite, got {getattr(self, name)}")


@dataclass(frozen=True)
class Scheme:
    """How a step is split and how each sub-step is advanced."""

    splitting: Splitting
    tableau: Tableau
    tolerance: Tolerance = Tolerance()
    reversible: bool = False  # two states that take turns, as solver/reversible.py has it

    @property
    def order(self) -> int:
        """The order of accuracy of the whole: the lower of its two parts.

        Sub-steps of order q err by gamma^(q+1) * sum_i c_i^(q+1) * (error of their term), so a splitting of higher
        order than its integrator gains nothing, unless those sums vanish for every term: see `leading_errors`.
        """
        return int(min(self.splitting.order, self.tableau.order))

    @property
    def leading_errors(self) -> dict[tuple[str, ...], Fraction]:
        """The sum of c_i^(q+1) over the sub-steps of each term (or joint terms), q the integrator's order."""
        sums: dict[tuple[str, ...], Fraction] = {}
        for substep in self.splitting.substeps:
            power = substep.fraction ** (self.tableau.order + 1)
            sums[substep.terms] = sums.get(substep.terms, Fraction(0)) + power
        return sums

    def evaluations(self, term: str) -> int:
        """How often one step evaluates the term; for an adaptive integrator, if it takes one step a sub-step."""
        return self.splitting.uses(term) * self.tableau.stages * (2 if self.reversible else 1)


def scheme(
    part: str, *, splitting: str, integrator: str, tolerance: Tolerance = Tolerance(), reversible: bool = False
) -> Scheme:
    """The scheme of these names, for the `encoder` or `decoder` part of a model."""
    return Scheme(
        lookup(f"{part} splitting", splitting, SPLITTINGS[part]),
        lookup("integrator", integrator, TABLEAUS),
        tolerance,
        reversible,
    )


def fixed_step_schemes() -> list[tuple[str, str, str]]:
    """(part, splitting, integrator) of every combination whose steps are fixed in advance."""
    return [
        (part, splitting, integrator)
        for part, splittings in SPLITTINGS.items()
        for splitting in splittings
        for integrator, tableau in TABLEAUS.items()
        if not tableau.adaptive
    ]
