"""Classification: one prediction an example whichever way it is asked for, whatever stands beside it."""

import json

import numpy as np
import pytest
from sklearn import metrics as reference
from tests import corpora
from tests.image_files import write_cifar10
from tests.runs import overfits, stands_alone
from transformers import AutoTokenizer, pipeline
from typer.testing import CliRunner

from splitstep.cli import app
from splitstep.cli.use import classify
from splitstep.data.listops import Shape, write
from splitstep.data.vocabulary import BERT_SPECIALS, KINDS
from splitstep.models.presets import PRESETS
from splitstep.recipe import recipe
from splitstep.solver.errors import UserError
from splitstep.tables import toml, without
from splitstep.tasks.classification import Classification
from splitstep.tasks.matching import Matching
from splitstep.tasks.prediction import Predictor
from splitstep.tasks.scores import SCORES
from splitstep.training.engine import evaluate, loaded, train
from splitstep.training.ready import build, configuration
from splitstep.training.run import Run

TRAINED = {"updates": 40, "learning_rate": 1e-2, "evaluate_every": 40}


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPLITSTEP_CACHE", str(tmp_path / "cache"))


def task_of(tables, cls=Classification):
    settings = recipe(tables)
    return cls(settings.data, settings.evaluation)


def untrained(tables, cls=Classification, **model):
    settings = recipe(corpora.merged(tables, {"model": model}))
    task = cls(settings.data, settings.evaluation)
    return task, build(settings, configuration(settings, task)).eval()


def predictions(run, split):
    return [json.loads(line) for line in (run / f"predictions-{split}.jsonl").read_text().splitlines()]


# Every way to ask


def test_evaluate_classify_and_pipeline_say_the_same(tmp_path):
    tables = corpora.classification_recipe(corpora.news(tmp_path / "data"), training=TRAINED)
    results = train(recipe(tables), tmp_path / "run").results
    assert results["metrics"]["test"]["accuracy"] > 0.9
    task = task_of(tables)
    texts = [example.texts[0] for example in task.examples("test")]
    expected = [row["prediction"] for row in predictions(tmp_path / "run", "test")]

    given = "\n".join([*texts, "", "not UTF-8: \xff"]).encode("latin-1")
    answer = CliRunner().invoke(app, ["classify", str(tmp_path / "run")], input=given, catch_exceptions=False)
    *lines, empty, last = answer.stdout.splitlines()
    assert [line.split("\t")[0] for line in lines] == expected
    assert (empty, len(last.split("\t"))) == ("", 2)
    assert "line 22: not UTF-8" in answer.stderr

    asking = pipeline("text-classification", model=str(tmp_path / "run" / "model"), device="cpu")
    found = asking(texts, truncation=True)
    assert [row["label"] for row in found] == expected
    for line, row in zip(lines, found, strict=True):
        assert float(line.split("\t")[1]) == pytest.approx(row["score"], abs=2e-4)


def test_pairs_in_one_sequence_are_the_same_every_way(tmp_path):
    tables = corpora.matching_recipe(corpora.papers(tmp_path / "data"), model={"initializer_range": 0.5})
    whole = recipe({**tables, "task": "text-classification"})
    train(whole, tmp_path / "run")
    task, predictor = loaded(Run(tmp_path / "run"), whole)
    pairs = [example.texts for example in task.examples("test")]
    expected = [row["prediction"] for row in predictions(tmp_path / "run", "test")]
    said = task.classified(pairs, predictor)
    assert [label for label, _ in said] == expected
    asking = pipeline("text-classification", model=str(tmp_path / "run" / "model"), device="cpu")
    found = asking([{"text": a, "text_pair": b} for a, b in pairs], truncation=True)
    assert [row["label"] for row in found] == expected
    assert [row["score"] for row in found] == pytest.approx([probability for _, probability in said], abs=1e-5)
    with pytest.raises(UserError, match="line 3: 1 texts with tabs between them, and the model reads 2"):
        task.example_of("one text", place="line 3")


