"""Two towers: one model reads each text, what it compares is in one table."""

import pytest
import torch

from splitstep import SplitstepForSequencePairClassification, preset
from splitstep.models.configuration import COMPARISONS
from splitstep.models.heads import FEATURES
from splitstep.models.labels import IGNORED

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 40, "num_hidden_layers": 2}
SIZES |= {"vocab_size": 50, "max_position_embeddings": 16, "num_labels": 3, "pad_token_id": 0}


def batch(rows=3):
    sides = ("", "pair_")
    ids = {f"{side}input_ids": torch.randint(3, 50, (rows, 7 + len(side))) for side in sides}
    return ids | {name.replace("input_ids", "attention_mask"): torch.ones_like(tensor) for name, tensor in ids.items()}


def test_every_comparison_has_features():
    assert FEATURES.keys() == COMPARISONS.keys()


@pytest.mark.parametrize("comparison", COMPARISONS)
def test_saved_and_loaded_is_bit_equal_and_trains(comparison, tmp_path):
    config = preset("macaron", **SIZES, comparison=comparison)
    model = SplitstepForSequencePairClassification(config).eval()
    model.save_pretrained(tmp_path)
    loaded = SplitstepForSequencePairClassification.from_pretrained(tmp_path).eval()
    inputs, labels = batch(), torch.tensor([0, 2, 1])
    with torch.no_grad():
        assert torch.equal(loaded(**inputs).logits, model(**inputs).logits)
    whole = model(**inputs, labels=labels).loss
    whole.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    parts = [
        model(**{name: t[i : i + 1] for name, t in inputs.items()}, labels=labels[i : i + 1], num_items_in_batch=3).loss
        for i in range(3)
    ]
    torch.testing.assert_close(sum(parts), whole)


def test_both_texts_pay_for_pondering():
    config = preset("universal", **SIZES, halting="act", ponder_weight=1.0)
    model = SplitstepForSequencePairClassification(config).eval()
    out = model(**batch())
    assert out.ponder_cost.min() > 2  # at least one step of each


@pytest.mark.parametrize("labels", [[0, 0, 0], [2, 0, 1], [2, 2, 2]], ids=str)
def test_pondering_costs_the_same_whatever_the_labels_and_however_an_update_is_cut(labels):
    still = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
    config = preset("universal", **SIZES | still, halting="act", ponder_weight=1.0)
    model = SplitstepForSequencePairClassification(config).train()
    inputs, labels = batch(), torch.tensor(labels)
    whole = model(**inputs, labels=labels)
    unweighted = torch.nn.functional.cross_entropy(whole.logits, labels)
    torch.testing.assert_close(whole.loss, unweighted + whole.ponder_cost.mean())
    parts = [
        model(**{name: t[i : i + 1] for name, t in inputs.items()}, labels=labels[i : i + 1], num_items_in_batch=3).loss
        for i in range(3)
    ]
    torch.testing.assert_close(sum(parts), whole.loss)
    ignored = model(**inputs, labels=torch.full_like(labels, IGNORED), num_items_in_batch=3)
    assert ignored.loss == 0
