"""The one stack of steps that every model carries its particles through."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.cache_utils import Cache, EncoderDecoderCache

from splitstep.fields.attention import Attention
from splitstep.fields.evaluation import Evaluation, KeyValues, Sight
from splitstep.fields.evolution import EVOLUTIONS, Operator
from splitstep.fields.feedforward import FEED_FORWARDS
from splitstep.fields.noise import Noise
from splitstep.fields.norms import PLACEMENTS, norm
from splitstep.fields.terms import Term, right_hand_side
from splitstep.models.configuration import SplitstepConfig
from splitstep.solver.errors import UserError
from splitstep.solver.flow import Dynamics, Field, Time, integrate
from splitstep.solver.schedules import Step
from splitstep.solver.sinusoids import sinusoid
from splitstep.solver.splittings import Splitting


class Layer(nn.Module):
    """One weight set: the terms of a step. Each sub-step owns its terms unless `share_substeps`."""

    def __init__(self, config: SplitstepConfig, part: str) -> None:
        super().__init__()
        self.splitting = config.scheme(part).splitting
        self.shares_substeps = config.share_substeps
        for name in self.splitting.terms:
            owners = 1 if config.share_substeps else self.splitting.uses(name)
            terms = [
                _term(config, part, name, first=owner == 0, leads=_leads(self.splitting, name, owner))
                for owner in range(owners)
            ]
            self.add_module(name, nn.ModuleList(terms))

    def terms(self, index: int) -> list[Term]:
        """The terms that act in sub-step `index`, in the order the splitting names them."""
        return [
            cast(list[Term], self.get_submodule(name))[self.owner(name, index)]
            for name in self.splitting.substeps[index].terms
        ]

    def owner(self, name: str, index: int) -> int:
        """Which of the layer's modules for that term acts in sub-step `index`."""
        return 0 if self.shares_substeps else self.splitting.occurrences[index][name]


def _leads(splitting: Splitting, name: str, owner: int) -> bool:
    """Whether this use of the term comes first among the terms of its sub-step, and so owns a joint norm."""
    uses = [substep for substep in splitting.substeps if name in substep.terms]
    return uses[owner].terms[0] == name


def _term(config: SplitstepConfig, part: str, name: str, *, first: bool, leads: bool) -> Term:
    placement = PLACEMENTS[config.norm]
    has_norm = leads or not placement.joint
    operator: nn.Module
    if name == "convection":
        operator = FEED_FORWARDS[config.feed_forward](
            config.hidden_size,
            config.feed_forward_width(part),
            activation=config.first_hidden_act if first and config.first_hidden_act else config.hidden_act,
            bias=config.feed_forward_bias,
            dropout=config.activation_dropout,
        )
    elif config.attention == "evolved":
        # The queries of a segment are its initial condition, so a coupling's norm stands before its values alone.
        values_only = name == "coupling" and placement.before
        has_norm = has_norm and not values_only
        operator = EVOLUTIONS[config.evolution][1](
            config.hidden_size,
            config.num_attention_heads,
            time_dim=config.evolved_time_dim,
            norm=_norm(config) if values_only else None,
        )
    else:
        operator = Attention(
            config.hidden_size,
            config.num_attention_heads,
            bias=config.attention_bias,
            dropout=config.attention_dropout,
        )
    return Term(operator, norm=_norm(config) if has_norm else None, dropout=config.dropout)


def _norm(config: SplitstepConfig) -> nn.Module:
    return norm(config.norm_type, config.hidden_size, eps=config.layer_norm_eps)


class Segment(nn.Module):
    """Layers whose attention evolves from one initial condition: what computes it, and the norm behind the last."""

    def __init__(self, config: SplitstepConfig, part: str) -> None:
        super().__init__()
        for name in ("interaction", "coupling"):
            if name in config.scheme(part).splitting.terms:
                condition = EVOLUTIONS[config.evolution][0](
                    config.hidden_size,
                    config.num_attention_heads,
                    time_dim=config.evolved_time_dim,
                    time_keys=config.time_keys,
                    dropout=config.dropout,
                )
                self.add_module(name, condition)
        self.norm = _norm(config) if PLACEMENTS[config.norm].final else None


