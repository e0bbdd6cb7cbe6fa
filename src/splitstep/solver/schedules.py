"""Which weights act at which time: the steps of a whole stack, layer by layer."""

from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from splitstep.solver.errors import UserError

# Where a time embedding P(t) enters. In the field it changes what moves the particles; added to the state, as the
# Universal Transformer publishes it, it moves them itself, and the step is no longer a step of an ODE.
TIME_EMBEDDINGS = {
    "none": "the field knows the time only through its weights",
    "field": "the field is f(x + P(t), t)",
    "state": "x + P(position) + P(step) before every step (Universal Transformer)",
}


@dataclass(frozen=True)
class Step:
    """One step t -> t + gamma, and whose weights it uses; `depth` counts layers from the start of its segment."""

    number: int
    layer: int
    weights: int
    t: float
    gamma: float
    drop_path: float
    segment: int
    depth: float
    begins_segment: bool
    ends_segment: bool


@dataclass(frozen=True)
class Schedule:
    """The steps of a stack: each layer spans `step_size` of time, in `steps_per_layer` equal steps.

    `num_independent_layers` weight sets serve equally many consecutive layers each; `num_segments` cuts the depth where
    evolved attention starts from a new initial condition. Stochastic depth drops a layer with a rate that grows
    linearly from 0 at the first layer to `drop_path` at the last (Huang et al. 2016).
    """

    num_layers: int
    num_independent_layers: int
    step_size: float = 1.0
    steps_per_layer: int = 1
    drop_path: float = 0.0
    num_segments: int = 1

    def __post_init__(self) -> None:
        for name in ("num_layers", "steps_per_layer"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.step_size < inf:
            raise UserError(f"step_size must be positive and finite, got {self.step_size}")
        if not 0 <= self.drop_path < 1:
            raise UserError(f"drop_path must lie in [0, 1), got {self.drop_path}")
        for name in ("num_independent_layers", "num_segments"):
            divisors = [k for k in range(1, self.num_layers + 1) if self.num_layers % k == 0]
            if getattr(self, name) not in divisors:
                raise UserError(
                    f"{name} = {getattr(self, name)} does not divide {self.num_layers} layers; "
                    f"choose from {', '.join(map(str, divisors))}"
                )

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """Every step of the stack in order."""
        inner = self.steps_per_layer
        per_segment = self.num_layers // self.num_segments * inner
        return tuple(
            Step(
                number=number,
                layer=number // inner,
                weights=self.weights_of(number // inner),
                t=number * self.step_size / inner,
                gamma=self.step_size / inner,
                drop_path=self.drop_path * (number // inner) / max(self.num_layers - 1, 1),
                segment=number // per_segment,
                depth=number % per_segment / inner,
                begins_segment=number % per_segment == 0,
                ends_segment=(number + 1) % per_segment == 0,
            )
            for number in range(self.num_layers * inner)
        )

    def reverse(self, step: Step) -> Step:
        """The step from its end back to its start, numbered behind all others."""
        return replace(
            step,
            number=len(self.steps) + step.number,
            t=step.t + step.gamma,
            gamma=-step.gamma,
            depth=step.depth + 1 / self.steps_per_layer,
        )

    def weights_of(self, layer: int) -> int:
        """The weight set that a layer uses: each serves L / K consecutive layers."""
        return layer * self.num_independent_layers // self.num_layers
