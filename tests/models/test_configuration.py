import copy

import pytest

from splitstep import SplitstepConfig, SplitstepModel, preset
from splitstep.models.presets import KINDS, PRESETS, settings_for
from splitstep.solver.errors import UserError

ADAPTIVE = {"kind": "causal", "vocab_size": 100, "adaptive_cutoffs": [10, 20]}
EVERY = [(name, kind) for name in PRESETS for kind in KINDS]


@pytest.mark.parametrize(("name", "kind"), EVERY)
def test_every_preset_is_a_configuration_of_every_kind(name, kind):
    config = preset(name, kind, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1)
    assert config.kind == kind
    assert config.is_encoder_decoder == (kind == "seq2seq")
    assert SplitstepConfig(**config.to_dict()).to_dict() == config.to_dict()


@pytest.mark.parametrize(("name", "kind"), EVERY)
def test_the_settings_of_a_preset_turn_a_model_of_their_kind_into_it(name, kind):
    """Whatever the model was, as when training goes on from a plain one."""
    plain, settings = preset("transformer", kind).to_dict(), settings_for(name, kind)
    assert SplitstepConfig(**plain | settings).to_dict() == preset(name, kind).to_dict()
    assert settings.keys() <= PRESETS[name].keys()


def test_the_bands_of_a_vocabulary_are_read_off_its_cutoffs():
    assert SplitstepConfig(**ADAPTIVE).adaptive_bands == ((0, 10, 512), (10, 20, 128), (20, 100, 32))
    assert SplitstepConfig().adaptive_bands == ((0, 32768, 512),)


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"hiden_size": 32}, r"unknown configuration key 'hiden_size'; .*did you mean 'hidden_size'"),
        ({"num_beams": 4}, r"unknown configuration key 'num_beams'"),
        ({"hidden_size": "32"}, r"hidden_size must be int, got '32'"),
        ({"hidden_size": 32.0}, r"hidden_size must be int, got 32.0"),
        ({"share_substeps": 1}, r"share_substeps must be bool, got 1"),
        ({"num_decoder_layers": "two"}, r"num_decoder_layers must be int or None, got 'two'"),
        ({"hidden_size": 0}, r"hidden_size must be at least 1"),
        ({"num_hidden_layers": 0}, r"num_hidden_layers must be at least 1"),
        ({"num_attention_heads": 7}, r"num_attention_heads = 7 does not divide hidden_size = 512; choose from 1, 2, 4"),
        ({"splitting": "strng"}, r"unknown encoder splitting 'strng'; .*did you mean 'strang'"),
        ({"splitting": "macaron_decoder"}, r"unknown encoder splitting 'macaron_decoder'"),
        ({"integrator": "rk5"}, r"unknown integrator 'rk5'"),
        ({"norm": "prenorm"}, r"unknown norm 'prenorm'; choose from pre, pre_shared, post, branch"),
        ({"norm_type": "batch"}, r"unknown norm_type 'batch'"),
        ({"hidden_act": "tanh"}, r"unknown hidden_act 'tanh'"),
        ({"position_embedding": "relative"}, r"unknown position_embedding 'relative'"),
        ({"time_embedding": "both"}, r"unknown time_embedding 'both'"),
        ({"halting": "ACT"}, r"unknown halting 'ACT'; choose from none, act"),
        ({"kind": "decoder"}, r"unknown kind 'decoder'; choose from encoder, causal, seq2seq, image"),
        ({"dropout": 1.0}, r"dropout must lie in \[0, 1\)"),
        ({"halting": "act", "halting_epsilon": 1.0}, r"halting_epsilon must lie between 0 and 1, got 1.0"),
        ({"halting": "act", "attention": "evolved"}, r"particles that halt would leave the norms between segments"),
        ({"feed_forward": "random", "intermediate_size": 33}, r"random feed-forward network has an even width, got 33"),
        ({"num_independent_layers": 5}, r"does not divide 6 layers; choose from 1, 2, 3, 6"),
        ({"splitting": "strang", "intermediate_size": 7}, r"intermediate_size = 7 .* choose a multiple of 2"),
        ({"splitting": "suzuki4"}, r"2048 does not divide among the 10 feed-forward networks"),
        ({"decoder_splitting": "strang"}, r"decoder_splitting is for kind 'seq2seq', not 'encoder'"),
        ({"kind": "causal", "integrator": "dopri5"}, r"'dopri5' chooses its steps by looking at the whole sequence"),
        ({"kind": "seq2seq", "integrator": "dopri5"}, r"choose a fixed-step integrator"),
        ({"attn_implementation": "flash"}, r"unknown attn_implementation 'flash'; choose from auto, sdpa, eager"),
        ({"position_embedding": "rotary", "hidden_size": 24}, r"rotary positions need an even head width, got 3"),
        ({"adaptive_cutoffs": [10]}, r"adaptive_cutoffs is for kind 'causal', not 'encoder'"),
        (ADAPTIVE | {"adaptive_cutoffs": (10, 20)}, r"adaptive_cutoffs must be list\[int\] or None, got \(10, 20\)"),
        (
            ADAPTIVE | {"adaptive_cutoffs": [10, "20"]},
            r"adaptive_cutoffs must be list\[int\] or None, got \[10, '20'\]",
        ),
        (ADAPTIVE | {"adaptive_cutoffs": [20, 10]}, r"must ascend between 0 and vocab_size = 100, got \[20, 10\]"),
        (ADAPTIVE | {"adaptive_cutoffs": [10, 100]}, r"must ascend between 0 and vocab_size = 100, got \[10, 100\]"),
        (ADAPTIVE | {"adaptive_cutoffs": [0, 10]}, r"must ascend between 0 and"),
        (ADAPTIVE | {"adaptive_cutoffs": []}, r"must ascend between 0 and"),
        (ADAPTIVE | {"adaptive_factor": 0}, r"adaptive_factor must be at least 1"),
        (ADAPTIVE | {"adaptive_factor": 23}, r"the last of 3 bands has no channel left of hidden_size = 512"),
        (ADAPTIVE | {"adaptive_dropout": 1.0}, r"adaptive_dropout must lie in \[0, 1\)"),
        (ADAPTIVE | {"lm_head_bias": True}, r"an adaptive softmax has no lm_head_bias"),
        ({"adaptive_factor": 2}, r"adaptive_factor is for a vocabulary with adaptive_cutoffs"),
        ({"adaptive_dropout": 0.2}, r"adaptive_dropout is for a vocabulary with adaptive_cutoffs"),
        ({"num_decoder_layers": 2}, r"num_decoder_layers is for kind 'seq2seq', not 'encoder'"),
        ({"evolution": "bilinear"}, r"evolution is for attention 'evolved', not 'full'"),
        ({"time_dim": 8}, r"time_dim is for attention 'evolved', not 'full'"),
        ({"time_keys": False}, r"time_keys is for attention 'evolved', not 'full'"),
        (
            {"attention": "evolved", "evolution": "bilinear", "time_keys": False},
            r"time_keys is for evolution 'published', not 'bilinear'",
        ),
        (
            {"attention": "evolved", "attention_bias": False},
            r"attention_bias is for attention 'full', not 'evolved'",
        ),
        (
            {"feed_forward": "random", "feed_forward_bias": False},
            r"feed_forward_bias is for feed_forward 'full', not 'random'",
        ),
        (
            {"feed_forward": "rotated", "feed_forward_bias": False},
            r"feed_forward_bias is for feed_forward 'full', not 'rotated'",
        ),
        ({"kind": "image"}, r"images have learned positions or none"),
        (
            {"kind": "image", "position_embedding": "learned", "image_size": 30},
            r"patch_size = 16 does not divide image_size = 30",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(wrong, complaint):
    with pytest.raises(UserError, match=complaint):
        SplitstepConfig(**wrong)


def test_an_adaptive_integrator_is_allowed_where_the_whole_sequence_is_read():
    assert SplitstepConfig(splitting="parallel", integrator="dopri5").scheme("encoder").tableau.adaptive


def test_a_configuration_made_wrong_after_it_was_built_is_refused_by_the_model():
    config = preset("macaron", hidden_size=32, num_attention_heads=4)
    broken = copy.deepcopy(config)
    broken.splitting = "lie"
    with pytest.raises(UserError, match="unknown encoder splitting 'lie'"):
        SplitstepModel(broken)


@pytest.mark.parametrize(
    ("name", "kind", "complaint"),
    [("macron", "encoder", "did you mean 'macaron'"), ("macaron", "encodr", "did you mean 'encoder'")],
)
def test_an_unknown_preset_or_kind_is_refused(name, kind, complaint):
    with pytest.raises(UserError, match=complaint):
        preset(name, kind)


def test_the_macaron_decoder_is_the_published_one_and_others_follow_the_encoder():
    assert str(preset("macaron", "seq2seq").scheme("decoder").splitting).startswith(
        "1/2 convection, 1 interaction, 1 coup"
    )
    assert preset("parallel", "seq2seq").scheme("decoder").order == 1
    assert preset("parallel-rk4", "seq2seq").scheme("decoder").order == 4