class Stack(nn.Module):
    """All layers of an encoder or a decoder: the particles from the embedding to the head."""

    def __init__(self, config: SplitstepConfig, part: str = "encoder") -> None:
        super().__init__()
        self.scheme = config.scheme(part)
        self.schedule = config.schedule(part)
        self.placement = PLACEMENTS[config.norm]
        self.time_embedding = config.time_embedding
        self.sinusoid_ladder = config.sinusoid_ladder
        self.gradient_checkpointing = False
        self.layers = nn.ModuleList(Layer(config, part) for _ in range(self.schedule.num_independent_layers))
        evolved = config.attention == "evolved"
        segments = self.schedule.num_segments if evolved else 0
        self.segments = nn.ModuleList(Segment(config, part) for _ in range(segments))
        self.norm = _norm(config) if self.placement.final and not evolved else None
        self._derive()
        self.halting = Halting(config) if config.halting == "act" else None

    def _derive(self) -> None:
        # torch.compile cannot trace what is derived on first use, so it is derived here.
        splitting, tableau = self.scheme.splitting, self.scheme.tableau
        _ = self.schedule.steps, splitting.intervals, splitting.occurrences, tableau.rows, tableau.weights

    def layer(self, step: Step) -> Layer:
        """The weight set that acts in this step."""
        return cast(Layer, self.layers[step.weights])

    def forward(
        self,
        x: Float[Tensor, "batch particles dim"],
        *,
        interaction: Sight | None = None,
        coupling: Sight | None = None,
        coordinates: Tensor | None = None,
        cache: Cache | None = None,
        record: "Record | None" = None,
    ) -> Tensor:
        """The state after the last step, normalised where the placement asks for it.

        `coordinates` are the waves of the positions, for a time embedding that is added to the state; `record` receives
        what else a caller wants to know.
        """
        record = Record() if record is None else record
        sights = {"interaction": interaction or Sight(), "coupling": coupling or Sight(), "convection": Sight()}
        if self.scheme.reversible and torch.is_grad_enabled():
            _refuse_records(record, sights, cache)
        current = Pass(self, sights, coordinates=coordinates, cache=cache, record=record)
        x = integrate(
            x,
            schedule=self.schedule,
            scheme=self.scheme,
            dynamics=current,
            checkpointing=self.gradient_checkpointing and self.training,
        )
        if current.halted is not None:
            x, record.ponder_cost = current.halted.state, current.halted.ponder_cost
        x = x if self.norm is None else self.norm(x)
        if record.states:
            record.states[-1] = x  # the last state is the one that leaves the stack
        return x


def _refuse_records(record: "Record", sights: Mapping[str, Sight], cache: Cache | None) -> None:
    """A reversible pass keeps nothing on the way that a gradient could come back through."""
    if cache is not None:
        raise UserError("a reversible model keeps keys and values only under torch.no_grad()")
    if record.states is not None or any(sight.record is not None for sight in sights.values()):
        raise UserError("a reversible model shows its hidden states and attentions only under torch.no_grad()")


@dataclass
class Record:
    """What a pass leaves behind beside its last state: the state after every layer if a list is given for them."""

    states: list[Tensor] | None = None
    ponder_cost: Tensor | None = None


class Halting(nn.Module):
    """Adaptive computation time (Graves 2016): when a particle has seen enough."""

    def __init__(self, config: SplitstepConfig) -> None:
        super().__init__()
        self.threshold = 1.0 - config.halting_epsilon
        self.probability = nn.Linear(config.hidden_size, 1)

    def forward(self, x: Tensor) -> Tensor:
        """The probability with which each particle halts now."""
        # Not a matrix product: with one column its rounding depends on where the weights lie in memory, and a loaded
        # model would differ from the saved one in the last bit.
        return torch.sigmoid((x * self.probability.weight).sum(-1) + self.probability.bias)

    def start(self, x: Tensor) -> "Halted":
        """Nothing has halted yet."""
        nothing = x.new_zeros(x.shape[:2])
        return Halted(self, torch.zeros_like(x), nothing, nothing, nothing)


