"""Two towers: one model reads each text, what it compares is in one table."""

import pytest
import torch

from splitstep import SplitstepForSequencePairClassification, preset
from splitstep.models.configuration import COMPARISONS
from splitstep.models.heads import FEATURES
from splitstep.models.losses import IGNORED, label_loss

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


def test_what_pondering_costs_does_not_depend_on_which_labels_are_right():
    config = preset("universal", **SIZES, halting="act", ponder_weight=1.0)
    model = SplitstepForSequencePairClassification(config).train()
    inputs = batch()
    pondering = []
    for labels in (torch.zeros(3, dtype=torch.long), torch.full((3,), 2), torch.tensor([0, 2, IGNORED])):
        whole = model(**inputs, labels=labels, num_items_in_batch=6)
        bare = label_loss(whole.logits, labels, config, 6)
        pondering.append((whole.loss - bare) / whole.ponder_cost.mean())
    torch.testing.assert_close(torch.stack(pondering), torch.tensor([3 / 6, 3 / 6, 2 / 6]))