def test_the_tokens_are_those_of_the_saved_tokenizer(tmp_path):
    tables = corpora.matching_recipe(corpora.papers(tmp_path / "data"), data={"max_length": 10, "truncation": "tail"})
    task, _ = untrained({**tables, "task": "text-classification"})
    task.save_processor(tmp_path / "saved")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    pairs = [example.texts for example in task.examples("valid")]
    batch = task.batch("valid", np.arange(len(pairs)))
    theirs = tokenizer(*map(list, zip(*pairs, strict=True)), truncation=True, padding=True, return_tensors="np")
    for name in ("input_ids", "attention_mask", "token_type_ids"):
        assert np.array_equal(batch[name], theirs[name]), name


def test_classify_refuses_a_run_of_another_task(tmp_path):
    (tmp_path / "recipe.toml").write_text(toml(corpora.translation_recipe(tmp_path)))
    with pytest.raises(UserError, match="is a run of the task translation, not of one that labels texts or images"):
        classify(tmp_path)


# What stands beside an example


POOLED = [*((name, "mean") for name in PRESETS), ("transformer", "first"), ("transformer", "last")]


@pytest.mark.parametrize(("preset", "pooling"), POOLED)
def test_padding_and_the_rest_of_a_batch_change_no_prediction(preset, pooling, tmp_path):
    tables = corpora.classification_recipe(corpora.news(tmp_path / "data"))
    task, model = untrained(tables, preset=preset, pooling=pooling, num_hidden_layers=2)
    stands_alone(task, model, task.sequences("test"), atol=2e-6)


@pytest.mark.parametrize("comparison", ["symmetric", "nli", "joined"])
def test_matching_is_symmetric_where_it_should_be(comparison, tmp_path):
    tables = corpora.matching_recipe(corpora.papers(tmp_path / "data"))
    swapped = corpora.merged(tables, {"data": {"texts": ["text2", "text1"]}})
    task, model = untrained(tables, Matching, comparison=comparison, initialization="xavier")
    one, other = (t.logits(Predictor(model), t.sequences("test")) for t in (task, task_of(swapped, Matching)))
    assert np.allclose(one, other, atol=1e-6) == (comparison == "symmetric")
    alone = task.logits(Predictor(model, tokens=1), task.sequences("test"))
    np.testing.assert_allclose(one, alone, atol=5e-6)


def test_matching_learns_and_evaluate_finds_the_same(tmp_path):
    model = {"comparison": "symmetric", "initialization": "xavier", "pooling": "mean"}
    tables = corpora.matching_recipe(corpora.papers(tmp_path / "data"), model=model, training=TRAINED)
    outcome = train(recipe(tables), tmp_path / "run")
    assert outcome.results["metrics"]["test"]["accuracy"] > 0.75
    run = Run(tmp_path / "run")
    assert evaluate(run, run.recipe(), "test")["metrics"] == outcome.results["metrics"]["test"]
    task, predictor = loaded(run, run.recipe())
    pairs = [example.texts for example in task.examples("test")]
    expected = [row["prediction"] for row in predictions(run.folder, "test")]
    assert [label for label, _ in task.classified(pairs, predictor)] == expected


# Reading


def test_a_held_out_part_and_the_rest_are_the_whole(tmp_path):
    root = corpora.news(tmp_path / "data", train=50)
    tables = corpora.classification_recipe(root, data={"valid": None, "test": None, "valid_every": 10})
    tables["data"] = {key: value for key, value in tables["data"].items() if value is not None}
    task = task_of(tables)
    assert task.splits == ["train", "valid"]
    parts = {split: [example.place for example in task.examples(split)] for split in task.splits}
    assert len(parts["valid"]) == 5
    assert sorted(parts["train"] + parts["valid"]) == sorted(f"{root / 'train.csv'}, line {i + 1}" for i in range(50))


