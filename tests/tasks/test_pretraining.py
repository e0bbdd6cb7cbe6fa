"""Pre-training: what is drawn is a function of seed, epoch and index; splits stay apart; the model's parts are used."""

import numpy as np
import pytest
import torch
from tests import corpora

from splitstep.models.labels import IGNORED
from splitstep.recipe import recipe
from splitstep.solver.errors import UserError
from splitstep.tasks.prediction import Predictor
from splitstep.tasks.pretraining import FOLLOWS, PreTraining
from splitstep.training.ready import build, configuration

NAMED = [("loss", "loss"), ("accuracy", "correct")]  # the measure, and what it is a mean of


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPLITSTEP_CACHE", str(tmp_path / "cache"))


def task(root, **data) -> PreTraining:
    whole = recipe(corpora.pretraining_recipe(root, data=data))
    return PreTraining(whole.data, whole.evaluation)


def same(one, other):
    return all(np.array_equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("pairs", ["packed", "sentences"])
def test_a_batch_is_a_function_of_seed_epoch_and_index(tmp_path, pairs):
    root = corpora.documents(tmp_path / "data")
    first = task(root, pairs=pairs)
    indices = np.arange(5)
    batch = first.batch("train", indices, epoch=2, seed=3)
    assert same(batch, task(root, pairs=pairs).batch("train", indices, epoch=2, seed=3))
    assert not same(batch, first.batch("train", indices, epoch=1, seed=3))
    assert not same(batch, first.batch("train", indices, epoch=2, seed=4))
    for place, index in enumerate(indices):  # whatever else is in the batch
        alone = first.batch("train", np.asarray([index]), epoch=2, seed=3)
        width = alone["input_ids"].shape[1]
        assert (batch["input_ids"][place, :width] == alone["input_ids"][0]).all()
        assert (batch["labels"][place, :width] == alone["labels"][0]).all()
        assert batch["next_sentence_label"][place] == alone["next_sentence_label"][0]


def test_a_batch_is_what_the_model_takes(tmp_path):
    made = task(corpora.documents(tmp_path / "data"))
    ids = made.settings()
    indices = np.arange(len(made.lengths("train")))
    batch = made.batch("train", indices, epoch=0, seed=1)
    tokens = np.where(batch["labels"] == IGNORED, batch["input_ids"], batch["labels"])
    for row, mask, types, length in zip(
        tokens, batch["attention_mask"], batch["token_type_ids"], made.lengths("train"), strict=True
    ):
        shown = row[mask]
        assert len(shown) <= length <= 24
        assert shown[0] == ids["cls_token_id"]
        (one, two) = np.flatnonzero(shown == ids["sep_token_id"])
        assert (two, types[: one + 1].max(), types[one + 1 : two + 1].min()) == (len(shown) - 1, 0, 1)
    assert batch["num_items"] == (batch["labels"] != IGNORED).sum()
    assert batch["num_pairs"] == len(indices)


def words(made, batch):
    """The word that each part of each pair says, in the fixture where a document says one."""
    tokens = np.where(batch["labels"] == IGNORED, batch["input_ids"], batch["labels"])
    mask, types = batch["attention_mask"].astype(bool), batch["token_type_ids"]
    for row, shown, kinds in zip(tokens, mask, types, strict=True):
        parts = ([made.tokenizer.id_to_token(int(t)) for t in row[shown & (kinds == k)]] for k in (0, 1))
        yield tuple({word for word in part if word.isalpha()} for part in parts)


def test_no_pair_crosses_a_split(tmp_path):
    root = tmp_path / "data"
    root.mkdir()
    known = {"train": ["one", "two", "three"], "valid": ["four", "five"], "test": ["six", "seven"]}
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "."]
    (root / "vocab.txt").write_text("\n".join([*specials, *(name for names in known.values() for name in names)]))
    for split, names in known.items():
        (root / f"{split}.txt").write_text("\n\n".join(f"{name} {name} .\n{name} {name} ." for name in names))
    made = task(root, vocabulary={"kind": "wordpiece", "file": "vocab.txt"})
    for split, names in known.items():
        kinds = set()
        for epoch in range(30):
            batch = made.batch(split, np.arange(len(made.lengths(split))), epoch=epoch)
            for (first, second), label in zip(words(made, batch), batch["next_sentence_label"], strict=True):
                assert len(first) == len(second) == 1
                assert first | second <= set(names)
                assert (first == second) == (label == FOLLOWS)
                kinds.add(int(label))
        assert kinds == {0, 1}


def test_every_nth_document_is_held_out(tmp_path):
    root = corpora.documents(tmp_path / "data", train=20)
    made = task(root, valid=None, test=None, valid_every=5)
    assert [len(made.corpus(split).documents) for split in made.splits] == [16, 4]
    documents = {split: {tuple(d) for d in made.documents(split)} for split in made.splits}
    assert not documents["train"] & documents["valid"]


def test_validation_draws_the_same_each_time(tmp_path):
    made = task(corpora.documents(tmp_path / "data"))
    indices = np.arange(4)
    assert same(made.batch("valid", indices), made.batch("valid", indices))