@dataclass
class Halted:
    """How far the particles of one batch have halted, and the mean of their states so far."""

    unit: Halting
    state: Tensor
    spent: Tensor  # the halting probabilities summed so far
    steps: Tensor
    remainder: Tensor
    running: Tensor | None = None

    def choose(self, x: Tensor, *, last: bool) -> Tensor:
        """The share that the state after this step has in the mean: its probability, or at the end what is left."""
        probability = self.unit(x)
        self.running = self.spent < self.unit.threshold
        ends = self.running & ((self.spent + probability >= self.unit.threshold) | torch.tensor(last, device=x.device))
        share = torch.where(ends, 1 - self.spent, probability) * self.running
        self.remainder = self.remainder + torch.where(ends, 1 - self.spent, 0.0)
        self.steps = self.steps + self.running.to(x.dtype)
        self.spent = torch.where(ends, torch.ones_like(self.spent), self.spent + share)
        return share

    def advance(self, before: Tensor, after: Tensor, share: Tensor) -> Tensor:
        """The state that goes on: a particle that has halted stays where it is."""
        assert self.running is not None
        after = torch.where(self.running.unsqueeze(-1), after, before)
        self.state = self.state + share.unsqueeze(-1) * after
        return after

    @property
    def ponder_cost(self) -> Tensor:
        """The steps taken and what was left at the end, for each particle (Graves 2016, eq. 12)."""
        return self.steps + self.remainder


class Pass(Dynamics):
    """One pass of a batch through a stack: the stack's weights, whom each particle sees, and what is kept."""

    def __init__(
        self,
        stack: Stack,
        sights: Mapping[str, Sight],
        *,
        coordinates: Tensor | None = None,
        cache: Cache | None = None,
        record: Record,
    ) -> None:
        self.stack = stack
        self.sights = sights
        self.coordinates = coordinates
        self.cache = cache
        self.record = record
        self.halted: Halted | None = None
        # By segment, because a step that is computed again in the backward pass must see its own.
        self._operators: dict[tuple[int, str], Operator] = {}
        self._before: Tensor | None = None
        self._share: Tensor | None = None

    def begin(self, x: Tensor, step: Step) -> Tensor:
        """The state with its coordinates where the time embedding is part of it, and a look at who halts."""
        stack = self.stack
        if self.record.states is not None and step.number == 0:
            self.record.states.append(x)
        if stack.time_embedding == "state":
            # x + P(position) + P(step), as the Universal Transformer publishes it
            assert self.coordinates is not None
            x = x + self.coordinates + self._time(float(step.number), x)
        if step.begins_segment and stack.segments:
            self._begin_segment(x, step.segment)
        if stack.halting is not None:
            self.halted = self.halted or stack.halting.start(x)
            self._before = x
            self._share = self.halted.choose(x, last=step.number == len(stack.schedule.steps) - 1)
        return x

    def end(self, x: Tensor, step: Step) -> Tensor:
        """The state, except where particles have halted; recorded at the end of a layer."""
        if self.halted is not None:
            assert self._before is not None
            assert self._share is not None
            x = self.halted.advance(self._before, x, self._share)
        if step.ends_segment and self.stack.segments:
            norm = cast(Segment, self.stack.segments[step.segment]).norm
            x = x if norm is None else norm(x)
        if self.record.states is not None and (step.number + 1) % self.stack.schedule.steps_per_layer == 0:
            self.record.states.append(x)
        return x

    def _begin_segment(self, x: Tensor, number: int) -> None:
        """Compute the operators of evolved attention from the state that the segment starts with."""
        for name in self.stack.scheme.splitting.terms:
            if name != "convection":
                sight = self.sights[name]
                if self.cache is not None:
                    sight = replace(sight, store=self._slot(name, number))
                condition = self.stack.segments[number].get_submodule(name)
                self._operators[number, name] = condition(x, sight)

    def field(self, step: Step, index: int) -> Field:
        """The terms of the sub-step with this layer's weights, and one draw of noise for all their stages."""
        stack = self.stack
        terms = stack.layer(step).terms(index)
        names = stack.scheme.splitting.substeps[index].terms
        stages = stack.scheme.tableau.stages
        noise = Noise(training=stack.training, stages=stages)
        once = Once() if stages > 1 else None

        def field(x: Tensor, t: Time, stage: int) -> Tensor:
            noise.rewind()
            if stack.time_embedding == "field":
                x = x + self._time(t, x)
            depth = step.depth + (t - step.t) / stack.schedule.step_size
            evaluations = [Evaluation(t, noise, self._sight(name, step, index, stage, once), depth) for name in names]
            increment = right_hand_side(terms, x, evaluations, placement=stack.placement)
            return noise.drop_path(increment, step.drop_path)

        return field

    def inputs(self, step: Step) -> list[Tensor]:
        """The weights of the step's layer, and the source where it is learnt too."""
        source = self.sights["coupling"].source
        wanted = [*self.stack.layer(step).parameters(), *([] if source is None else [source])]
        return [tensor for tensor in wanted if tensor.requires_grad]

    def project(self, x: Tensor, step: Step, index: int) -> Tensor:
        """The norm around the sub-step, where the placement has one."""
        if not self.stack.placement.around:
            return x
        around = self.stack.layer(step).terms(index)[0].norm
        assert around is not None
        return around(x)

    def _time(self, t: Time, x: Tensor) -> Tensor:
        at = torch.as_tensor(t, dtype=torch.float32, device=x.device)
        return sinusoid(at, x.shape[-1], ladder=self.stack.sinusoid_ladder).to(x.dtype)

    def _sight(self, name: str, step: Step, index: int, stage: int, once: "Once | None") -> Sight:
        """Whom the term sees, with the place where its keys and values are kept."""
        sight = self.sights[name]
        if name == "convection":
            return sight
        if step.gamma < 0:  # the way back of a reversible step, which is none of the layer's own evaluations
            sight = replace(sight, record=None)
        if self.stack.segments:
            sight = replace(sight, operator=self._operators[step.segment, name])
        splitting = self.stack.scheme.splitting
        # The source does not move, so its keys and values belong to the weights, not to the evaluation; evolved biases
        # do move.
        stays = name == "coupling" and not self.stack.segments
        if self.cache is None:
            return replace(sight, store=once) if stays else sight
        if stays:
            number = step.weights * splitting.uses(name) + self.stack.layer(step).owner(name, index)
        else:
            # One slot for each evaluation: (layer, inner step, sub-step, stage).
            occurrence = splitting.occurrences[index][name]
            number = (step.number * splitting.uses(name) + occurrence) * self.stack.scheme.tableau.stages + stage
        return replace(sight, store=self._slot(name, len(self.stack.segments) + number))

    def _slot(self, name: str, number: int) -> KeyValues:
        """A place of the cache; the first ones are for the operators of segments."""
        cache = self.cache
        if name == "coupling":
            assert isinstance(cache, EncoderDecoderCache)
            return CouplingSlot(cache, number)
        assert cache is not None
        return InteractionSlot(cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache, number)