@pytest.mark.parametrize("truncation", ["head", "tail"])
def test_the_part_of_a_long_text_that_is_asked_for_is_kept_and_counted(truncation, tmp_path):
    root = corpora.news(tmp_path / "data")
    said = []
    settings = recipe(corpora.classification_recipe(root, data={"max_length": 6, "truncation": truncation}))
    task = Classification(settings.data, settings.evaluation, say=said.append)
    chosen = task.sequences("test")
    words = [example.texts[0].split() for example in task.examples("test")]
    for row, text in enumerate(words):
        kept = text[:4] if truncation == "head" else text[-4:]
        tokens = [task.tokenizer.id_to_token(token) for token in chosen.tokens[row]]
        assert tokens == ["<s>", *kept, "</s>"]
    long = sum(len(text) > 4 for text in words)
    assert f"{long} of 20 test examples are longer than 6 tokens; the {truncation} of their text is kept" in said


@pytest.mark.parametrize(("kind", "share"), [("word", None), ("grey", "100%"), ("listops", "100%")])
def test_a_vocabulary_that_knows_few_of_the_words_is_named(kind, share, tmp_path):
    root = corpora.news(tmp_path / "data")
    said = []
    settings = recipe(corpora.classification_recipe(root, data={"vocabulary": {"kind": kind}}))
    Classification(settings.data, settings.evaluation, say=said.append).sequences("train")
    lines = [line for line in said if "unknown" in line]
    assert [line.split(" of the train tokens are unknown")[0] for line in lines] == [share] * (share is not None)


def test_words_are_dropped_by_seed_epoch_and_example_alone(tmp_path):
    root = corpora.news(tmp_path / "data")
    task = task_of(corpora.classification_recipe(root, data={"word_dropout": 0.3}))
    every, unknown = np.arange(200), 3
    whole = task.batch("train", every)
    drawn, again = (task.batch("train", every, epoch=2, seed=5)["input_ids"] for _ in range(2))
    words = whole["input_ids"] > 4
    assert np.array_equal(drawn, again)
    assert (drawn == unknown)[words].mean() == pytest.approx(0.3, abs=0.03)
    assert np.array_equal(drawn[drawn != unknown], whole["input_ids"][drawn != unknown])
    assert np.array_equal(drawn[~words], whole["input_ids"][~words])
    assert not np.array_equal(drawn, task.batch("train", every, epoch=3, seed=5)["input_ids"])
    alone = task.batch("train", every[7:8], epoch=2, seed=5)["input_ids"][0]
    assert np.array_equal(alone, drawn[7, : len(alone)])


def test_labels_of_a_model_are_its_names_and_others_are_refused(tmp_path):
    root = corpora.news(tmp_path / "data")
    task, model = untrained(corpora.classification_recipe(root))
    assert model.config.id2label == dict(enumerate(corpora.TOPICS))
    (root / "classes.txt").write_text("A\nB\nC\nD\n")
    model.save_pretrained(tmp_path / "model")
    task.save_processor(tmp_path / "model")
    moved = Classification(task.data, task.evaluation, folder=tmp_path / "model")
    with pytest.raises(UserError, match=r"test.csv, line 1: label '[A-D]' is none of World, Sports"):
        moved.sequences("test")


def test_malformed_rows_stop_a_run_or_are_said(tmp_path):
    root = corpora.news(tmp_path / "data")
    with (root / "train.csv").open("a") as file:
        file.write('"1","no description"\n')
    with pytest.raises(UserError, match=r"train.csv, line 201: 2 columns instead of 3"):
        untrained(corpora.classification_recipe(root))
    settings = recipe(corpora.classification_recipe(root, data={"on_bad": "skip"}))
    for _ in range(2):  # made, then from the cache
        said = []
        Classification(settings.data, settings.evaluation, say=said.append).sequences("train")
        assert any("1 of 201 rows of train.csv are malformed and left out" in line for line in said)


def test_the_order_of_files_decides_what_is_held_out(tmp_path):
    root = corpora.news(tmp_path / "data")
    for names in (["train.csv", "test.csv"], ["test.csv", "train.csv"], ["train.csv"], ["train.csv", "train.csv"]):
        tables = corpora.classification_recipe(root, data={"train": names, "valid_every": 3})
        settings = recipe(without(without(tables, "data.valid"), "data.test"))
        task = Classification(settings.data, settings.evaluation)
        counts = {split: len(task.sequences(split)) for split in ("valid", "train")}
        read = {split: list(task.examples(split)) for split in counts}
        assert counts == {split: len(rows) for split, rows in read.items()}
        assert task.sequences("train").labels.tolist() == [task._number(example) for example in read["train"]]


