"""Weights that others published, in our models: the way to compare Splitstep with the released code.

Each system is a table of patterns from our names to theirs. `{i}` stands for the number of a layer.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from splitstep.models.backbone import SplitstepPreTrainedModel
from splitstep.models.heads import SplitstepForConditionalGeneration
from splitstep.models.presets import preset
from splitstep.solver.errors import UserError, lookup

Arrays = Mapping[str, np.ndarray]


def load_published(system: str, arrays: Arrays, *, num_heads: int, **settings: Any) -> SplitstepPreTrainedModel:
    """The model of a published system with the authors' weights, under the names of their release."""
    return lookup("published system", system, PUBLISHED)(arrays, num_heads, **settings)


def copy_weights(model: SplitstepPreTrainedModel, source: Mapping[str, Tensor], *, whose: str) -> None:
    """Fill the model with these tensors; one that is missing, left over or of another shape is refused."""
    wanted = dict(model.named_parameters())
    if unplaced := sorted(source.keys() - wanted.keys()):
        raise UserError(f"{whose}: no place for {', '.join(unplaced[:3])}")
    if absent := sorted(wanted.keys() - source.keys()):
        raise UserError(f"{whose}: nothing for {', '.join(absent[:3])}")
    with torch.no_grad():
        for name, parameter in wanted.items():
            if parameter.shape != source[name].shape:
                raise UserError(f"{whose}: {name} is {tuple(source[name].shape)}, not {tuple(parameter.shape)}")
            parameter.copy_(source[name])


# Macaron Net's release (fairseq). An attention's three projections are the rows of one matrix.
MACARON_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
MACARON_IGNORED = r"version|(en|de)coder\.embed_positions\._float_tensor|(en|de)coder\.version"
MACARON_NORMS = {
    "encoder": {"convection.0": "layer_norms.2", "interaction.0": "layer_norms.0", "convection.1": "layer_norms.1"},
    "decoder": {
        "convection.0": "macaron_layer_norm",
        "interaction.0": "self_attn_layer_norm",
        "coupling.0": "encoder_attn_layer_norm",
        "convection.1": "final_layer_norm",
    },
}
MACARON_NETWORKS = {
    "convection.0": {"up_proj": "macaron_fc1", "down_proj": "macaron_fc2"},
    "convection.1": {"up_proj": "fc1", "down_proj": "fc2"},
}
MACARON_ATTENTIONS = {"interaction.0": "self_attn", "coupling.0": "encoder_attn"}


def _macaron(arrays: Arrays, num_heads: int, *, norm: str = "pre") -> SplitstepPreTrainedModel:
    arrays = {name: value for name, value in arrays.items() if not re.fullmatch(MACARON_IGNORED, name)}
    vocabulary, size = _shape(arrays, "encoder.embed_tokens.weight")
    # fairseq: pad = 1, eos = 2, positions start at pad + 1, the decoder starts with eos
    config = preset(
        "macaron",
        "seq2seq",
        vocab_size=vocabulary,
        hidden_size=size,
        num_attention_heads=num_heads,
        intermediate_size=2 * _shape(arrays, "encoder.layers.0.fc1.weight")[0],
        num_hidden_layers=_layers(arrays, "encoder"),
        num_decoder_layers=_layers(arrays, "decoder"),
        norm=norm,
        position_offset=2,
        pad_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=2,
    )
    tied = {"decoder.embed_tokens.weight", "decoder.output_projection.weight", "decoder.embed_out"}
    for name in sorted(tied & arrays.keys()):
        if not np.array_equal(arrays[name], arrays["encoder.embed_tokens.weight"]):
            raise UserError(f"macaron: {name} differs from encoder.embed_tokens.weight; all embeddings must be shared")
    left = {name: torch.from_numpy(np.array(value)) for name, value in arrays.items() if name not in tied}
    tensors = {"model.encoder.embeddings.tokens.weight": left.pop("encoder.embed_tokens.weight")}
    for part, norms in MACARON_NORMS.items():
        for ours, theirs in _macaron_names(part, config.schedule(part).num_layers, norms, final=norm == "pre"):
            if theirs not in left:
                raise UserError(f"macaron: {theirs} is missing")
            tensor = left.pop(theirs)
            targets = [ours] if isinstance(ours, str) else ours
            tensors |= dict(zip(targets, tensor.chunk(len(targets)), strict=True))
    if left:
        raise UserError(f"macaron: unknown array {', '.join(sorted(left)[:3])}")
    model = SplitstepForConditionalGeneration(config)
    copy_weights(model, tensors, whose="macaron")
    return model.eval()


def _macaron_names(
    part: str, layers: int, norms: Mapping[str, str], *, final: bool
) -> Iterator[tuple[str | list[str], str]]:
    """(our name or names, their name) of every array of one part."""
    kinds = ("weight", "bias")
    for layer in range(layers):
        ours, theirs = f"model.{part}.stack.layers.{layer}", f"{part}.layers.{layer}"
        for term, name in norms.items():
            yield from ((f"{ours}.{term}.norm.{kind}", f"{theirs}.{name}.{kind}") for kind in kinds)
        for term, network in MACARON_NETWORKS.items():
            for own, name in network.items():
                yield from ((f"{ours}.{term}.operator.{own}.{kind}", f"{theirs}.{name}.{kind}") for kind in kinds)
        for term, name in MACARON_ATTENTIONS.items():
            if term in norms:
                for kind in kinds:
                    stacked = [f"{ours}.{term}.operator.{own}.{kind}" for own in MACARON_PROJECTIONS]
                    yield stacked, f"{theirs}.{name}.in_proj_{kind}"
                    yield f"{ours}.{term}.operator.out_proj.{kind}", f"{theirs}.{name}.out_proj.{kind}"
    if final:
        yield from ((f"model.{part}.stack.norm.{kind}", f"{part}.layer_norm.{kind}") for kind in kinds)


def _layers(arrays: Arrays, part: str) -> int:
    numbers = {int(match[1]) for name in arrays if (match := re.match(rf"{part}\.layers\.(\d+)\.", name))}
    if numbers != set(range(len(numbers))) or not numbers:
        raise UserError(f"macaron: the {part}'s layers are {sorted(numbers)}, not 0, 1, 2, ...")
    return len(numbers)


def _shape(arrays: Arrays, name: str) -> tuple[int, ...]:
    if name not in arrays:
        raise UserError(f"macaron: {name} is missing")
    return tuple(arrays[name].shape)


PUBLISHED: dict[str, Callable[..., SplitstepPreTrainedModel]] = {"macaron": _macaron}
