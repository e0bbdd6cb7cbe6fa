"""What a model costs: parameters by part, evaluations of its fields, floating-point operations."""

from dataclasses import dataclass
from typing import Any

import torch

from splitstep.fields.feedforward import GATED
from splitstep.models.backbone import SplitstepPreTrainedModel
from splitstep.models.configuration import SplitstepConfig
from splitstep.models.heads import (
    SplitstepForCausalLM,
    SplitstepForConditionalGeneration,
    SplitstepForImageClassification,
    SplitstepForMaskedLM,
)

# The model whose parameters are counted for a configuration of each kind.
COUNTED: dict[str, type[SplitstepPreTrainedModel]] = {
    "encoder": SplitstepForMaskedLM,
    "causal": SplitstepForCausalLM,
    "seq2seq": SplitstepForConditionalGeneration,
    "image": SplitstepForImageClassification,
}


@dataclass(frozen=True)
class Parameters:
    """Unique parameters: tied weights count as embeddings, the body is the stacks with their final norms."""

    body: int
    embeddings: int
    head: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.body + self.embeddings + self.head


def parameters(model: SplitstepPreTrainedModel) -> Parameters:
    """The unique parameters of a model by part."""
    counts = {"body": 0, "embeddings": 0, "head": 0}
    for name, parameter in model.named_parameters():  # which gives a shared parameter once, under its first name
        part = "body" if ".stack." in f".{name}" else "embeddings" if ".embeddings." in f".{name}" else "head"
        counts[part] += parameter.numel()
    return Parameters(**counts)


def empty_model(config: SplitstepConfig) -> SplitstepPreTrainedModel:
    """The model of a configuration without memory for its weights."""
    with torch.device("meta"):
        return COUNTED[config.kind](config)


def sequence_length(config: SplitstepConfig) -> int:
    """How many particles a full input has."""
    if config.kind != "image":
        return config.max_position_embeddings
    return (config.image_size // config.patch_size) ** 2 + (config.pooling == "first")


def flops_per_token(config: SplitstepConfig, *, length: int | None = None) -> int:
    """Floating-point operations of a forward pass, a particle, at that sequence length (full by default).

    A multiplication and its addition count as two; norms, activations and the softmax are left out, and attention is
    counted over all keys whether a mask hides them or not. A translation has source and target of the same length, and
    one token is a pair of them. Training costs three times as much.
    """
    n = sequence_length(config) if length is None else length
    d = config.hidden_size
    total = 0
    for part in config.parts:
        scheme, steps = config.scheme(part), len(config.schedule(part).steps)
        matrices = 3 if config.hidden_act in GATED else 2
        seen = 4 * n * d  # scores, and the mean of values
        once = {
            "interaction": 8 * d * d + seen,
            "coupling": 4 * d * d + seen,
            "convection": 2 * matrices * d * config.feed_forward_width(part),
        }
        total += steps * sum(scheme.evaluations(term) * once[term] for term in scheme.splitting.terms)
        # The keys and values of the source are computed once a sub-step, not once a stage.
        total += steps * scheme.splitting.uses("coupling") * 4 * d * d
    return total + _outer_flops(config, n)


def _outer_flops(config: SplitstepConfig, n: int) -> int:
    d = config.hidden_size
    if config.kind == "image":
        patches = (config.image_size // config.patch_size) ** 2
        cut = 2 * config.num_channels * config.patch_size**2 * d * patches
        return (cut + 2 * d * (config.num_labels or 0)) // n
    transform = 2 * d * d if config.kind == "encoder" and config.mlm_transform else 0
    return transform + 2 * d * config.vocab_size


def account(config: SplitstepConfig) -> dict[str, Any]:
    """What `splitstep params` prints."""
    counted = parameters(empty_model(config))
    last = config.parts[-1]
    schedules = {part: config.schedule(part) for part in config.parts}
    return {
        "total": counted.total,
        "body": counted.body,
        "embeddings": counted.embeddings,
        "head": counted.head,
        "layers": sum(schedule.num_layers for schedule in schedules.values()),
        "independent_layers": sum(schedule.num_independent_layers for schedule in schedules.values()),
        "sharing": {
            part: [schedule.weights_of(layer) for layer in range(schedule.num_layers)]
            for part, schedule in schedules.items()
        },
        "flops_per_token": flops_per_token(config),
        "sequence_length": sequence_length(config),
        "evaluations_per_layer": {
            term: config.steps_per_layer * config.scheme(last).evaluations(term)
            for term in config.scheme(last).splitting.terms
        },
        "order": {part: config.scheme(part).order for part in config.parts},
    }