@pytest.mark.parametrize(
    ("section", "key", "value", "complaint"),
    [
        ("data", "format", "agnews", r"unknown data.format 'agnews'; .*did you mean 'ag-news'"),
        ("data", "label", "clas", r"unknown data.(texts|label) 'clas'; .*did you mean 'class'"),
        ("data", "texts", ["headline"], r"unknown data.(texts|label) 'headline'"),
        ("evaluation", "metrics", ["acuracy"], r"unknown metric of classes 'acuracy'; .*did you mean 'accuracy'"),
        ("evaluation", "metrics", ["pearson"], r"unknown metric of classes 'pearson'"),
    ],
)
def test_what_is_in_no_table_is_refused(section, key, value, complaint, tmp_path):
    tables = corpora.classification_recipe(tmp_path, **{section: {key: value}})
    with pytest.raises(UserError, match=complaint):
        task_of(tables)


# Numbers, causal models, baselines, metrics


def test_numbers_are_learnt_by_regression(tmp_path):
    root = corpora.news(tmp_path / "data")
    numbers = {"labels": "numbers"}
    tables = corpora.classification_recipe(root, data=numbers, training=TRAINED, model={"pooling": "mean"})
    results = train(recipe(tables), tmp_path / "run").results
    assert results["metric"] == "pearson"
    assert set(results["metrics"]["test"]) == {"pearson", "spearman", "loss"}
    assert results["metrics"]["test"]["pearson"] > 0.8
    rows = predictions(tmp_path / "run", "test")
    errors = [(row["label"] - row["prediction"]) ** 2 for row in rows]
    assert np.mean(errors) == pytest.approx(results["metrics"]["test"]["loss"])
    task, predictor = loaded(Run(tmp_path / "run"), recipe(tables))
    ((value, probability),) = task.classified([next(task.examples("test")).texts], predictor)
    assert float(value) == pytest.approx(rows[0]["prediction"], abs=1e-3)
    assert probability is None


def test_a_causal_model_classifies_by_its_last_token(tmp_path):
    model = {"kind": "causal", "pooling": "last"}
    tables = corpora.classification_recipe(corpora.news(tmp_path / "data"), model=model, training=TRAINED)
    assert train(recipe(tables), tmp_path / "run").results["metrics"]["valid"]["accuracy"] > 0.6


def _listops(folder):
    shape = Shape(max_depth=4, max_args=4, min_length=4, max_length=30)
    list(write(folder, name="x", counts={"train": 300, "val": 50, "test": 50}, seed=1, shape=shape))
    names = {split: [f"x_{name}.tsv"] for split, name in (("train", "train"), ("valid", "val"), ("test", "test"))}
    return {"root": str(folder), "format": "listops", "max_length": 32, "vocabulary": {"kind": "listops"}, **names}


def _bytes(folder):
    data = corpora.classification_recipe(corpora.news(folder))["data"]
    return data | {"max_length": 80, "vocabulary": {"kind": "byte", "normalization": "none"}}


def _pathfinder(folder):
    rng = np.random.default_rng(0)
    np.savez(folder / "x.npz", x=rng.integers(0, 256, (12, 6, 6), np.uint8), y=np.arange(12) % 2)
    names = {split: ["x.npz"] for split in ("train", "valid", "test")}
    return {"root": str(folder), "format": "pathfinder", "max_length": 38, "vocabulary": {"kind": "grey"}, **names}


def _grey_images(folder):
    pixels = np.random.default_rng(0).integers(0, 256, (12, 3, 32, 32), np.uint8)
    write_cifar10(folder, "x.bin", pixels, np.arange(12) % 10)
    names = {split: ["x.bin"] for split in ("train", "valid", "test")}
    return {"root": str(folder), "format": "cifar10-grey", "max_length": 1026, "vocabulary": {"kind": "grey"}, **names}


