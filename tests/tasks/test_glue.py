"""GLUE: metrics by their definitions, averages as published, fine-tuning from what was pre-trained."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests import corpora
from tests.runs import overfits, stands_alone
from transformers import pipeline
from typer.testing import CliRunner

from splitstep.cli import app
from splitstep.cli.glue import RECIPES
from splitstep.compare.glue import Experiment, _averages, fine_tune
from splitstep.recipe import recipe
from splitstep.solver.errors import RunError, UserError
from splitstep.tables import toml
from splitstep.tasks.glue import GLUE, Glue, averages, metrics_of, score
from splitstep.tasks.scores import SCORES
from splitstep.training.engine import evaluate, loaded, train
from splitstep.training.ready import build, configuration, task_of
from splitstep.training.run import Run


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPLITSTEP_CACHE", str(tmp_path / "cache"))


def tables(tmp_path, **sections):
    return corpora.glue_recipe(corpora.glue(tmp_path / "data"), **sections)


LABELS = np.asarray([0, 0, 1, 1, 1, 0, 1, 1])
GUESSES = np.asarray([0, 1, 1, 1, 0, 0, 1, 1])
NUMBERS = np.asarray([0.0, 1.0, 3.5, 5.0])
VALUES = np.asarray([0.2, 0.1, 2.0, 9.0])


def test_metrics_are_what_their_names_say():
    tp, tn, fp, fn = 4, 2, 1, 1
    classes = {
        "accuracy": (tp + tn) / 8,
        "f1_binary": 2 * tp / (2 * tp + fp + fn),
        "matthews": (tp * tn - fp * fn) / np.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)),
    }
    for name, value in classes.items():
        assert SCORES["classes"][name](LABELS, GUESSES) == pytest.approx(value)
    assert SCORES["numbers"]["pearson"](NUMBERS, VALUES) == pytest.approx(np.corrcoef(NUMBERS, VALUES)[0, 1])
    ranks = np.corrcoef([0, 1, 2, 3], [1, 0, 2, 3])[0, 1]
    assert SCORES["numbers"]["spearman"](NUMBERS, VALUES) == pytest.approx(ranks)


# Macaron Net, Table 2: CoLA, SST-2, MRPC, STS-B, QQP, MNLI, QNLI, RTE; then the published average of nine.
TABLE = {
    "GPT": ([47.2, 93.1, (87.7, 83.7), (85.3, 84.8), (70.1, 88.1), (80.7, 80.6), 87.2, 69.1], 76.9, 78.4),
    "BERT": ([52.1, 93.5, (88.9, 84.8), (87.1, 85.8), (71.2, 89.2), (84.6, 83.4), 90.5, 66.4], 78.3, 80.0),
    "Macaron": ([57.6, 94.0, (88.4, 84.4), (87.5, 86.3), (70.8, 89.0), (85.4, 84.5), 91.6, 70.5], 79.7, 81.5),
}


@pytest.mark.parametrize("name", TABLE)
def test_averages_are_those_of_the_published_table(name):
    cells, nine, eight = TABLE[name]
    scores = {task: float(np.mean(cell)) for task, cell in zip(GLUE, cells, strict=True)}
    found = averages(scores)
    assert [round(value, 1) for value in found.values()] == [eight, nine]
    assert [*found] == ["mean of eight tasks", "mean of nine, WNLI at 65.1"]
    assert averages({"CoLA": 50.0, "RTE": 60.0}) == {"mean of 2 tasks": 55.0}


def test_a_score_is_the_mean_of_metrics_and_of_both_halves_of_mnli():
    assert score("MRPC", {"valid": {"accuracy": 0.8, "f1": 0.9, "loss": 3.0}}) == pytest.approx(85)
    halves = {"valid": {"accuracy": 0.8}, "mismatched": {"accuracy": 0.7}}
    assert score("MNLI", halves) == pytest.approx(75)


@pytest.mark.parametrize("name", GLUE)
def test_every_task_trains_and_reports_its_metrics(tmp_path, name):
    whole = recipe(tables(tmp_path, data={"task": name}, training={"updates": 2}))
    results = train(whole, tmp_path / "run").results
    assert set(metrics_of(name)) < results["metrics"]["valid"].keys()
    assert results["metric"] == metrics_of(name)[0]
    assert evaluate(Run(tmp_path / "run"), whole, "valid")["metrics"] == results["metrics"]["valid"]


def made(tmp_path, name, **model):
    whole = recipe(tables(tmp_path, data={"task": name}, model=model))
    task = task_of(whole)
    return task, build(whole, configuration(whole, task))


@pytest.mark.parametrize("name", GLUE)
def test_every_task_overfits_one_batch(tmp_path, name):
    task, model = made(tmp_path, name)
    assert overfits(model, task.batch("train", np.arange(12)))


@pytest.mark.parametrize("name", GLUE)
def test_padding_and_the_rest_of_a_batch_change_no_prediction(tmp_path, name):
    task, model = made(tmp_path, name, initializer_range=0.5)
    stands_alone(task, model.eval(), task.sequences("valid"), atol=5e-6)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["SST-2", "MRPC", "STS-B"])
def test_evaluate_classify_and_pipeline_say_the_same(tmp_path, name, precision):
    training = {"updates": 4, "precision": precision}
    whole = recipe(tables(tmp_path, data={"task": name}, model={"initializer_range": 0.5}, training=training))
    train(whole, tmp_path / "run")
    run = Run(tmp_path / "run")
    rows = [json.loads(line) for line in (run.folder / "predictions-valid.jsonl").read_text().splitlines()]
    task, predictor = loaded(run, whole)
    texts = [example.texts for example in task.examples("valid")]
    said = task.classified(texts, predictor)
    asking = pipeline("text-classification", model=str(run.model), device="cpu")
    found = asking([dict(zip(("text", "text_pair"), own, strict=False)) for own in texts], truncation=True)
    if name == "STS-B":
        assert [float(value) for value, _ in said] == pytest.approx([row["prediction"] for row in rows], abs=1e-3)
        assert [row["score"] for row in found] == pytest.approx([row["prediction"] for row in rows], abs=1e-4)
    else:
        assert [label for label, _ in said] == [row["prediction"] for row in rows] == [row["label"] for row in found]
        assert [row["score"] for row in found] == pytest.approx([likely for _, likely in said], abs=1e-5)


def test_a_score_that_is_none_is_a_bad_row(tmp_path):
    made = tables(tmp_path, data={"task": "STS-B"})
    path = tmp_path / "data" / "glue" / "STS-B" / "train.tsv"
    header, first, second, *rows = path.read_text().splitlines()
    wrong = [first.replace("1.000", "n/a"), second.replace("4.500", "55")]
    path.write_text("\n".join([header, *rows, *wrong]) + "\n")
    with pytest.raises(UserError, match=r"STS-B/train\.tsv, line 24: the label 'n/a' is no number"):
        task_of(recipe(made)).sequences("train")
    skipping = recipe(corpora.merged(made, {"data": {"on_bad": "skip"}}))
    said = []
    assert len(Glue(skipping.data, None, say=said.append).sequences("train")) == len(rows)
    assert any(line.endswith("line 24: the label 'n/a' is no number; then line 25") for line in said)


def test_mismatched_examples_are_measured_where_they_are(tmp_path):
    made = tables(tmp_path, data={"task": "MNLI"}, training={"updates": 1})
    folder = tmp_path / "data" / "glue" / "MNLI"
    assert task_of(recipe(made)).splits == ["train", "valid"]
    (folder / "dev_mismatched.tsv").write_bytes((folder / "dev_matched.tsv").read_bytes())
    results = train(recipe(made), tmp_path / "run").results
    assert results["metrics"]["mismatched"] == results["metrics"]["valid"]
    assert evaluate(Run(tmp_path / "run"), recipe(made))["split"] == "valid"


def test_only_symmetric_tasks_swap_their_texts_and_only_in_training(tmp_path):
    root = corpora.glue(tmp_path / "data")
    indices = np.arange(12)

    def batch(name, **draw):
        made = Glue(recipe(corpora.glue_recipe(root, data={"task": name, "swap": 1.0})).data, None)
        return made, made.batch("train", indices, **draw)

    for name, task in GLUE.items():
        made, before = batch(name)
        _, after = batch(name, epoch=0, seed=1)
        assert task.symmetric != np.array_equal(before["input_ids"], after["input_ids"])
        if task.symmetric:
            for row, other in zip(before["input_ids"], after["input_ids"], strict=True):
                (a, b), (c, d) = (_texts(made, tokens) for tokens in (row, other))
                assert (a, b) == (d, c)
            twice = Glue(made.data.model_copy(update={"swap": 0.5}), None)
            types = [twice.batch("train", indices, epoch=e, seed=1)["token_type_ids"] for e in (0, 0, 1)]
            assert np.array_equal(types[0], types[1])


def _texts(made, tokens):
    ids = made.settings()
    end = np.flatnonzero(tokens == ids["sep_token_id"])
    return tokens[1 : end[0]].tolist(), tokens[end[0] + 1 : end[1]].tolist()


# Beginning with another model


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A pre-trained encoder and a causal language model, as runs."""
    root = tmp_path_factory.mktemp("begun")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPLITSTEP_CACHE", str(root / "cache"))
        train(recipe(corpora.pretraining_recipe(corpora.documents(root / "text"))), root / "encoder")
        vocabulary = {"size": 300}
        causal = corpora.language_recipe(corpora.articles(root / "articles"), data={"vocabulary": vocabulary})
        train(recipe(causal), root / "causal")
    return root


