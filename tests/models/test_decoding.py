"""Beam search: the hypotheses of transformers' own search, whatever the scheme, the beams and the batch."""

import pytest
import torch
from transformers.cache_utils import DynamicLayer

from splitstep import SplitstepForConditionalGeneration, preset
from splitstep.models import decoding
from splitstep.models.decoding import NORMALIZATIONS, GrowingLayer, beam_search
from splitstep.solver.errors import UserError

PAD, BOS, EOS = 0, 1, 2
SIZES = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "vocab_size": 50,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "decoder_start_token_id": BOS,
    "tie_word_embeddings": False,  # a random tied model repeats its last token for ever
    "lm_head_bias": True,
}
PRESETS = (
    "transformer",
    "macaron",
    "parallel",
    "parallel-rk4",
    "universal",
    "transevolve-full-1",
    "transevolve-random-2",
)
OTHERS = {
    "learned-post": {"position_embedding": "learned", "norm": "post"},
    "rotary-strang-midpoint": {"position_embedding": "rotary", "splitting": "strang", "integrator": "midpoint"},
    "universal-published": {"time_embedding": "state", "halting": "act", "num_independent_layers": 1},
    "bilinear": {"attention": "evolved", "evolution": "bilinear", "num_segments": 2},
}
LONGEST = 8


def build(name="transformer", **more):
    row = OTHERS.get(name, {})
    config = preset("transformer" if row else name, "seq2seq", **SIZES | row | more)
    model = SplitstepForConditionalGeneration(config).eval()
    with torch.no_grad():  # larger weights, so that outputs differ
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
        # The end token is often among the best, so that some outputs end early and others late.
        logits = model(*sources(), decoder_input_ids=torch.randint(3, 50, (3, LONGEST))).logits
        model.lm_head.bias[EOS] += (logits.topk(4).values[..., -1] - logits[..., EOS]).mean()
    return model


def sources():
    """Sentences of different lengths, padded on the right."""
    ids = torch.full((3, 6), PAD)
    for row, length in enumerate((6, 2, 4)):
        ids[row, :length] = torch.randint(3, 50, (length,))
    return ids, ids.ne(PAD).long()


def written(row):
    """The tokens between the start and the end, or to the last of them where there is none."""
    tokens = row.tolist()[1:]
    return tokens[: tokens.index(EOS)] if EOS in tokens else tokens


def transformers_search(
    model, ids, mask, *, num_beams, num_return=1, length_penalty=1.0, early_stopping=False, max_new_tokens=LONGEST
):
    """Tokens and scores of `generate`; greedy search has no score of its own there."""
    answer = model.generate(
        input_ids=ids,
        attention_mask=mask,
        num_beams=num_beams,
        num_return_sequences=num_return,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        **({"length_penalty": length_penalty, "early_stopping": early_stopping} if num_beams > 1 else {}),
    )
    tokens = [written(row) for row in answer.sequences]
    if num_beams > 1:
        scores = answer.sequences_scores.tolist()
    else:
        gains = model.compute_transition_scores(answer.sequences, answer.scores, normalize_logits=True)
        lengths = [min(len(row) + 1, max_new_tokens) for row in tokens]
        scores = [float(row[:n].sum()) / n**length_penalty for row, n in zip(gains, lengths, strict=True)]
    return tokens, scores


def assert_equal_to_generate(model, ids, mask, **settings):
    tokens, scores = transformers_search(model, ids, mask, **settings)
    found = beam_search(model, ids, mask, **{"max_new_tokens": LONGEST} | settings)
    assert [len(sentence) for sentence in found] == [settings.get("num_return", 1)] * len(ids)
    hypotheses = [hypothesis for sentence in found for hypothesis in sentence]
    assert [hypothesis.tokens for hypothesis in hypotheses] == tokens
    assert [hypothesis.score for hypothesis in hypotheses] == pytest.approx(scores, rel=1e-5)


@pytest.mark.parametrize("num_beams", [1, 4, 5])
@pytest.mark.parametrize("name", PRESETS)
def test_tokens_and_scores_are_those_of_generate(name, num_beams):
    assert_equal_to_generate(build(name), *sources(), num_beams=num_beams, num_return=num_beams)


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
def test_a_search_may_stop_with_the_first_sentences_that_end(penalty):
    model, (ids, mask) = build("macaron"), sources()
    settings = {"num_beams": 4, "num_return": 4, "length_penalty": penalty}
    assert_equal_to_generate(model, ids, mask, **settings, early_stopping=True)


@pytest.mark.parametrize("name", OTHERS)
def test_so_they_are_with_other_schemes(name):
    assert_equal_to_generate(build(name), *sources(), num_beams=4, num_return=4)


@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 2.0, -1.0])
@pytest.mark.parametrize("num_beams", [1, 5])
def test_so_is_the_best_one_for_any_length_penalty(num_beams, length_penalty):
    assert_equal_to_generate(build(), *sources(), num_beams=num_beams, length_penalty=length_penalty)


def test_so_are_those_of_one_token():
    assert_equal_to_generate(build(), *sources(), num_beams=3, num_return=3, max_new_tokens=1)


def test_keys_of_no_consequence_are_forgotten_without_consequences(monkeypatch):
    decoders = []

    class Kept(decoding._Decoder):
        def __init__(self, *args):
            super().__init__(*args)
            decoders.append(self)

    monkeypatch.setattr(decoding, "_Decoder", Kept)
    model = build()
    model.lm_head.bias.data[EOS] = -100.0
    assert_equal_to_generate(model, *sources(), num_beams=5, num_return=5, max_new_tokens=20)
    (decoder,) = decoders
    assert decoder.cache.get_seq_length() == decoder.ancestors.shape[-1] < 1 + 5 * 19


