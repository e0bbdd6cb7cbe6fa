"""Weights that others published, in our models: the way to compare Splitstep with the released code.

Each system is a list of entries from our names to theirs.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from splitstep.models.backbone import SplitstepPreTrainedModel
from splitstep.models.configuration import SplitstepConfig
from splitstep.models.heads import SplitstepForConditionalGeneration
from splitstep.models.presets import preset
from splitstep.solver.errors import UserError, lookup

Arrays = Mapping[str, np.ndarray]


def load_published(system: str, arrays: Arrays, *, num_heads: int, norm: str = "pre") -> SplitstepPreTrainedModel:
    """The model of a published system with the authors' weights, under the names of their release."""
    return lookup("published system", system, PUBLISHED)(arrays, num_heads, norm)


def copy_weights(model: SplitstepPreTrainedModel, source: Mapping[str, Tensor], *, whose: str) -> None:
    """Fill the model with these tensors; one that is missing, left over or of another shape is refused."""
    wanted = dict(model.named_parameters()) | dict(model.named_buffers())
    if unplaced := sorted(source.keys() - wanted.keys()):
        raise UserError(f"{whose}: no place for {', '.join(unplaced[:3])}")
    if absent := sorted(wanted.keys() - source.keys()):
        raise UserError(f"{whose}: nothing for {', '.join(absent[:3])}")
    with torch.no_grad():
        for name, tensor in wanted.items():
            if tensor.shape != source[name].shape:
                raise UserError(f"{whose}: {name} is {tuple(source[name].shape)}, not {tuple(tensor.shape)}")
            tensor.copy_(source[name])


@dataclass(frozen=True)
class Entry:
    """One array of a release: our name or names for it, theirs, and how it is turned and cut."""

    ours: str | tuple[str, ...]
    theirs: str
    transposed: bool = False
    cut: tuple[int, ...] | None = None  # columns of each of our tensors; None: equal shares of the rows

    def tensors(self, array: np.ndarray) -> dict[str, Tensor]:
        """Our tensors from their array."""
        tensor = torch.from_numpy(np.array(array, dtype=np.float32))
        if isinstance(self.ours, str):
            return {self.ours: tensor.T if self.transposed else tensor}
        pieces = tensor.chunk(len(self.ours)) if self.cut is None else tensor.split(self.cut, dim=1)
        return dict(zip(self.ours, pieces, strict=True))


def _filled(
    system: str, model: SplitstepPreTrainedModel, arrays: Arrays, entries: Iterable[Entry]
) -> SplitstepPreTrainedModel:
    """The model with every array in its place; none may be missing or left over."""
    left = dict(arrays)
    tensors: dict[str, Tensor] = {}
    for entry in entries:
        if entry.theirs not in left:
            raise UserError(f"{system}: {entry.theirs} is missing")
        tensors |= entry.tensors(left.pop(entry.theirs))
    if left:
        raise UserError(f"{system}: unknown array {', '.join(sorted(left)[:3])}")
    copy_weights(model, tensors, whose=system)
    return model.eval()


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


