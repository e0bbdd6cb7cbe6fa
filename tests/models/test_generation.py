"""Generation: with a cache as without, with padding as one by one, and nothing from the future."""

import pytest
import torch

from splitstep import SplitstepForCausalLM, SplitstepForConditionalGeneration, preset
from splitstep.models.presets import PRESETS

SIZES = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "vocab_size": 50,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "tie_word_embeddings": False,  # a random tied model repeats its last token for ever
}
SCHEMES = {name: {} for name in PRESETS} | {
    "strang-midpoint": {"splitting": "strang", "integrator": "midpoint"},
    "suzuki4": {"splitting": "suzuki4"},
    "universal-published": {"time_embedding": "state", "halting": "act", "num_independent_layers": 1},
    "rotary": {"position_embedding": "rotary"},
    "bilinear-strang-heun": {
        "attention": "evolved",
        "evolution": "bilinear",
        "num_segments": 2,
        "splitting": "strang",
        "integrator": "heun",
    },
    "evolved-parallel-rotated": {
        "attention": "evolved",
        "feed_forward": "rotated",
        "splitting": "parallel",
        "integrator": "midpoint",
        "intermediate_size": 64,
    },
}
VARIANTS = [{"norm": norm, "steps_per_layer": steps} for norm in ("pre", "post") for steps in (1, 2)]
MODELS = {"causal": SplitstepForCausalLM, "seq2seq": SplitstepForConditionalGeneration}
GREEDY = {"do_sample": False, "max_new_tokens": 5, "min_new_tokens": 5}


def build(kind, scheme, **more):
    config = preset(scheme if scheme in PRESETS else "transformer", kind, **SIZES | SCHEMES[scheme] | more)
    model = MODELS[kind](config).eval().double()  # double, so that a small difference is a fault and not rounding
    with torch.no_grad():  # larger weights, so that the tokens differ and no two logits tie
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


def prompts(kind, side="left"):
    """Three sentences of different lengths, padded on one side."""
    lengths, longest = (7, 4, 2), 7
    ids, mask = torch.zeros(3, longest, dtype=torch.long), torch.zeros(3, longest, dtype=torch.long)
    for row, length in enumerate(lengths):
        where = slice(longest - length, None) if side == "left" else slice(0, length)
        ids[row, where] = torch.randint(3, 50, (length,))
        mask[row, where] = 1
    return {"input_ids": ids, "attention_mask": mask}


def generate(model, batch, **settings):
    """New tokens, and the logits they were chosen from."""
    answer = model.generate(**batch, **GREEDY | settings, return_dict_in_generate=True, output_logits=True)
    start = 1 if model.config.is_encoder_decoder else batch["input_ids"].shape[1]
    return answer.sequences[:, start:], torch.stack(answer.logits)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: f"{v['norm']}-{v['steps_per_layer']}")
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", MODELS)
def test_cached_generation_is_uncached_generation(kind, scheme, variant):
    model, batch = build(kind, scheme, **variant), prompts(kind)
    plain = generate(model, batch, use_cache=False)
    for settings in ({"use_cache": True}, {"cache_implementation": "static"}):
        cached = generate(model, batch, **settings)
        assert torch.equal(cached[0], plain[0])
        torch.testing.assert_close(cached[1], plain[1], atol=1e-8, rtol=0)
    assert plain[1].std(0).mean() > 1e-4  # the steps differ, so that a wrong slot would show


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", MODELS)
def test_cached_generation_is_uncached_generation_in_single_precision(kind, scheme):
    model, batch = MODELS[kind](build(kind, scheme).config).eval(), prompts(kind)
    plain, cached = generate(model, batch, use_cache=False), generate(model, batch)
    assert torch.equal(cached[0], plain[0])
    torch.testing.assert_close(cached[1], plain[1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", MODELS)
def test_cached_beams_are_uncached_beams(kind, scheme):
    model, batch = build(kind, scheme), prompts(kind)
    settings = {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.6}
    plain = model.generate(**batch, **GREEDY | settings, use_cache=False)
    assert torch.equal(model.generate(**batch, **GREEDY | settings), plain)
    assert torch.equal(model.generate(**batch, **GREEDY | settings, cache_implementation="static"), plain)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("beams", [1, 3])
def test_a_batch_with_padding_generates_what_each_sentence_does_alone(kind, scheme, beams):
    model, batch = build(kind, scheme), prompts(kind)
    together = generate(model, batch, num_beams=beams)[0]
    for row, visible in enumerate(batch["attention_mask"].bool()):
        alone = {"input_ids": batch["input_ids"][row, visible][None]}
        alone["attention_mask"] = torch.ones_like(alone["input_ids"])
        assert torch.equal(generate(model, alone, num_beams=beams)[0], together[row : row + 1])


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", MODELS)
def test_nothing_leaks_from_the_future(kind, scheme):
    model = build(kind, scheme)
    ids = torch.randint(3, 50, (2, 8))
    changed = ids.clone()
    changed[:, 5] = (changed[:, 5] + 7) % 47 + 3
    source = {"input_ids": torch.randint(3, 50, (2, 6))} if kind == "seq2seq" else {}
    name = "decoder_input_ids" if kind == "seq2seq" else "input_ids"
    with torch.no_grad():
        before, after = (model(**source, **{name: tokens}).logits for tokens in (ids, changed))
    torch.testing.assert_close(before[:, :5], after[:, :5], atol=1e-10, rtol=0)
    assert (before[:, 5:] - after[:, 5:]).abs().max() > 1e-3


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_changes_nothing_on_real_tokens(kind, scheme, side):
    model, batch = build(kind, scheme), prompts(kind, side)
    target = {"decoder_input_ids": torch.randint(3, 50, (3, 5))} if kind == "seq2seq" else {}
    with torch.no_grad():
        together = model(**batch, **target).logits
        for row, visible in enumerate(batch["attention_mask"].bool()):
            alone = model(
                input_ids=batch["input_ids"][row, visible][None], **{k: v[row : row + 1] for k, v in target.items()}
            ).logits[0]
            found = together[row] if kind == "seq2seq" else together[row, visible]
            torch.testing.assert_close(found, alone, atol=1e-8, rtol=0)


@pytest.mark.parametrize("kind", MODELS)
def test_sampling_depends_on_the_seed_alone(kind):
    model, batch = build(kind, "macaron"), prompts(kind)
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        draws.append(generate(model, batch, do_sample=True, top_k=20)[0])
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_runge_kutta_stages_have_slots_of_their_own():
    model = build("seq2seq", "parallel-rk4", steps_per_layer=2)
    out = model(**prompts("seq2seq"), decoder_input_ids=torch.ones(3, 4, dtype=torch.long))
    filled = [layer for layer in out.past_key_values.self_attention_cache.layers if layer.get_seq_length() == 4]
    assert len(filled) == model.config.cache_slots == 2 * 2 * 4
    coupled = [layer for layer in out.past_key_values.cross_attention_cache.layers if layer.get_seq_length()]
    assert len(coupled) == 2  # once a weight set, whatever the stages
