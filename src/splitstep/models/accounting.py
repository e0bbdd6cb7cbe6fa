"""What a model costs: parameters by part, evaluations of its fields, floating-point operations."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from splitstep.fields.feedforward import GATED, block_size
from splitstep.models.backbone import SplitstepPreTrainedModel
from splitstep.models.configuration import SplitstepConfig
from splitstep.models.heads import (
    SplitstepForCausalLM,
    SplitstepForConditionalGeneration,
    SplitstepForImageClassification,
    SplitstepForMaskedLM,
    SplitstepForSequenceClassification,
    SplitstepForSequencePairClassification,
)

# The model whose parameters are counted for a configuration of each kind, where no other is asked for.
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
        counts[part_of(name)] += parameter.numel()
    return Parameters(**counts)


def part_of(name: str) -> str:
    """The part of a model that has the parameter of this name."""
    return "body" if ".stack." in f".{name}" else "embeddings" if ".embeddings." in f".{name}" else "head"


# Models that read a whole text and say one thing.
READERS = (SplitstepForSequenceClassification, SplitstepForSequencePairClassification)


def empty_model(
    config: SplitstepConfig, model: type[SplitstepPreTrainedModel] | None = None
) -> SplitstepPreTrainedModel:
    """The model of a configuration without memory for its weights."""
    with torch.device("meta"):
        return (model or COUNTED[config.kind])(config)


def sequence_length(config: SplitstepConfig) -> int:
    """How many particles a full input has."""
    if config.kind != "image":
        return config.max_position_embeddings
    return (config.image_size // config.patch_size) ** 2 + (config.pooling == "first")


def flops_per_token(
    config: SplitstepConfig,
    *,
    length: int | None = None,
    sequences: int = 1,
    shares: Sequence[float] | None = None,
    model: type[SplitstepPreTrainedModel] | None = None,
) -> int:
    """Floating-point operations of a forward pass over some sequences, a particle, at that length (full by default).

    A multiplication and its addition count as two; norms, activations and the softmax are left out, and attention is
    counted over all keys whether a mask hides them or not. A translation has source and target of the same length, and
    one token is a pair of them. An adaptive softmax is counted with all its bands, as generation evaluates it; its loss
    evaluates a rarer band for the `shares` of tokens that are in it. Training costs three times as much; a little less
    where networks are built from fixed matrices, which have no gradient (4 % with 256 particles of width 64).
    """
    n = sequence_length(config) if length is None else length
    total = 0.0
    for part in config.parts:
        scheme, steps = config.scheme(part), len(config.schedule(part).steps)
        attention = _evolved_flops if config.attention == "evolved" else _full_flops
        for term in scheme.splitting.terms:
            if term == "convection":
                total += steps * scheme.evaluations(term) * _convection_flops(config, part, n * sequences)
            else:
                evaluation, substep, segment = attention(config, term, n)
                uses = scheme.splitting.uses(term) * (2 if scheme.reversible else 1)
                total += steps * (scheme.evaluations(term) * evaluation + uses * substep)
                total += config.num_segments * segment
    if model in READERS:
        return round(total + _reading_flops(config, model, n))
    return round(total + _outer_flops(config, n, shares))


def _full_flops(config: SplitstepConfig, term: str, n: int) -> tuple[int, int, int]:
    """(an evaluation, a sub-step, a segment) of attention: scores and means of values, and the projections."""
    d = config.hidden_size
    if term == "interaction":
        return 8 * d * d + 4 * n * d, 0, 0
    # The keys and values of the source are computed once a sub-step, not once a stage.
    return 4 * d * d + 4 * n * d, 4 * d * d, 0


def _evolved_flops(config: SplitstepConfig, term: str, n: int) -> tuple[int, int, int]:
    """The same of evolved attention, in the forms it is computed in."""
    d, heads = config.hidden_size, config.num_attention_heads
    time = heads * config.evolved_time_dim
    projections = 4 * d * (d + time)
    if config.evolution == "bilinear":  # an ordinary kernel, one channel wider
        return 2 * d * d + 4 * n * (d + time + heads), 0, projections
    # E once a segment; then the biases, E @ [w v | w], and the way out
    once = projections + 2 * n * (d + time)
    return 2 * (d + time) * heads + 2 * n * (d + heads) + 2 * d * d, 0, once


def _convection_flops(config: SplitstepConfig, part: str, particles: int) -> float:
    d, width = config.hidden_size, config.feed_forward_width(part)
    if config.feed_forward == "rotated":
        block = block_size(d)
        turns = 2 * (width + d) // block  # blocks, each of which has its matrix built for all tokens of a pass
        return 4 * (width + d) * block + turns * 2 * block**3 / particles
    matrices = 3 if config.hidden_act in GATED else 2
    # A random network builds its two matrices anew at every time, for all tokens of a pass.
    building = 4 * d * min(d, width) * width / particles if config.feed_forward == "random" else 0
    return 2 * matrices * d * width + building


def _outer_flops(config: SplitstepConfig, n: int, shares: Sequence[float] | None) -> float:
    d = config.hidden_size
    if config.kind == "image":
        patches = (config.image_size // config.patch_size) ** 2
        cut = 2 * config.num_channels * config.patch_size**2 * d * patches
        return (cut + 2 * d * (config.num_labels or 0)) / n
    if config.adaptive_cutoffs is not None:
        return _adaptive_flops(config, shares)
    transform = 2 * d * d if config.kind == "encoder" and config.mlm_transform else 0
    return transform + 2 * d * config.vocab_size


def _reading_flops(config: SplitstepConfig, model: type[SplitstepPreTrainedModel], n: int) -> float:
    """The head's matrices once a text."""
    head = [p for name, p in empty_model(config, model).named_parameters() if not name.startswith("model.")]
    return sum(2 * p.numel() for p in head if p.ndim == 2) / n