@pytest.mark.parametrize("kind", ["encoder", "causal"])
@pytest.mark.parametrize("name", ["CoLA", "MRPC"])
def test_fine_tuning_begins_with_the_weights_and_the_vocabulary_of_a_model(tmp_path, begun, kind, name):
    run = begun / kind
    made = tables(tmp_path, data={"task": name}, model={}, training={"init": str(run)})
    whole = recipe(made | {"model": {"dropout": 0.1}})
    task = task_of(whole)
    model = build(whole, configuration(whole, task))
    assert (model.config.kind, model.config.dropout) == (kind, 0.1)
    assert model.config.pooling == {"encoder": "first", "causal": "last"}[kind]
    found, trained = model.state_dict(), load_file(run / "model" / "model.safetensors")
    body = [key for key in trained if key.startswith("model.")]
    assert len(body) > 10
    assert all(torch.equal(found[key], trained[key]) for key in body)
    vocabularies = [t.get_vocab() for t in (task.tokenizer, task_of(Run(run).recipe()).tokenizer)]
    assert vocabularies[0] == vocabularies[1]
    results = train(whole, tmp_path / "run").results
    assert evaluate(Run(tmp_path / "run"), whole, "valid")["metrics"] == results["metrics"]["valid"]


def test_a_checkpoint_is_a_model_to_begin_with(tmp_path, begun):
    checkpoint = sorted((begun / "encoder" / "checkpoints").glob("checkpoint-*"))[-1]
    whole = recipe(tables(tmp_path, training={"init": str(checkpoint)}) | {"model": {}})
    model = build(whole, configuration(whole, task_of(whole)))
    found, trained = model.state_dict(), load_file(checkpoint / "model.safetensors")
    assert all(torch.equal(found[key], trained[key]) for key in trained if key.startswith("model."))
    assert train(whole, tmp_path / "run").results["metrics"]["valid"]


