"""Parameters and operations, counted against the papers and against torch's own counter."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from splitstep import preset
from splitstep.models.accounting import COUNTED, account, cache_per_token, flops_per_token
from splitstep.models.presets import KINDS, PRESETS

DEIT_TINY = {
    "hidden_size": 192,
    "num_attention_heads": 3,
    "intermediate_size": 768,
    "num_hidden_layers": 12,
    "num_labels": 100,
}
WMT_BASE = {"hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 2048}
WMT_BIG = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}
IWSLT = {"hidden_size": 512, "num_attention_heads": 4, "intermediate_size": 1024}

# (total, body) of each preset with the default sizes of its kind: a changed count is a changed architecture.
PINNED = {
    ("transformer", "encoder"): (36_219_392, 18_915_328),
    ("transformer", "causal"): (35_954_688, 18_915_328),
    ("transformer", "seq2seq"): (60_917_760, 44_140_544),
    ("transformer", "image"): (19_411_458, 18_915_328),
    ("macaron", "encoder"): (36_228_608, 18_924_544),
    ("macaron", "causal"): (35_963_904, 18_924_544),
    ("macaron", "seq2seq"): (60_936_192, 44_158_976),
    ("macaron", "image"): (19_420_674, 18_924_544),
    ("parallel", "encoder"): (36_219_392, 18_915_328),
    ("parallel", "causal"): (35_954_688, 18_915_328),
    ("parallel", "seq2seq"): (60_917_760, 44_140_544),
    ("parallel", "image"): (19_411_458, 18_915_328),
    ("parallel-rk4", "encoder"): (36_219_392, 18_915_328),
    ("parallel-rk4", "causal"): (35_954_688, 18_915_328),
    ("parallel-rk4", "seq2seq"): (60_917_760, 44_140_544),
    ("parallel-rk4", "image"): (19_411_458, 18_915_328),
    ("universal", "encoder"): (20_457_472, 3_153_408),
    ("universal", "causal"): (20_192_768, 3_153_408),
    ("universal", "seq2seq"): (24_135_680, 7_358_464),
    ("universal", "image"): (3_649_538, 3_153_408),
    ("transevolve-full-1", "encoder"): (33_588_736, 16_284_672),
    ("transevolve-full-1", "causal"): (33_324_032, 16_284_672),
    ("transevolve-full-1", "seq2seq"): (53_025_792, 36_248_576),
    ("transevolve-full-1", "image"): (16_780_802, 16_284_672),
    ("transevolve-full-2", "encoder"): (35_686_912, 18_382_848),
    ("transevolve-full-2", "causal"): (35_422_208, 18_382_848),
    ("transevolve-full-2", "seq2seq"): (59_319_296, 42_542_080),
    ("transevolve-full-2", "image"): (18_878_978, 18_382_848),
    ("transevolve-random-1", "encoder"): (21_021_184, 3_717_120),
    ("transevolve-random-1", "causal"): (20_756_480, 3_717_120),
    ("transevolve-random-1", "seq2seq"): (27_890_688, 11_113_472),
    ("transevolve-random-1", "image"): (4_213_250, 3_717_120),
    ("transevolve-random-2", "encoder"): (23_119_360, 5_815_296),
    ("transevolve-random-2", "causal"): (22_854_656, 5_815_296),
    ("transevolve-random-2", "seq2seq"): (34_184_192, 17_406_976),
    ("transevolve-random-2", "image"): (6_311_426, 5_815_296),
}


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name in PRESETS for kind in KINDS])
def test_every_presets_count_is_pinned(name, kind):
    report = account(preset(name, kind))
    assert PINNED.get((name, kind)) == (report["total"], report["body"])


@pytest.mark.parametrize(
    ("independent", "millions"), [(12, 5.544), (6, 2.875), (4, 1.985), (3, 1.540), (2, 1.095), (1, 0.650)]
)
def test_deit_tiny_with_shared_layers(independent, millions):
    """Zhong et al. 2022, table 2: 5.5, 2.9, 2.0, 1.5, 1.1, 0.7 M."""
    report = account(preset("parallel", "image", **DEIT_TINY, num_independent_layers=independent))
    assert report["total"] / 1e6 == pytest.approx(millions, abs=5e-4)
    assert report["independent_layers"] == independent


@pytest.mark.parametrize(
    ("name", "sizes", "body"),
    [
        ("transformer", WMT_BASE, 44_140_544),
        ("macaron", WMT_BASE, 44_158_976),
        ("transformer", WMT_BIG, 176_361_472),
        ("macaron", WMT_BIG, 176_398_336),
        ("transformer", IWSLT, 6 * (2_102_784 + 3_154_432) + 2 * 1024),
        ("macaron", IWSLT, 6 * (2_104_320 + 3_155_968) + 2 * 1024),
    ],
)
def test_translation_models_have_the_published_bodies(name, sizes, body):
    """Six layers a side with final norms (Lu et al. 2019)."""
    assert account(preset(name, "seq2seq", **sizes))["body"] == body


@pytest.mark.parametrize(
    ("name", "body"),
    [("full-1", 36_248_576), ("full-2", 42_542_080), ("random-1", 11_113_472), ("random-2", 17_406_976)],
)
def test_transevolve_has_the_published_bodies(name, body):
    assert account(preset(f"transevolve-{name}", "seq2seq", **WMT_BASE))["body"] == body


@pytest.mark.parametrize("segments", [1, 2])
@pytest.mark.parametrize("feed_forward", ["full", "random"])
def test_transevolve_encoders_follow_the_formula(segments, feed_forward):
    """An encoder block: 2 D'^2 + L (d^2 + 3 d + FF) + 2 d, with D' = d + H tau."""
    d, layers = 256, 6
    network = 8 * d * d + 7 * d if feed_forward == "full" else 12 * d
    body = segments * (2 * (2 * d) ** 2 + 2 * d) + layers * (d * d + 3 * d + network)
    sizes = {"hidden_size": d, "num_attention_heads": 8, "intermediate_size": 4 * d}
    assert account(preset(f"transevolve-{feed_forward}-{segments}", **sizes))["body"] == body
    bare = account(preset(f"transevolve-{feed_forward}-{segments}", **sizes, time_keys=False))["body"]
    assert body - bare == segments * 2 * d * d  # W_K^t, which cancels


def small(name, kind, **more):
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 40, "num_hidden_layers": 2}
    text = {"vocab_size": 60, "max_position_embeddings": 16}
    image = {"image_size": 32, "patch_size": 8, "num_labels": 5}
    return preset(name, kind, **sizes | (image if kind == "image" else text) | more)


SETTINGS = [
    {},
    {"splitting": "strang", "integrator": "heun"},
    {"hidden_act": "swiglu", "feed_forward": "full"},
    {"feed_forward": "rotated", "intermediate_size": 64},
    {"attention": "evolved", "evolution": "bilinear", "num_segments": 2, "attn_implementation": "auto"},
]


def counted(config, sequences=1):
    """The operations that torch counts in a pass, and the particles of it."""
    if config.kind == "image":
        batch, particles = {"pixel_values": torch.randn(sequences, 3, 32, 32)}, 17 * sequences
    else:
        ids, particles = torch.randint(60, (sequences, 16)), 16 * sequences
        batch = {"input_ids": ids} | ({"decoder_input_ids": ids} if config.kind == "seq2seq" else {})
    model = COUNTED[config.kind](config).eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**batch, use_cache=False)
    return counter.get_total_flops(), particles


@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.parametrize("more", SETTINGS)
@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name in PRESETS for kind in KINDS])
def test_operations_are_those_that_torch_counts(name, kind, more, sequences, monkeypatch):
    # The counter does not see inside fused kernels, so full attention is written out; so is the kernel of `bilinear`.
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda q, k, v, **_: torch.matmul(torch.matmul(q, k.transpose(-1, -2)), v),
    )
    evolved = (PRESETS[name] | more).get("attention") == "evolved"
    config = small(name, kind, **{"attn_implementation": "auto" if evolved else "eager"} | more)
    total, particles = counted(config, sequences)
    assert flops_per_token(config, sequences=sequences) * particles == pytest.approx(total, abs=particles)


@pytest.mark.parametrize("cutoffs", [[5], [10, 20, 30]])
def test_operations_of_an_adaptive_loss_are_those_of_the_bands_that_occur(cutoffs, monkeypatch):
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda q, k, v, **_: torch.matmul(torch.matmul(q, k.transpose(-1, -2)), v),
    )
    more = {"adaptive_cutoffs": cutoffs, "adaptive_factor": 3, "attn_implementation": "eager"}
    config = small("transformer", "causal", **more)
    ids = torch.randint(60, (2, 16))
    model = COUNTED["causal"](config).eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=ids, labels=ids, skip_logits=True, use_cache=False)
    predicted = ids[:, 1:]
    shares = [((band.start <= predicted) & (predicted < band.stop)).float().mean() for band in config.adaptive_bands]
    expected = flops_per_token(config, length=16, shares=[float(share) for share in shares[1:]])
    # The last token of each sequence has nothing to predict.
    assert counter.get_total_flops() / ids.numel() == pytest.approx(expected, rel=0.1)
    assert counter.get_total_flops() / ids.numel() < flops_per_token(config, length=16)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("cutoffs", [[5], [10, 20, 30]])
def test_operations_of_an_adaptive_vocabulary_are_those_of_all_its_bands(cutoffs, tied):
    more = {"adaptive_cutoffs": cutoffs, "adaptive_factor": 3, "tie_word_embeddings": tied}
    config = small("transformer", "causal", **more, attn_implementation="eager")
    total, particles = counted(config)
    assert flops_per_token(config) * particles == total


def test_evaluations_a_layer_count_sub_steps_stages_and_inner_steps():
    count = account(small("macaron", "encoder"))["evaluations_per_layer"]
    assert count == {"interaction": 1, "convection": 2}
    count = account(small("parallel-rk4", "seq2seq", steps_per_layer=3))["evaluations_per_layer"]
    assert count == {"interaction": 12, "coupling": 12, "convection": 12}


@pytest.mark.parametrize("more", [{}, {"integrator": "heun"}, {"num_independent_layers": 1}, {"share_substeps": True}])
@pytest.mark.parametrize("kind", ["causal", "seq2seq"])
@pytest.mark.parametrize("name", PRESETS)
def test_the_numbers_kept_in_generation_are_those_of_the_cache(name, kind, more):
    config = small(name, kind, **more | ({} if name != "universal" else {"num_independent_layers": 1}))
    ids = torch.randint(3, 60, (1, 5))
    batch = {"input_ids": ids} | ({"decoder_input_ids": ids[:, :3]} if kind == "seq2seq" else {})
    cache = COUNTED[kind](config).eval()(**batch, use_cache=True).past_key_values
    written, source = (cache, None) if kind == "causal" else (cache.self_attention_cache, cache.cross_attention_cache)

    def numbers(kept, tokens):
        return sum(layer.keys.numel() + layer.values.numel() for layer in kept.layers if layer.is_initialized) // tokens

    expected = {"written": numbers(written, 5 if kind == "causal" else 3)}
    assert cache_per_token(config) == expected | ({} if source is None else {"source": numbers(source, 5)})