@pytest.mark.parametrize(("name", "num_beams"), [("transformer", 1), *((name, 4) for name in (*PRESETS, *OTHERS))])
def test_a_sentence_alone_is_the_sentence_in_a_padded_batch(name, num_beams):
    model, (ids, mask) = build(name), sources()
    settings = {"num_beams": num_beams, "num_return": num_beams, "max_new_tokens": LONGEST}
    together = beam_search(model, ids, mask, **settings)
    for row, length in [(1, 2), (2, 4)]:
        ((*alone,),) = beam_search(model, ids[row : row + 1, :length], mask[row : row + 1, :length], **settings)
        assert [hypothesis.tokens for hypothesis in alone] == [hypothesis.tokens for hypothesis in together[row]]


DIVISORS = {
    "length": lambda length, penalty: length**penalty,
    "gnmt": lambda length, penalty: (5 + length) ** penalty / 6**penalty,
}


@pytest.mark.parametrize("num_beams", [1, 5])
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_a_score_is_the_normalised_log_probability_of_the_tokens(normalization, num_beams):
    model, (ids, mask) = build(), sources()
    found = beam_search(
        model,
        ids,
        mask,
        num_beams=num_beams,
        num_return=num_beams,
        length_penalty=0.7,
        normalization=normalization,
        max_new_tokens=LONGEST,
    )
    for row, hypotheses in enumerate(found):
        assert hypotheses == sorted(hypotheses, key=lambda hypothesis: -hypothesis.score)
        for hypothesis in hypotheses:
            tokens = [*hypothesis.tokens, EOS][:LONGEST]
            with torch.no_grad():
                target = torch.tensor([[BOS, *tokens[:-1]]])
                logits = model(ids[row : row + 1], mask[row : row + 1], decoder_input_ids=target).logits[0]
            total = float(logits.log_softmax(-1)[range(len(tokens)), tokens].sum())
            assert hypothesis.score == pytest.approx(total / DIVISORS[normalization](len(tokens), 0.7), abs=1e-5)


def test_without_an_end_token_all_outputs_are_of_full_length():
    model, (ids, mask) = build(), sources()
    model.config.eos_token_id = None
    found = beam_search(model, ids, mask, num_beams=4, num_return=4, max_new_tokens=LONGEST)
    assert all(len(hypothesis.tokens) == LONGEST for sentence in found for hypothesis in sentence)


def test_encoder_and_cross_attention_read_a_sentence_once():
    model, (ids, mask) = build(), sources()
    rows = []
    coupling = [layer.coupling[0].operator.k_proj for layer in model.model.decoder.stack.layers]
    for module in (model.model.encoder.stack, *coupling):
        module.register_forward_hook(lambda module, args, out: rows.append(len(args[0])))
    beam_search(model, ids, mask, num_beams=5, max_new_tokens=LONGEST)
    assert rows == [len(ids)] * (1 + len(coupling))


def test_under_autocast_the_best_is_nearly_the_same():
    model, (ids, mask) = build(), sources()
    exact = beam_search(model, ids, mask, max_new_tokens=LONGEST)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = beam_search(model, ids, mask, max_new_tokens=LONGEST)
    for (one,), (other,) in zip(exact, rounded, strict=True):
        assert other.score == pytest.approx(one.score, rel=0.05)


@pytest.mark.parametrize("together", [1, 2**20])
@pytest.mark.parametrize("block", [1, 4, 7, 64, 1000])
@pytest.mark.parametrize("beams", [1, 3])
def test_continuations_are_the_largest_of_all_sums(beams, block, together, monkeypatch):
    monkeypatch.setattr(decoding, "BLOCK", block)
    monkeypatch.setattr(decoding, "TOGETHER", together)
    logits, scores = torch.randn(4, beams, 203), torch.randn(4, beams)
    found = decoding._continuations(logits, scores, count=6)
    sums, places = (logits.log_softmax(-1) + scores.unsqueeze(-1)).flatten(1).topk(6)
    assert torch.equal(found.scores, sums)
    assert torch.equal(found.parents * 203 + found.tokens, places)


def test_a_growing_layer_holds_what_a_dynamic_one_does():
    layers = GrowingLayer(), DynamicLayer()
    changes = {
        2: ("batch_select_indices", torch.tensor([2, 0])),
        4: ("reorder_cache", torch.tensor([1, 1])),
        6: ("crop", -3),
    }
    rows = 3
    for number in range(9):
        new = torch.randn(rows, 2, 1 + number % 3, 4), torch.randn(rows, 2, 1 + number % 3, 5)
        ours, theirs = (layer.update(*new) for layer in layers)
        assert all(map(torch.equal, ours, theirs))
        if number in changes:
            method, argument = changes[number]
            for layer in layers:
                getattr(layer, method)(argument)
            rows = 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_beams": 0}, "num_beams must lie between 1 and half of vocab_size, got 0"),
        ({"num_beams": 26}, "num_beams must lie between 1 and half of vocab_size, got 26"),
        ({"num_return": 6}, "num_return must lie between 1 and num_beams = 5, got 6"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"normalization": "gnmd"}, r"unknown normalization 'gnmd'; .*\(did you mean 'gnmt'\?\)"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    model, (ids, mask) = build(), sources()
    with pytest.raises(UserError, match=message):
        beam_search(model, ids, mask, **{"max_new_tokens": LONGEST} | settings)


def test_a_model_that_trains_is_refused():
    with pytest.raises(UserError, match=r"call model\.eval\(\) first"):
        beam_search(build().train(), *sources(), max_new_tokens=LONGEST)