def test_random_weights_keep_the_architecture_and_the_vocabulary(tmp_path, begun):
    made = tables(tmp_path, training={"init": str(begun / "encoder" / "model"), "init_weights": "random"})
    whole = recipe(made | {"model": {}})
    model = build(whole, configuration(whole, task_of(whole)))
    trained = load_file(begun / "encoder" / "model" / "model.safetensors")
    key = "model.encoder.embeddings.tokens.weight"
    assert model.state_dict()[key].shape == trained[key].shape
    assert not torch.equal(model.state_dict()[key], trained[key])


def test_a_model_that_does_not_fit_is_refused_and_leaves_no_run_folder(tmp_path, begun):
    init = {"init": str(begun / "encoder")}
    cases = {
        r"is neither the folder of a finished run nor of a model": {"training": {"init": str(tmp_path)}},
        r"the weights in .* do not fit": {"training": init, "model": {"hidden_size": 64}},
        r"up to 48 tokens, and the model in .* positions for 24": {"training": init, "data": {"max_length": 48}},
        r"needs training.init, the model it is like": {"training": {"init_weights": "random"}},
    }
    for complaint, sections in cases.items():
        with pytest.raises(UserError, match=complaint):
            train(recipe(tables(tmp_path, **({"model": corpora.TINY} | sections))), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_vocabulary_of_another_model_is_refused(tmp_path, begun):
    import shutil

    shutil.copytree(begun / "encoder" / "model", tmp_path / "mixed")
    shutil.copy(begun / "causal" / "model" / "tokenizer.json", tmp_path / "mixed")
    config = json.loads((tmp_path / "mixed" / "config.json").read_text())
    (tmp_path / "mixed" / "config.json").write_text(json.dumps(config | {"vocab_size": 100}))
    with pytest.raises(UserError, match=r"the vocabulary in .*mixed belongs to another model"):
        train(recipe(tables(tmp_path, training={"init": str(tmp_path / "mixed")})), tmp_path / "run")


def test_what_a_saved_configuration_leaves_out_is_known(tmp_path, begun):
    from splitstep import SplitstepForPreTraining, preset

    usual = {"vocab_size": 32768, "max_position_embeddings": 512}  # the defaults, which config.json does not repeat
    SplitstepForPreTraining(preset("transformer", **usual, **corpora.TINY)).save_pretrained(tmp_path / "model")
    tokenizer = (begun / "encoder" / "model" / "tokenizer.json").read_bytes()
    (tmp_path / "model" / "tokenizer.json").write_bytes(tokenizer)
    whole = recipe(tables(tmp_path, training={"init": str(tmp_path / "model")}, data={"max_length": 400}))
    config = configuration(whole, task_of(whole))
    assert usual.items() <= config.to_dict().items()


@pytest.mark.parametrize("task", ["MRPC", "MNLI", "STS-B"])  # with as many labels, more, and a number
def test_a_model_of_other_labels_gives_its_body_and_not_its_classifier(tmp_path, begun, task):
    first = recipe(tables(tmp_path, data={"task": "RTE"}, training={"init": str(begun / "encoder"), "updates": 2}))
    train(first, tmp_path / "first")
    chosen = {"init": str(tmp_path / "first"), "updates": 1}
    second = recipe(tables(tmp_path, data={"task": task}, training=chosen))
    model = build(second, configuration(second, task_of(second)))
    before = load_file(tmp_path / "first" / "model" / "model.safetensors")
    after = model.state_dict()
    kept = {key for key in before if after[key].shape == before[key].shape and torch.equal(after[key], before[key])}
    assert "classifier.weight" in before.keys() - kept <= {"classifier.weight", "classifier.bias"}
    assert not before["classifier.bias"].eq(0).all()
    assert after["classifier.bias"].eq(0).all()


def test_a_run_knows_again_what_it_began_with(tmp_path, begun):
    import shutil

    shutil.copytree(begun / "encoder" / "model", tmp_path / "model")
    whole = recipe(tables(tmp_path, training={"init": str(tmp_path / "model"), "updates": 1}))
    train(whole, tmp_path / "run")
    other = load_file(tmp_path / "model" / "model.safetensors")
    from safetensors.torch import save_file

    save_file({key: tensor + 1 for key, tensor in other.items()}, tmp_path / "model" / "model.safetensors")
    with pytest.raises(UserError, match=r"was begun with other data: training.init/model.safetensors changed"):
        train(whole, tmp_path / "run")


# The experiment


def _small(tmp_path, **grid):
    made = tables(tmp_path, data={"max_length": 128}, training={"updates": 2}) | {"model": {}, "grid": grid}
    (tmp_path / "glue.toml").write_text(toml(made))
    return str(tmp_path / "glue.toml")


def test_all_tasks_are_fine_tuned_once_and_set_side_by_side(tmp_path, begun):
    name = _small(tmp_path, **{"training.learning_rate": [1e-3, 1e-2]})
    experiment = Experiment(tmp_path / "out", (name,), begun / "encoder", ("RTE", "STS-B"), seeds=2)
    results = fine_tune(experiment, say=lambda line: None)
    assert [row["task"] for row in results["tasks"]] == ["RTE", "STS-B"]
    for row in results["tasks"]:
        assert row["settings_tried"] == 2
        assert len(row["score"]["values"]) == 2
        folders = sorted((tmp_path / "out" / row["task"]).iterdir())
        assert len(folders) == 4
        runs = [json.loads((folder / "results.json").read_text())["metrics"] for folder in folders]
        means = [np.mean([score(row["task"], run) for run in pair]) for pair in (runs[:2], runs[2:])]
        assert row["score"]["mean"] == pytest.approx(max(means))
    mean = np.mean([row["score"]["mean"] for row in results["tasks"]])
    assert results["averages"]["mean of 2 tasks"]["mean"] == pytest.approx(mean)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("model.safetensors")}
    assert fine_tune(experiment, say=lambda line: None) == results
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("model.safetensors")} == before
    (tmp_path / "out" / "RTE" / folders[0].name / "results.json").unlink()  # and so is to be finished
    assert fine_tune(replace(experiment, jobs=2), say=lambda line: None) == results