def _news(folder, **vocabulary):
    return corpora.classification_recipe(corpora.news(folder), data={"vocabulary": vocabulary})["data"]


def _word_pieces(folder):
    pieces = [*BERT_SPECIALS.values(), *"abcdefghijklmnopqrstuvwxyz", *(f"##{letter}" for letter in "aeioulnrst")]
    (folder / "vocab.txt").write_text("\n".join(pieces))
    return _news(folder, kind="wordpiece", file="vocab.txt", lowercase=True)


VOCABULARIES = {
    "bpe": lambda folder: _news(folder, kind="bpe", size=300),
    "word": lambda folder: _news(folder, kind="word"),
    "byte": _bytes,
    "wordpiece": _word_pieces,
    "grey": _pathfinder,
    "listops": _listops,
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_vocabulary_says_the_same_every_way(kind, tmp_path):
    tables = {**corpora.classification_recipe(tmp_path), "data": VOCABULARIES[kind](tmp_path)}
    whole = recipe({**tables, "model": corpora.TINY | {"initializer_range": 0.5}})
    train(whole, tmp_path / "run")
    task, predictor = loaded(Run(tmp_path / "run"), whole)
    texts = [example.texts for example in task.examples("test")]
    expected = [row["prediction"] for row in predictions(tmp_path / "run", "test")]
    assert len(set(expected)) > 1
    said = task.classified(texts, predictor)
    assert [label for label, _ in said] == expected
    asking = pipeline("text-classification", model=str(tmp_path / "run" / "model"), device="cpu")
    found = asking([text for (text,) in texts], truncation=True)
    assert [row["label"] for row in found] == expected
    assert [row["score"] for row in found] == pytest.approx([probability for _, probability in said], abs=1e-5)


@pytest.mark.parametrize("data", [_listops, _bytes, _pathfinder, _grey_images])
def test_every_kind_of_long_sequence_overfits_one_batch(data, tmp_path):
    model = {"initialization": "xavier"}
    task, model = untrained(
        {**corpora.classification_recipe(tmp_path), "data": data(tmp_path), "model": corpora.TINY | model}
    )
    assert overfits(model, task.batch("train", np.arange(12)))


def test_listops_is_reported_beside_the_guess_from_its_root(tmp_path):
    task, model = untrained({**corpora.classification_recipe(tmp_path), "data": _listops(tmp_path)})
    measured = task.measure(Predictor(model), "test")
    rows = {split: [(e.texts[0].split("[")[1][:2], e.label) for e in task.examples(split)] for split in task.splits}
    right = 0
    for root, label in rows["test"]:
        labels = [other for clue, other in rows["train"] if clue == root]
        right += label == max(dict.fromkeys(labels), key=labels.count)
    assert measured.metrics["baseline_accuracy"] == pytest.approx(right / 50)
    assert model.config.num_labels == 10


def test_metrics_are_those_of_the_reference():
    rng = np.random.default_rng(0)
    labels, said = rng.integers(0, 2, 200), rng.integers(0, 2, 200)
    classes = {name: score(labels, said) for name, score in SCORES["classes"].items()}
    assert classes == pytest.approx(
        {
            "accuracy": reference.accuracy_score(labels, said),
            "f1": reference.f1_score(labels, said, average="macro"),
            "f1_binary": reference.f1_score(labels, said),
            "matthews": reference.matthews_corrcoef(labels, said),
        }
    )
    x, y = rng.normal(size=200), rng.normal(size=200)
    ranks = [np.argsort(np.argsort(v)) for v in (x, y)]
    assert SCORES["numbers"]["pearson"](x, y) == pytest.approx(np.corrcoef(x, y)[0, 1])
    assert SCORES["numbers"]["spearman"](x, y) == pytest.approx(np.corrcoef(*ranks)[0, 1])
    assert SCORES["numbers"]["pearson"](x, np.ones(200)) == 0