class Once(KeyValues):
    """Keys and values of a source that stays the same: computed at the first stage, kept for the others."""

    def __init__(self) -> None:
        self.kept: tuple[Tensor, Tensor] | None = None

    def recall(self) -> tuple[Tensor, Tensor] | None:
        """What the first stage computed."""
        return self.kept

    def keep(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """What the other stages will recall."""
        self.kept = key, value
        return self.kept


@dataclass(frozen=True)
class InteractionSlot(KeyValues):
    """The keys and values of all tokens so far, at one evaluation of attention."""

    cache: Cache
    slot: int

    def recall(self) -> tuple[Tensor, Tensor] | None:
        """Nothing: new tokens always have keys of their own."""
        return None

    def keep(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append the new tokens, and return all."""
        return self.cache.update(key, value, self.slot)


@dataclass(frozen=True)
class CouplingSlot(KeyValues):
    """The keys and values of the other sequence under one set of weights, computed once for a whole generation."""

    cache: EncoderDecoderCache
    slot: int

    def recall(self) -> tuple[Tensor, Tensor] | None:
        """What the first token computed."""
        if not self.cache.is_updated.get(self.slot):
            return None
        layer = cast(Any, self.cache.cross_attention_cache.layers[self.slot])
        return layer.keys, layer.values

    def keep(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store them for every token to come."""
        self.cache.is_updated[self.slot] = True
        return self.cache.cross_attention_cache.update(key, value, self.slot)