def test_tasks_with_unequal_seeds_have_the_mean_of_their_means():
    scores = {"CoLA": {"mean": 20.0, "values": [10.0, 20.0, 30.0]}, "RTE": {"mean": 60.0, "values": [60.0]}}
    assert _averages(scores) == {"mean of 2 tasks": {"mean": 40.0, "std": None, "values": [40.0]}}
    scores["RTE"]["values"] = [50.0, 60.0, 70.0]
    assert _averages(scores)["mean of 2 tasks"] == {"mean": 40.0, "std": 10.0, "values": [30.0, 40.0, 50.0]}


def test_a_run_that_fails_leaves_the_others_finished(tmp_path, begun, monkeypatch):
    from splitstep.training import engine

    trained = engine.train

    def failing(whole, *args, **kwargs):
        if whole.data.task == "RTE":
            raise RuntimeError("out of luck")
        return trained(whole, *args, **kwargs)

    monkeypatch.setattr(engine, "train", failing)
    experiment = Experiment(tmp_path / "out", (_small(tmp_path),), begun / "encoder", ("RTE", "STS-B"), seeds=1)
    with pytest.raises(RunError, match="1 of 2 runs failed; RTE seed 1: out of luck"):
        fine_tune(experiment, say=lambda line: None)
    assert (tmp_path / "out" / "STS-B" / "seed=1" / "results.json").is_file()
    monkeypatch.setattr(engine, "train", trained)
    assert len(fine_tune(experiment, say=lambda line: None)["tasks"]) == 2


