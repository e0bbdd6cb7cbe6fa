"""Beam search beside what a user would pick instead: transformers' `generate` and Marian, ctranslate2.

All outputs have full length, which leaves nothing to gain by dropping sentences. Weights are random.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from splitstep.bench import Case, Missing, Run, precisions, race
from splitstep.models.decoding import beam_search
from splitstep.models.heads import SplitstepForConditionalGeneration
from splitstep.models.presets import preset
from splitstep.models.quantized import quantized

BEAMS, SOURCE, TARGET, VOCABULARY = 5, 20, 25, 10_000
# Layers of each tower, width, heads, sentences of a batch.
SIZES = ((6, 512, 8, 64), (4, 128, 4, 64))


def cases(*, repeats: int) -> Iterator[Case]:
    """A batch of sentences through each decoder; the ratio is to Marian by `generate`, in float32."""
    for layers, width, heads, sentences in SIZES:
        ids = torch.randint(3, VOCABULARY, (sentences, SOURCE))
        runs = _ours(layers, width, heads, ids) | _peers(layers, width, heads, ids)
        title = f"{layers}+{layers} layers, d {width}, beam {BEAMS}"
        yield from race(title, runs, reference=("transformers Marian",), precision="float32", repeats=repeats)


def _model(name: str, layers: int, width: int, heads: int) -> SplitstepForConditionalGeneration:
    config = preset(
        name,
        "seq2seq",
        hidden_size=width,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        vocab_size=VOCABULARY,
        tie_word_embeddings=False,  # a random tied model repeats its last token for ever
        decoder_start_token_id=1,
        pad_token_id=0,
    )
    return SplitstepForConditionalGeneration(config).eval()


def _ours(layers: int, width: int, heads: int, ids: Tensor) -> dict[str, Run | Missing]:
    model, mask = _model("transformer", layers, width, heads), torch.ones_like(ids)
    evolved = _model("transevolve-full-1", layers, width, heads)
    small = quantized(model)

    def search(searched: SplitstepForConditionalGeneration, dtype: torch.dtype = torch.float32) -> Run:
        def run() -> None:
            with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
                beam_search(searched, ids, mask, num_beams=BEAMS, max_new_tokens=TARGET)

        return run

    further = {f"splitstep, {name}": search(model, dtype) for name, dtype in precisions().items() if name != "float32"}
    return {
        "splitstep, generate": _generate(model, ids),
        "splitstep": search(model),
        **further,
        "splitstep, int8": search(small),
        "splitstep, transevolve-full-1": search(evolved),
    }


def _generate(model: Any, ids: Tensor) -> Run:
    settings = {"num_beams": BEAMS, "do_sample": False, "early_stopping": False}

    def run() -> None:
        model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=TARGET, **settings)

    return run


def _peers(layers: int, width: int, heads: int, ids: Tensor) -> dict[str, Run | Missing]:
    from transformers import MarianConfig, MarianMTModel

    towers: dict[str, Any] = {
        f"{tower}_{what}": value
        for tower in ("encoder", "decoder")
        for what, value in (("layers", layers), ("attention_heads", heads), ("ffn_dim", 4 * width))
    }
    config = MarianConfig(
        **towers,
        vocab_size=VOCABULARY,
        d_model=width,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
        decoder_start_token_id=1,
        forced_eos_token_id=None,
        max_position_embeddings=64,
    )
    model = MarianMTModel(config).eval()
    runs: dict[str, Run | Missing] = {"transformers Marian": _generate(model, ids)}
    for kind in ("float32", "int8"):
        runs[f"ctranslate2, {kind}"] = _ctranslate2(layers, width, heads, ids, kind)
    return runs


def _ctranslate2(layers: int, width: int, heads: int, ids: Tensor, kind: str) -> Run | Missing:
    try:
        import ctranslate2
    except ModuleNotFoundError as error:
        return Missing(str(error.name))
    words = [f"w{number}" for number in range(VOCABULARY)]
    spec = ctranslate2.specs.TransformerSpec.from_config((layers, layers), heads, pre_norm=True)
    _fill(spec, layers, width)
    spec.register_source_vocabulary(words)
    spec.register_target_vocabulary(words)
    spec.config.add_source_eos = spec.config.add_source_bos = False
    spec.config.bos_token = spec.config.eos_token = spec.config.unk_token = words[1]
    spec.validate()
    spec.optimize(quantization=kind)
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, "model")
        made.mkdir()
        spec.save(str(made))
        threads = torch.get_num_threads()
        translator = ctranslate2.Translator(str(made), compute_type=kind, inter_threads=1, intra_threads=threads)
    sentences = [[words[number] for number in row] for row in ids.tolist()]
    lengths = {"min_decoding_length": TARGET, "max_decoding_length": TARGET}

    def run() -> None:
        translator.translate_batch(sentences, beam_size=BEAMS, max_batch_size=0, **lengths)

    return run


def _fill(spec: Any, layers: int, width: int) -> None:
    """Random weights of the right sizes in ctranslate2's own tree."""

    def matrix(rows: int, columns: int) -> NDArray[np.float32]:
        return np.random.default_rng(0).standard_normal((rows, columns), dtype=np.float32) * columns**-0.5

    def linear(place: Any, outputs: int, inputs: int) -> None:
        place.weight, place.bias = matrix(outputs, inputs), np.zeros(outputs, np.float32)

    def norm(place: Any) -> None:
        place.gamma, place.beta = np.ones(width, np.float32), np.zeros(width, np.float32)

    for tower in (spec.encoder, spec.decoder):
        embeddings = tower.embeddings[0] if isinstance(tower.embeddings, list) else tower.embeddings
        embeddings.weight = matrix(VOCABULARY, width)
        tower.scale_embeddings = True
        norm(tower.layer_norm)
        for layer in tower.layer[:layers]:
            linear(layer.self_attention.linear[0], 3 * width, width)
            linear(layer.self_attention.linear[1], width, width)
            norm(layer.self_attention.layer_norm)
            if hasattr(layer, "attention"):
                linear(layer.attention.linear[0], width, width)
                linear(layer.attention.linear[1], 2 * width, width)
                linear(layer.attention.linear[2], width, width)
                norm(layer.attention.layer_norm)
            linear(layer.ffn.linear_0, 4 * width, width)
            linear(layer.ffn.linear_1, width, 4 * width)
            norm(layer.ffn.layer_norm)
    linear(spec.decoder.projection, VOCABULARY, width)
