"""Beam search against transformers' `generate`: the same hypotheses from the same model."""

from collections.abc import Iterator

import torch

from splitstep.bench import Case, Run, race
from splitstep.models.decoding import beam_search
from splitstep.models.heads import SplitstepForConditionalGeneration
from splitstep.models.presets import preset

BEAMS, SOURCE, TARGET, VOCABULARY = 5, 20, 25, 10_000
# Layers of each tower, width, heads, sentences of a batch.
SIZES = ((6, 512, 8, 16), (4, 128, 4, 64))


def cases(*, repeats: int) -> Iterator[Case]:
    """A batch of sentences whose outputs all have full length, which leaves nothing to gain by dropping sentences."""
    for layers, width, heads, sentences in SIZES:
        runs = _runs(layers, width, heads, sentences)
        title = f"{layers}+{layers} layers, d {width}, {sentences} sentences"
        yield from race(title, runs, reference=("generate",), precision="float32", repeats=repeats)


def _runs(layers: int, width: int, heads: int, sentences: int) -> dict[str, Run]:
    config = preset(
        "transformer",
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
    model = SplitstepForConditionalGeneration(config).eval()
    ids = torch.randint(2, VOCABULARY, (sentences, SOURCE))
    mask = torch.ones_like(ids)

    def generate() -> None:
        model.generate(
            input_ids=ids,
            attention_mask=mask,
            num_beams=BEAMS,
            max_new_tokens=TARGET,
            do_sample=False,
            early_stopping=False,
        )

    def search() -> None:
        beam_search(model, ids, mask, num_beams=BEAMS, max_new_tokens=TARGET)

    return {"generate": generate, "beam_search": search}
