"""The one stack of steps that every model carries its particles through."""

from collections.abc import Mapping
from dataclasses import replace
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from splitstep.fields.attention import Attention
from splitstep.fields.evaluation import Evaluation, KeyValues, Sight
from splitstep.fields.feedforward import FeedForward
from splitstep.fields.noise import Noise
from splitstep.fields.norms import PLACEMENTS, norm
from splitstep.fields.terms import Term, right_hand_side
from splitstep.models.configuration import SplitstepConfig
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
            terms = [_term(config, part, name, leads=_leads(self.splitting, name, owner)) for owner in range(owners)]
            self.add_module(name, nn.ModuleList(terms))

    def terms(self, index: int) -> list[Term]:
        """The terms that act in sub-step `index`, in the order the splitting names them."""
        return [
            self._owned(name)[0 if self.shares_substeps else occurrence]
            for name, occurrence in self.splitting.occurrences[index].items()
        ]

    def _owned(self, name: str) -> list[Term]:
        return cast(list[Term], self.get_submodule(name))


def _leads(splitting: Splitting, name: str, owner: int) -> bool:
    """Whether this use of the term comes first among the terms of its sub-step, and so owns a joint norm."""
    uses = [substep for substep in splitting.substeps if name in substep.terms]
    return uses[owner].terms[0] == name


def _term(config: SplitstepConfig, part: str, name: str, *, leads: bool) -> Term:
    operator: nn.Module
    if name == "convection":
        operator = FeedForward(
            config.hidden_size,
            config.feed_forward_width(part),
            activation=config.hidden_act,
            bias=config.feed_forward_bias,
            dropout=config.activation_dropout,
        )
    else:
        operator = Attention(
            config.hidden_size,
            config.num_attention_heads,
            bias=config.attention_bias,
            dropout=config.attention_dropout,
        )
    has_norm = leads or not PLACEMENTS[config.norm].joint
    return Term(operator, norm=_norm(config) if has_norm else None, dropout=config.dropout)


def _norm(config: SplitstepConfig) -> nn.Module:
    return norm(config.norm_type, config.hidden_size, eps=config.layer_norm_eps)


class Stack(nn.Module):
    """All layers of an encoder or a decoder: the particles from the embedding to the head."""

    def __init__(self, config: SplitstepConfig, part: str = "encoder") -> None:
        super().__init__()
        self.scheme = config.scheme(part)
        self.schedule = config.schedule(part)
        self.placement = PLACEMENTS[config.norm]
        self.time_embedding = config.time_embedding
        self.gradient_checkpointing = False
        self.layers = nn.ModuleList(Layer(config, part) for _ in range(self.schedule.num_independent_layers))
        self.norm = _norm(config) if self.placement.final else None

    def layer(self, step: Step) -> Layer:
        """The weight set that acts in this step."""
        return cast(Layer, self.layers[step.weights])

    def forward(
        self,
        x: Float[Tensor, "batch particles dim"],
        *,
        interaction: Sight | None = None,
        coupling: Sight | None = None,
    ) -> Tensor:
        """The state after the last step, normalised where the placement asks for it."""
        sights = {"interaction": interaction or Sight(), "coupling": coupling or Sight(), "convection": Sight()}
        x = integrate(
            x,
            schedule=self.schedule,
            scheme=self.scheme,
            dynamics=Pass(self, sights),
            checkpointing=self.gradient_checkpointing and self.training,
        )
        return x if self.norm is None else self.norm(x)


class Pass(Dynamics):
    """One pass of a batch through a stack: the stack's weights, and whom each particle sees."""

    def __init__(self, stack: Stack, sights: Mapping[str, Sight]) -> None:
        self.stack = stack
        self.sights = sights

    def field(self, step: Step, index: int) -> Field:
        """The terms of the sub-step with this layer's weights, and one draw of noise for all their stages."""
        stack = self.stack
        terms = stack.layer(step).terms(index)
        noise = Noise(training=stack.training, stages=stack.scheme.tableau.stages)
        sights = [self._constant(self.sights[name]) for name in stack.scheme.splitting.substeps[index].terms]

        def field(x: Tensor, t: Time, stage: int) -> Tensor:
            noise.rewind()
            if stack.time_embedding == "field":
                x = x + sinusoid(torch.as_tensor(t, dtype=torch.float32, device=x.device), x.shape[-1]).to(x.dtype)
            evaluations = [Evaluation(t, noise, sight) for sight in sights]
            increment = right_hand_side(terms, x, evaluations, placement=stack.placement)
            return noise.drop_path(increment, step.drop_path)

        return field

    def _constant(self, sight: Sight) -> Sight:
        # A source that does not move has the same keys and values at every stage of a sub-step.
        if sight.source is None or self.stack.scheme.tableau.stages == 1:
            return sight
        return replace(sight, store=Once())

    def project(self, x: Tensor, step: Step, index: int) -> Tensor:
        """The norm around the sub-step, where the placement has one."""
        if not self.stack.placement.around:
            return x
        around = self.stack.layer(step).terms(index)[0].norm
        assert around is not None
        return around(x)


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