def _macaron(arrays: Arrays, num_heads: int, norm: str) -> SplitstepPreTrainedModel:
    arrays = {name: value for name, value in arrays.items() if not re.fullmatch(MACARON_IGNORED, name)}
    vocabulary, size = _shape(arrays, "encoder.embed_tokens.weight", system="macaron")
    # fairseq: pad = 1, eos = 2, positions start at pad + 1, the decoder starts with eos
    config = preset(
        "macaron",
        "seq2seq",
        vocab_size=vocabulary,
        hidden_size=size,
        num_attention_heads=num_heads,
        intermediate_size=2 * _shape(arrays, "encoder.layers.0.fc1.weight", system="macaron")[0],
        num_hidden_layers=_count(arrays, r"encoder\.layers\.(\d+)\.", system="macaron"),
        num_decoder_layers=_count(arrays, r"decoder\.layers\.(\d+)\.", system="macaron"),
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
    arrays = {name: value for name, value in arrays.items() if name not in tied}
    return _filled("macaron", SplitstepForConditionalGeneration(config), arrays, _macaron_entries(config))


def _macaron_entries(config: SplitstepConfig) -> Iterator[Entry]:
    yield Entry("model.encoder.embeddings.tokens.weight", "encoder.embed_tokens.weight")
    kinds = ("weight", "bias")
    for part, norms in MACARON_NORMS.items():
        for layer in range(config.schedule(part).num_layers):
            ours, theirs = f"model.{part}.stack.layers.{layer}", f"{part}.layers.{layer}"
            for kind in kinds:
                for term, name in norms.items():
                    yield Entry(f"{ours}.{term}.norm.{kind}", f"{theirs}.{name}.{kind}")
                for term, network in MACARON_NETWORKS.items():
                    for own, name in network.items():
                        yield Entry(f"{ours}.{term}.operator.{own}.{kind}", f"{theirs}.{name}.{kind}")
                for term, name in MACARON_ATTENTIONS.items():
                    if term in norms:
                        stacked = tuple(f"{ours}.{term}.operator.{own}.{kind}" for own in MACARON_PROJECTIONS)
                        yield Entry(stacked, f"{theirs}.{name}.in_proj_{kind}")
                        yield Entry(f"{ours}.{term}.operator.out_proj.{kind}", f"{theirs}.{name}.out_proj.{kind}")
        if config.norm == "pre":
            for kind in kinds:
                yield Entry(f"model.{part}.stack.norm.{kind}", f"{part}.layer_norm.{kind}")


# TransEvolve's release. Its second attention norm stands before the values of the other sequence.
TRANSEVOLVE_NORM = {"gamma": "weight", "beta": "bias"}
TRANSEVOLVE_TERMS = {
    "encoder": {"interaction": ("", "attention")},
    "decoder": {"interaction": ("self.", "self"), "coupling": ("cross.", "cross")},
}
TRANSEVOLVE_RANDOM = {"svals": "values", "bias": "bias", "G_U": "left", "G_V": "right"}


def _transevolve(arrays: Arrays, num_heads: int, norm: str) -> SplitstepPreTrainedModel:
    if norm != "pre":
        raise UserError(f"transevolve: its norms come first; got norm {norm!r}")
    vocabulary, size = _shape(arrays, "embedding", system="transevolve")
    width = _shape(arrays, "encoder.segment0.query_projection", system="transevolve")[0]
    segments = _count(arrays, r"encoder\.segment(\d+)\.", system="transevolve")
    layers = _count(arrays, r"encoder\.segment0\.layer(\d+)\.", system="transevolve")
    feed_forward = "random" if "encoder.segment0.layer0.ff.1.svals" in arrays else "full"
    inner = _shape(arrays, "encoder.segment0.layer0.ff.1.bias", system="transevolve")[0]
    config = preset(
        f"transevolve-{feed_forward}-1",
        "seq2seq",
        vocab_size=vocabulary,
        hidden_size=size,
        num_attention_heads=num_heads,
        intermediate_size=inner,
        num_hidden_layers=segments * layers,
        num_segments=segments,
        time_dim=(width - size) // num_heads,
        pad_token_id=0,
        decoder_start_token_id=1,
        eos_token_id=2,
    )
    arrays = {
        name: np.squeeze(value, -1) if name.endswith(".svals") and value.ndim == 2 else value
        for name, value in arrays.items()
    }
    model = SplitstepForConditionalGeneration(config)
    return _filled("transevolve", model, arrays, _transevolve_entries(config, layers, size, width))


def _transevolve_entries(config: SplitstepConfig, layers: int, size: int, width: int) -> Iterator[Entry]:
    yield Entry("model.encoder.embeddings.tokens.weight", "embedding")
    for part, terms in TRANSEVOLVE_TERMS.items():
        stack = f"model.{part}.stack"
        for segment in range(config.num_segments):
            theirs = f"{part}.segment{segment}"
            for term, (prefix, _) in terms.items():
                for kind in ("query", "key"):
                    ours = f"{stack}.segments.{segment}.{term}.{kind}"
                    columns = (size, width - size)  # content, time
                    yield Entry((f"{ours}.weight", f"{ours}_time"), f"{theirs}.{prefix}{kind}_projection", cut=columns)
            for name, own in TRANSEVOLVE_NORM.items():
                yield Entry(f"{stack}.segments.{segment}.norm.{own}", f"{theirs}.out_norm.{name}")
            for number in range(layers):
                layer = f"{stack}.layers.{segment * layers + number}"
                yield from _transevolve_layer(config, layer, f"{theirs}.layer{number}", terms)


def _transevolve_layer(
    config: SplitstepConfig, ours: str, theirs: str, terms: Mapping[str, tuple[str, str]]
) -> Iterator[Entry]:
    for term, (_, name) in terms.items():
        yield Entry(f"{ours}.{term}.0.operator.coefficients", f"{theirs}.{name}.coefficients")
        yield Entry(f"{ours}.{term}.0.operator.out_proj.weight", f"{theirs}.{name}.linear_out", transposed=True)
        norm = f"{ours}.{term}.0.operator.norm" if term == "coupling" else f"{ours}.{term}.0.norm"
        for kind, own in TRANSEVOLVE_NORM.items():
            yield Entry(f"{norm}.{own}", f"{theirs}.{name}.norm.{kind}")
    for kind, own in TRANSEVOLVE_NORM.items():
        yield Entry(f"{ours}.convection.0.norm.{own}", f"{theirs}.ff.norm.{kind}")
    for number, projection in enumerate(("up_proj", "down_proj"), start=1):
        network = f"{ours}.convection.0.operator.{projection}"
        if config.feed_forward == "full":
            yield Entry(f"{network}.weight", f"{theirs}.ff.{number}.kernel", transposed=True)
            yield Entry(f"{network}.bias", f"{theirs}.ff.{number}.bias")
        else:
            for name, own in TRANSEVOLVE_RANDOM.items():
                yield Entry(f"{network}.{own}", f"{theirs}.ff.{number}.{name}")


def _count(arrays: Arrays, pattern: str, *, system: str) -> int:
    """How many numbered things of a kind there are, which must be 0, 1, 2, ..."""
    numbers = {int(match[1]) for name in arrays if (match := re.match(pattern, name))}
    if numbers != set(range(len(numbers))) or not numbers:
        raise UserError(f"{system}: {pattern} is there for {sorted(numbers)}, not for 0, 1, 2, ...")
    return len(numbers)


def _shape(arrays: Arrays, name: str, *, system: str) -> tuple[int, ...]:
    if name not in arrays:
        raise UserError(f"{system}: {name} is missing")
    return tuple(arrays[name].shape)


PUBLISHED: dict[str, Callable[..., SplitstepPreTrainedModel]] = {"macaron": _macaron, "transevolve": _transevolve}