def test_the_tokens_are_written_once(tmp_path, monkeypatch):
    root = corpora.documents(tmp_path / "data")
    task(root).lengths("train")
    monkeypatch.setattr(PreTraining, "documents", lambda self, split: pytest.fail("read again"))
    task(root, max_length=16).lengths("train")


def wordpiece(root):
    (root / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\none\ntwo\nzero\nthree\nfour\n.\n")
    return {"kind": "wordpiece", "file": "vocab.txt", "lowercase": True}


def test_a_given_wordpiece_vocabulary_and_wikitext_s_unknown_words(tmp_path):
    root = corpora.documents(tmp_path / "data")
    (root / "train.txt").write_text("One <unk> .\nTwo .\n\nThree .\nFour .\n")
    made = task(root, vocabulary=wordpiece(root))
    assert made.settings()["mask_token_id"] == 4
    assert [made.corpus("train").sentences[i].tolist() for i in range(2)] == [[5, 1, 10], [6, 10]]
    made.save_processor(tmp_path / "saved")
    from transformers import AutoTokenizer

    encoded = AutoTokenizer.from_pretrained(tmp_path / "saved")("one", "two")
    assert encoded["input_ids"] == [2, 5, 3, 6, 3]
    assert encoded["token_type_ids"] == [0, 0, 0, 1, 1]


def test_documents_without_pairs_are_counted_each_time(tmp_path):
    root = corpora.documents(tmp_path / "data")
    with (root / "train.txt").open("a") as file:
        file.write("\n\nOne sentence .\n")
    settings = recipe(corpora.pretraining_recipe(root))
    for _ in range(2):  # written, then from the cache
        said = []
        PreTraining(settings.data, settings.evaluation, say=said.append).corpus("train")
        assert "1 of 31 documents read for train have fewer than two sentences: left out" in said


def test_text_without_two_documents_is_refused(tmp_path):
    root = corpora.documents(tmp_path / "data", train=1, valid=2)
    with pytest.raises(UserError, match="the train text has fewer than two documents"):
        task(root, test=None).lengths("train")
    nothing = "\u2060\n\u2060\n"  # format characters are no tokens of WordPiece
    (root / "train.txt").write_text(f"One .\nTwo .\n\n{nothing}\n{nothing}", encoding="utf-8")
    with pytest.raises(UserError, match="the train text has fewer than two documents"):
        task(root, test=None, vocabulary=wordpiece(root)).lengths("train")
    with pytest.raises(UserError, match=r"give one of data.valid and data.valid_every"):
        task(root, valid=None, test=None)


@pytest.mark.parametrize("pairs", ["packed", "sentences"])
def test_losses_and_accuracies_are_what_one_counts_by_hand(tmp_path, pairs):
    root = corpora.documents(tmp_path / "data")
    whole = recipe(corpora.pretraining_recipe(root, data={"pairs": pairs}, model={"initializer_range": 0.3}))
    made = PreTraining(whole.data, whole.evaluation)
    model = build(whole, configuration(whole, made)).eval()
    batch = {name: torch.as_tensor(array) for name, array in made.batch("train", np.arange(24), epoch=0).items()}
    batch = {name: tensor for name, tensor in batch.items() if not name.startswith("num_")}
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(12):  # so that it is right now and then
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    rows = []
    for index in range(len(made.lengths("valid"))):  # each pair alone, without padding
        alone = made.batch("valid", np.asarray([index]))
        inputs = {name: torch.as_tensor(alone[name]) for name in ("input_ids", "attention_mask", "token_type_ids")}
        with torch.no_grad():
            out = model(**inputs)
        row = dict.fromkeys(("mlm_loss", "mlm_correct", "masked"), 0.0)
        for logits, label in zip(out.logits[0].double(), alone["labels"][0], strict=True):
            if label != IGNORED:
                row["masked"] += 1
                row["mlm_correct"] += int(max(range(len(logits)), key=logits.tolist().__getitem__) == label)
                row["mlm_loss"] -= float(logits.log_softmax(-1)[label])
        (follows, random), (label,) = out.seq_relationship_logits[0].tolist(), alone["next_sentence_label"]
        row["nsp_correct"] = float((label == FOLLOWS) == (follows > random))
        row["nsp_loss"] = float(np.log1p(np.exp((random - follows) * (1 if label == FOLLOWS else -1))))
        rows.append(row)
    measured = made.measure(Predictor(model), "valid")
    assert len(measured.examples) == len(rows)
    for found, expected in zip(measured.examples, rows, strict=True):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)
    sums = {name: sum(row[name] for row in rows) for name in rows[0]}
    expected = {f"mlm_{name}": sums[f"mlm_{key}"] / sums["masked"] for name, key in NAMED}
    expected |= {f"nsp_{name}": sums[f"nsp_{key}"] / len(rows) for name, key in NAMED}
    assert 0 < expected["mlm_accuracy"] < 1
    assert 0 < expected["nsp_accuracy"] < 1
    expected["loss"] = expected["mlm_loss"] + expected["nsp_loss"]
    assert measured.metrics == pytest.approx(expected, rel=1e-5)
