"""Which schemes are compared, and on what terms: equal parameters, operations or time, or as they are."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from splitstep.models.presets import PRESETS, SCHEME_SETTINGS
from splitstep.recipe import Recipe, recipe
from splitstep.solver.errors import UserError, lookup
from splitstep.solver.tableaus import TABLEAUS
from splitstep.tables import setting, with_settings

if TYPE_CHECKING:
    from splitstep.models.accounting import Parameters
    from splitstep.models.configuration import SplitstepConfig

TOLERANCE = 0.01  # within which parameters count as equal


@dataclass(frozen=True)
class Candidate:
    """A preset with further settings of the model, as `parallel/num_independent_layers=3` names it.

    `:1` behind the name is the most seeds it is trained with, for a scheme that costs too much.
    """

    name: str
    settings: dict[str, Any]
    seeds: int | None = None

    @classmethod
    def named(cls, text: str) -> "Candidate":
        """The scheme of a name."""
        name, _, seeds = text.partition(":")
        if seeds and not (seeds.isdecimal() and int(seeds)):
            raise UserError(f"the seeds of a scheme are a number from 1 on, got {text!r}")
        first, *others = name.split("/")
        lookup("scheme", first, PRESETS)
        further = dict(map(setting, others))
        if "preset" in further:
            raise UserError(f"a scheme begins with its preset, so {name} has two")
        return cls(name, {"preset": first, **further}, int(seeds) if seeds else None)

    def check(self, model: Mapping[str, Any]) -> None:
        """Refuse what the [model] of a recipe sets in the place of what makes the scheme this one."""
        own = {key: value for key, value in PRESETS[self.settings["preset"]].items() if key in SCHEME_SETTINGS}
        for key in own:
            if key in model and key not in self.settings and model[key] != own[key]:
                raise UserError(
                    f"{self.name} has {key} = {own[key]!r}, and the recipe sets model.{key} = {model[key]!r}; "
                    f"say it of the scheme: {self.name}/{key}={model[key]}"
                )


@dataclass(frozen=True)
class Contestant:
    """A scheme with the recipe it is trained by, and what was adjusted to make the terms equal."""

    scheme: Candidate
    recipe: Recipe
    config: "SplitstepConfig"
    parameters: "Parameters"
    flops_per_unit: int
    updates: int
    adjusted: dict[str, Any] = field(default_factory=dict)
    pace: float | None = None  # measured seconds of an update


def with_scheme(whole: Recipe, scheme: Candidate, **adjusted: Any) -> Recipe:
    """The recipe with another scheme, everything else equal."""
    scheme.check(whole.model)
    tables = whole.settings() | {"published": whole.published}
    tables["model"] |= scheme.settings
    settings = [(f"{section}.{key}", value) for section, keys in adjusted.items() for key, value in keys.items()]
    return recipe(with_settings(tables, settings))


def contestants(
    whole: Recipe, names: list[str], match: str, *, pace: Mapping[str, float] | None = None
) -> list[Contestant]:
    """The schemes on equal terms; the first is the baseline. `pace` has the seconds that an update of each takes."""
    from splitstep.models.accounting import empty_model, parameters
    from splitstep.training.costs import training_flops
    from splitstep.training.ready import configuration, task_of, updates_of

    schemes = list(map(Candidate.named, names))
    if len({scheme.name for scheme in schemes}) < max(len(schemes), 2):
        raise UserError(f"a comparison needs schemes that differ, and two of them, got {', '.join(names) or 'none'}")
    task = task_of(whole)
    asked = updates_of(task, whole.training)

    def counted(scheme: Candidate, **adjusted: Any) -> Contestant:
        run = with_scheme(whole, scheme, **adjusted)
        config = configuration(run, task)
        shown = {key: value for section in adjusted.values() for key, value in section.items()}
        counts = parameters(empty_model(config, task.model())), training_flops(run, task, config)
        own = None if pace is None else pace[scheme.name]
        return Contestant(scheme, run, config, *counts, run.training.updates or asked, shown, own)

    plain = list(map(counted, schemes))
    rule = lookup("match", match, MATCHES)
    return [plain[0], *(rule(plain[0], other, counted) for other in plain[1:])]


Counted = Callable[..., Contestant]


def _as_they_are(baseline: Contestant, other: Contestant, counted: Counted) -> Contestant:
    return other


def _equal_parameters(baseline: Contestant, other: Contestant, counted: Counted) -> Contestant:
    """The width of the feed-forward network is changed until the counts agree."""
    _refuse_fewer_by_design(baseline, other)
    aim, now = baseline.parameters.total, other.parameters.total
    if abs(now / aim - 1) <= TOLERANCE / 10:
        return other
    width = other.config.intermediate_size
    # Parameters are linear in the width, so two counts tell the third.
    slope = (counted(other.scheme, model={"intermediate_size": 2 * width}).parameters.total - now) / width
    for step in width_steps(other.config):
        best = max(round((width + (aim - now) / slope) / step) * step, step)
        found = counted(other.scheme, model={"intermediate_size": best})
        if abs(found.parameters.total / aim - 1) <= TOLERANCE:
            return found
    raise UserError(
        f"{other.scheme.name} cannot have {aim:,} parameters: with intermediate_size = {best} it "
        f"has {found.parameters.total:,}; match flops or none"
    )


def width_steps(config: "SplitstepConfig") -> tuple[int, int]:
    """Steps of the feed-forward width that divide among the networks of a layer: for the hardware, and the least."""
    least = math.lcm(*(config.intermediate_size // config.feed_forward_width(part) for part in config.parts))
    return math.lcm(8, least), least  # matrix products of a multiple of 8 run at full speed


def shares_weights(config: "SplitstepConfig") -> bool:
    """Whether some layers have the weights of others."""
    schedules = map(config.schedule, config.parts)
    return any(schedule.num_independent_layers < schedule.num_layers for schedule in schedules)


def _refuse_fewer_by_design(baseline: Contestant, other: Contestant) -> None:
    """Refuse to match a scheme whose point is to have fewer parameters with one that has them all."""
    for reason, holds in FEWER_BY_DESIGN.items():
        has = [one.scheme.name for one in (baseline, other) if holds(one.config)]
        if len(has) == 1:
            raise UserError(
                f"{has[0]} {reason}: fewer parameters are its point, so matching them would take it away; "
                "use --match flops or --match none"
            )


FEWER_BY_DESIGN: dict[str, Callable[["SplitstepConfig"], bool]] = {
    "shares weights among layers": shares_weights,
    "has fixed random feed-forward weights": lambda config: config.feed_forward == "random",
    "has rotations for feed-forward weights": lambda config: config.feed_forward == "rotated",
}


def _equal_flops(baseline: Contestant, other: Contestant, counted: Counted) -> Contestant:
    for one in (baseline, other):
        if TABLEAUS[one.config.integrator].adaptive:
            raise UserError(
                f"{one.scheme.name} chooses its steps as it goes, so its operations are not known beforehand; "
                "use --match seconds or --match none"
            )
    return _longer(other, baseline.flops_per_unit / other.flops_per_unit, counted)


def _equal_seconds(baseline: Contestant, other: Contestant, counted: Counted) -> Contestant:
    assert baseline.pace is not None
    assert other.pace is not None
    return _longer(other, baseline.pace / other.pace, counted)


def _longer(other: Contestant, share: float, counted: Counted) -> Contestant:
    """The number of updates is changed so that training costs the same; schedules and evaluations keep their shape."""
    if abs(share - 1) < TOLERANCE:
        return other
    training = other.recipe.training
    lengths = {key: getattr(training, key) for key in ("warmup", "evaluate_every", "save_every", "period")}
    lengths = {"updates": other.updates, **lengths}
    scaled = {key: max(round(value * share), 1) for key, value in lengths.items() if value}
    return counted(other.scheme, training=scaled)


MATCHES: dict[str, Callable[[Contestant, Contestant, Counted], Contestant]] = {
    "none": _as_they_are,
    "parameters": _equal_parameters,
    "flops": _equal_flops,
    "seconds": _equal_seconds,
}