def test_a_score_is_of_the_updates_that_are_asked_for(tmp_path, begun):
    experiment = Experiment(tmp_path / "out", (_small(tmp_path),), begun / "encoder", ("RTE",), seeds=1)
    before = fine_tune(experiment, say=lambda line: None)
    for updates in (1, 3):
        refused = rf"RTE/seed=1 is a finished run of 2 updates, and {updates} are asked for; choose another --out"
        with pytest.raises(UserError, match=refused):
            fine_tune(replace(experiment, settings=(f"training.updates={updates}",)), say=lambda line: None)
    assert fine_tune(experiment, say=lambda line: None) == before


def test_recipes_whose_runs_would_share_a_folder_are_refused(tmp_path, begun):
    name = _small(tmp_path)
    with pytest.raises(UserError, match=r"2 runs of .* would share .*/out/CoLA/seed=1; name one recipe at a time"):
        Experiment(tmp_path / "out", (name, name), begun / "encoder").trials()


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("training.init=other", "it is RUN that says it"),
        ("training.init_weights=random", "it is --from-scratch that says it"),
        ("data.task=RTE", "it is --tasks that says it"),
        ("training.seed=5", "it is --seeds that says it"),
    ],
)
def test_a_setting_that_would_have_no_effect_is_refused(tmp_path, begun, setting, said):
    with pytest.raises(UserError, match=said):
        Experiment(tmp_path, RECIPES, begun / "encoder", ("SST-2",), 2, settings=(setting,)).trials()


