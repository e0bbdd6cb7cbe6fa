"""A term of the right-hand side: an operator with its norm and its dropout."""

from collections.abc import Sequence

from torch import Tensor, nn

from splitstep.fields.evaluation import Evaluation
from splitstep.fields.norms import Placement
from splitstep.solver.flow import total


class Term(nn.Module):
    """One term: attention or a feed-forward network, its norm, and the dropout of its increment."""

    def __init__(self, operator: nn.Module, *, norm: nn.Module | None, dropout: float = 0.0) -> None:
        super().__init__()
        self.operator = operator
        self.norm = norm
        self.dropout = dropout

    def forward(self, z: Tensor, at: Evaluation, *, placement: Placement) -> Tensor:
        """The increment dx/dt of this term, from the state as the placement hands it over."""
        increment = self.operator(z, at)
        if placement.behind and self.norm is not None:
            increment = self.norm(increment)
        return at.noise.dropout(increment, self.dropout)


def right_hand_side(
    terms: Sequence[Term], x: Tensor, evaluations: Sequence[Evaluation], *, placement: Placement
) -> Tensor:
    """dx/dt of terms that act together, each evaluated where it is told."""
    # dx/dt = sum over terms of f(norm(x)) or norm(f(x)) or f(x)
    states = [term.norm(x) if placement.before and term.norm is not None else x for term in terms]
    if placement.joint:  # the first term's norm stands for all
        states = states[:1] * len(terms)
    return total([term(z, at, placement=placement) for term, z, at in zip(terms, states, evaluations, strict=True)])
