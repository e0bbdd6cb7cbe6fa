"""Matching: two towers learn what they are told of a pair, whatever they are told."""

import numpy as np
import pytest
import torch
from tests import corpora

from splitstep.recipe import recipe
from splitstep.tasks.matching import Matching
from splitstep.tasks.prediction import Predictor
from splitstep.training.engine import train
from splitstep.training.ready import build, configuration


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPLITSTEP_CACHE", str(tmp_path / "cache"))


def made(tmp_path, **model):
    tables = corpora.matching_recipe(corpora.papers(tmp_path / "data"), model={"initialization": "xavier", **model})
    whole = recipe(tables)
    task = Matching(whole.data, whole.evaluation)
    return task, build(whole, configuration(whole, task)).train()


def tensors(task, split, indices):
    batch = {name: torch.as_tensor(array) for name, array in task.batch(split, indices).items()}
    batch.pop("num_items")
    return batch


@pytest.mark.parametrize("comparison", ["symmetric", "nli", "joined"])
def test_one_batch_is_learnt_by_heart_with_labels_that_mean_nothing(tmp_path, comparison):
    task, model = made(tmp_path, comparison=comparison)
    batch = tensors(task, "train", np.arange(16))
    batch["labels"] = torch.arange(16) // 2 % 2  # the fixture's are 0, 1, 0, 1: half of them are now wrong
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(40):
        optimizer.zero_grad()
        out = model(**batch)
        out.loss.backward()
        optimizer.step()
    assert out.loss < 0.05
    assert (out.logits.argmax(1) == batch["labels"]).all()


def test_a_run_overfits_one_batch(tmp_path):
    root = corpora.papers(tmp_path / "data")
    (root / "pairs.train.tsv").write_bytes((root / "pairs.valid.tsv").read_bytes())
    settings = {"updates": 30, "evaluate_every": 30, "log_every": 10, "learning_rate": 1e-2, "batch_size": 20}
    tables = corpora.matching_recipe(root, model={"initialization": "xavier"}, training=settings)
    measured = train(recipe(tables), tmp_path / "run").results["metrics"]["valid"]
    assert measured["loss"] < 0.1
    assert measured["accuracy"] == 1


def test_the_texts_of_a_pair_do_not_see_each_other(tmp_path):
    task, model = made(tmp_path)
    model.eval()
    batch = tensors(task, "test", np.arange(4))
    turned = {name: tensor.roll(1, 0) if name.startswith("pair_") else tensor for name, tensor in batch.items()}
    seen = []
    model.pool.register_forward_hook(lambda module, inputs, vectors: seen.append(vectors))
    with torch.no_grad():
        assert not torch.allclose(model(**batch).logits, model(**turned).logits, atol=1e-4)
    first, second, again, other = seen
    torch.testing.assert_close(again, first)
    torch.testing.assert_close(other, second.roll(1, 0))


def test_the_measures_are_counted_by_hand(tmp_path):
    task, model = made(tmp_path)
    model.eval()
    right, cost, count = 0, 0.0, len(task.lengths("test"))
    for index in range(count):
        batch = tensors(task, "test", np.asarray([index]))
        label = int(batch.pop("labels"))
        with torch.no_grad():
            (logits,) = model(**batch).logits.double()
        right += int(logits[label] == logits.max())
        cost -= float(logits.log_softmax(-1)[label])
    metrics = task.measure(Predictor(model), "test").metrics
    assert metrics["accuracy"] == pytest.approx(right / count)
    assert metrics["loss"] == pytest.approx(cost / count, rel=1e-5)
