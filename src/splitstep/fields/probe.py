"""A small equation made of the real fields, on which the order of every scheme can be measured."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from splitstep.fields.attention import Attention
from splitstep.fields.evaluation import Evaluation, Sight
from splitstep.fields.feedforward import FeedForward
from splitstep.fields.noise import Noise
from splitstep.fields.norms import PLACEMENTS, norm
from splitstep.fields.terms import Term, right_hand_side
from splitstep.solver.flow import Time
from splitstep.solver.order import Measurement, measure_order, reference
from splitstep.solver.schemes import scheme
from splitstep.solver.sinusoids import sinusoid
from splitstep.solver.splittings import SPLITTINGS

PARTICLES, DIM, HEADS, WIDTH = 4, 8, 2, 16


def probe(part: str, *, seed: int = 5) -> tuple[dict[str, Callable[[Tensor, Time], Tensor]], Tensor]:
    """The terms of an encoder's or decoder's equation as functions f(x, t), and a state to start from.

    The fields do not commute, are smooth (GELU), pre-norm and depend on time; each term has one weight set. With less,
    some scheme would show an order it does not have. The default seed is one at which every scheme reaches its limit
    well before round-off.
    """
    generator = torch.Generator().manual_seed(seed)
    memory = torch.randn(1, PARTICLES, DIM, generator=generator, dtype=torch.float64)
    sights = {"interaction": Sight(), "coupling": Sight(source=memory), "convection": Sight()}
    terms = {}
    for name in next(iter(SPLITTINGS[part].values())).terms:
        operator = FeedForward(DIM, WIDTH, activation="gelu") if name == "convection" else Attention(DIM, HEADS)
        term = Term(operator, norm=norm("layer_norm", DIM, eps=1e-5)).double().requires_grad_(False)
        for weight in operator.parameters():
            weight.normal_(std=weight.shape[-1] ** -0.5, generator=generator)
        terms[name] = _function(term, sights[name])
    return terms, torch.randn(1, PARTICLES, DIM, generator=generator, dtype=torch.float64)


def _function(term: Term, sight: Sight) -> Callable[[Tensor, Time], Tensor]:
    silent = Noise(training=False)

    def field(x: Tensor, t: Time) -> Tensor:
        clock = sinusoid(torch.as_tensor(t, dtype=x.dtype), x.shape[-1])
        return right_hand_side([term], x + clock, [Evaluation(t, silent, sight)], placement=PLACEMENTS["pre"])

    return field


def measured_orders(
    rows: Sequence[tuple[str, str, str]], *, reversible: bool = False
) -> Iterator[tuple[str, str, str, int, Measurement]]:
    """(part, splitting, integrator, derived order, measurement) of each scheme, as it is or made reversible."""
    equations = {part: probe(part) for part in {row[0] for row in rows}}
    exact = {part: reference(*equation) for part, equation in equations.items()}
    for part, splitting, integrator in rows:
        terms, x = equations[part]
        chosen = scheme(part, splitting=splitting, integrator=integrator, reversible=reversible)
        yield part, splitting, integrator, chosen.order, measure_order(terms, x, scheme=chosen, exact=exact[part])