def test_a_folder_of_another_model_is_refused_with_what_can_be_done(tmp_path, begun):
    names = (_small(tmp_path),)
    fine_tune(Experiment(tmp_path / "out", names, begun / "encoder", ("RTE",), 1), say=lambda line: None)
    with pytest.raises(UserError, match=r"another recipe: .*training.init was .*; choose another --out"):
        fine_tune(Experiment(tmp_path / "out", names, begun / "causal", ("RTE",), 1), say=lambda line: None)


def test_malformed_rows_are_said_where_runs_go_on_side_by_side_too(tmp_path, begun):
    name = _small(tmp_path)
    path = tmp_path / "data" / "glue" / "QQP" / "train.tsv"
    path.write_text(f"{path.read_text()}broken\n")
    said = []
    experiment = Experiment(
        tmp_path / "out", (name,), begun / "encoder", ("QQP",), seeds=1, settings=("data.on_bad=skip",), jobs=2
    )
    fine_tune(experiment, say=said.append)
    assert sum("rows of QQP/train.tsv are malformed and left out" in line for line in said) == 1


def test_the_command_prints_one_table_and_pure_json(tmp_path, begun):
    command = ["glue", str(begun / "encoder"), "--recipe", _small(tmp_path), "--tasks", "CoLA,MRPC", "--seeds", "1"]
    command += ["--out", str(tmp_path / "out"), "--from-scratch"]
    page = CliRunner().invoke(app, command).stdout
    assert "random weights" in page
    assert "mean of 2 tasks" in page
    assert "WNLI  left out" in page
    again = CliRunner().invoke(app, [*command, "--json"]).stdout
    assert [row["task"] for row in json.loads(again)["tasks"]] == ["CoLA", "MRPC"]
    wrong = CliRunner().invoke(app, [*command, "--tasks", "ColA"]).exception
    assert isinstance(wrong, UserError)
    assert "did you mean 'CoLA'" in str(wrong)
    assert str(CliRunner().invoke(app, [*command, "--tasks", "WNLI"]).exception).startswith("WNLI is left out")


def test_the_command_fine_tunes_a_causal_model_in_a_folder_of_its_name(tmp_path, begun, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = ["glue", "--recipe", _small(tmp_path), "--tasks", "CoLA", "--seeds", "1", "--json"]
    for model, name in {begun / "causal": "causal", begun / "causal" / "model": "causal-model"}.items():
        found = json.loads(CliRunner().invoke(app, [*command, str(model)]).stdout)
        assert list(found["averages"]) == ["mean of 1 task"]
        whole = Run(tmp_path / "glue" / name / "CoLA" / "seed=1")
        assert json.loads((whole.model / "config.json").read_text())["kind"] == "causal"


@pytest.mark.parametrize("task", ["RTE", "QNLI"])
def test_of_several_recipes_the_one_that_has_a_task_fine_tunes_it(begun, tmp_path, task):
    setting = (f"data.task={task}",)
    trials = Experiment(tmp_path, RECIPES, begun / "encoder", settings=setting, seeds=2).trials()
    assert [(trial.task, trial.seed) for trial in trials] == [(task, 1), (task, 2)]
    every = Experiment(tmp_path, RECIPES, begun / "encoder").trials()
    assert len({trial.folder for trial in every}) == len(every) == 3 * len(GLUE)
