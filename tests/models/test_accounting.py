"""Parameters and operations, counted against the papers and against torch's own counter."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from splitstep import preset
from splitstep.models.accounting import COUNTED, account, flops_per_token
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


def small(name, kind, **more):
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 40, "num_hidden_layers": 2}
    text = {"vocab_size": 60, "max_position_embeddings": 16}
    image = {"image_size": 32, "patch_size": 8, "num_labels": 5}
    return preset(name, kind, **sizes | (image if kind == "image" else text) | more)


@pytest.mark.parametrize("more", [{}, {"splitting": "strang", "integrator": "heun"}, {"hidden_act": "swiglu"}])
@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name in PRESETS for kind in KINDS])
def test_operations_are_those_that_torch_counts(name, kind, more):
    config = small(name, kind, attn_implementation="eager", **more)
    model = COUNTED[kind](config).eval()
    if kind == "image":
        batch, particles = {"pixel_values": torch.randn(1, 3, 32, 32)}, 17
    else:
        ids, particles = torch.randint(60, (1, 16)), 16
        batch = {"input_ids": ids} | ({"decoder_input_ids": ids} if kind == "seq2seq" else {})
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**batch, use_cache=False)
    assert flops_per_token(config) * particles == pytest.approx(counter.get_total_flops(), abs=particles)


def test_evaluations_a_layer_count_sub_steps_stages_and_inner_steps():
    count = account(small("macaron", "encoder"))["evaluations_per_layer"]
    assert count == {"interaction": 1, "convection": 2}
    count = account(small("parallel-rk4", "seq2seq", steps_per_layer=3))["evaluations_per_layer"]
    assert count == {"interaction": 12, "coupling": 12, "convection": 12}