def _adaptive_flops(config: SplitstepConfig, shares: Sequence[float] | None) -> float:
    """The projections of all bands on the way in; on the way out those of the rarer ones, and their tables."""
    d, (first, *rare) = config.hidden_size, config.adaptive_bands
    inwards = sum(2 * band.width * d for band in config.adaptive_bands)
    head = 2 * d * (first.stop + len(rare))
    bands = (2 * band.width * (d + band.stop - band.start) for band in rare)
    return inwards + head + sum(share * band for share, band in zip(shares or [1.0] * len(rare), bands, strict=True))


def cache_per_token(config: SplitstepConfig) -> dict[str, int]:
    """Numbers that generation keeps for each token written, and for each token of the source."""
    if config.kind not in ("causal", "seq2seq"):
        return {}
    part, d = config.parts[-1], config.hidden_size
    scheme, schedule = config.scheme(part), config.schedule(part)
    evaluated = {term: len(schedule.steps) * scheme.evaluations(term) for term in ("interaction", "coupling")}
    if config.attention == "evolved":
        bias = config.num_attention_heads if config.evolution == "published" else 0
        once = config.num_segments * (d + config.num_attention_heads * config.evolved_time_dim)
        kept = {term: once + times * (d + bias) for term, times in evaluated.items()}
    else:
        uses = 1 if config.share_substeps else scheme.splitting.uses("coupling")
        kept = {"interaction": evaluated["interaction"] * 2 * d}
        kept["coupling"] = schedule.num_independent_layers * uses * 2 * d
    return {"written": kept["interaction"]} | ({"source": kept["coupling"]} if config.kind == "seq2seq" else {})


def account(config: SplitstepConfig, model: type[SplitstepPreTrainedModel] | None = None) -> dict[str, Any]:
    """What `splitstep params` prints."""
    counted = parameters(empty_model(config, model))
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
        "flops_per_token": flops_per_token(config, model=model),
        "sequence_length": sequence_length(config),
        "cache_per_token": cache_per_token(config),
        "evaluations_per_layer": {
            term: config.steps_per_layer * config.scheme(last).evaluations(term)
            for term in config.scheme(last).splitting.terms
        },
        "order": {part: config.scheme(part).order for part in config.parts},
    }
