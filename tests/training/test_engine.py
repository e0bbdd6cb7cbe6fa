"""Training from a recipe: what is interrupted goes on as if it had not been, what is finished stays."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests import corpora
from tests.runs import log, losses, results, same, weights

from splitstep.recipe import recipe
from splitstep.solver.errors import UserError
from splitstep.tables import toml
from splitstep.tasks import task_class
from splitstep.training.engine import evaluate, train
from splitstep.training.run import Run
from splitstep.training.trainer import NotFiniteError, SplitstepTrainer
from splitstep.training.trials import check


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPLITSTEP_CACHE", str(tmp_path / "cache"))


def _translation(folder, **sections):
    return corpora.translation_recipe(corpora.parallel(folder), **sections)


def _language(folder, **sections):
    return corpora.language_recipe(corpora.articles(folder), **sections)


def _pretraining(folder, **sections):
    return corpora.pretraining_recipe(corpora.documents(folder), **sections)


def _classification(folder, **sections):
    return corpora.classification_recipe(corpora.news(folder), **sections)


TASKS = {
    "translation": _translation,
    "language-modelling": _language,
    "pre-training": _pretraining,
    "text-classification": _classification,
}
dropout = {"dropout": 0.2, "attention_dropout": 0.1}


@pytest.fixture(params=TASKS)
def tables(request, tmp_path):
    return TASKS[request.param](tmp_path / "data", model=dropout)


@pytest.fixture
def one_task(tmp_path):
    """For laws in which the task has no part."""
    return _language(tmp_path / "data", model=dropout)


def files(folder: Path) -> dict[str, float]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != ".lock"}


def test_a_run_learns_reports_what_evaluate_finds_and_is_finished_once(tables, tmp_path):
    run = Run(tmp_path / "run")
    outcome = train(recipe(tables), run.folder)
    assert outcome.code == 0
    log = [json.loads(line) for line in run.metrics_file.read_text().splitlines()]
    losses = [entry["loss"] for entry in log if "loss" in entry]
    assert losses[-1] < losses[0]
    for split in ("valid", "test"):
        again = evaluate(run, run.recipe(), split)
        assert again["metrics"] == outcome.results["metrics"][split]
    before = files(run.folder)
    assert train(recipe(tables), run.folder).results == outcome.results
    assert files(run.folder) == before


def test_a_run_that_crashed_goes_on_to_the_same_bits(tables, tmp_path, monkeypatch):
    _crashes_to_the_same_bits(tables, tmp_path, monkeypatch, {})


@pytest.mark.parametrize(
    "settings",
    [
        {"workers": 2},
        {"micro_batches": 2, "ema": 0.5, "final": "ema"},
        {"precision": "bf16"},
        {"optimizer": "nag"},
        {"optimizer": "muon"},
    ],
    ids=str,
)
def test_a_run_with_other_settings_goes_on_to_the_same_bits(one_task, tmp_path, monkeypatch, settings):
    _crashes_to_the_same_bits(one_task, tmp_path, monkeypatch, settings)


def test_low_precision_changes_losses_a_little_and_no_stored_weight(tables, tmp_path):
    for precision in ("fp32", "bf16"):
        train(recipe(corpora.merged(tables, {"training": {"precision": precision}})), tmp_path / precision)
    plain, low = losses(tmp_path / "fp32"), losses(tmp_path / "bf16")
    assert plain != low
    assert low == pytest.approx(plain, rel=0.05)
    assert {tensor.dtype for tensor in weights(tmp_path / "bf16").values() if tensor.is_floating_point()} == {
        torch.float32
    }


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch's compiler
def test_a_compiled_model_is_trained_to_the_same_losses(one_task, tmp_path):
    still = corpora.merged(one_task, {"model": {"dropout": 0.0, "attention_dropout": 0.0}})
    for name, settings in (("plain", {}), ("compiled", {"compile": True})):
        train(recipe(corpora.merged(still, {"training": settings})), tmp_path / name)
    assert losses(tmp_path / "compiled") == pytest.approx(losses(tmp_path / "plain"), rel=1e-4)
    assert weights(tmp_path / "compiled").keys() == weights(tmp_path / "plain").keys()


def _crashes_to_the_same_bits(tables, tmp_path, monkeypatch, settings):
    whole = recipe(corpora.merged(tables, {"training": {"save_every": 1, "log_every": 3, **settings}}))
    train(whole, tmp_path / "undisturbed")
    step = SplitstepTrainer.training_step
    calls = iter(range(10**6))

    def crashing(self, *args, **kwargs):
        if next(calls) in (2, 4, 7):
            raise RuntimeError("the power is gone")
        return step(self, *args, **kwargs)

    monkeypatch.setattr(SplitstepTrainer, "training_step", crashing)
    crashes = 0
    while True:
        try:
            train(whole, tmp_path / "disturbed")
            break
        except RuntimeError:
            crashes += 1
    assert crashes == 3
    same(tmp_path / "undisturbed", tmp_path / "disturbed")


def test_more_updates_than_before_go_on_where_the_run_ended(one_task, tmp_path, capsys):
    train(recipe(one_task), tmp_path / "run")
    longer = recipe(corpora.merged(one_task, {"training": {"updates": 8}}))
    results = train(longer, tmp_path / "run").results
    assert results["updates"] == 8
    assert "now 8 updates are asked for; the schedule 'constant' goes on" in capsys.readouterr().err
    assert Run(tmp_path / "run").recipe().training.updates == 8


def test_more_updates_go_on_at_the_rate_of_their_schedule(tmp_path):
    rates = {}
    for name, counts in {"whole": [8], "longer": [4, 8]}.items():
        for updates in counts:
            settings = {"schedule": "linear", "updates": updates, "log_every": 1, "save_every": 1, "keep": 8}
            train(recipe(_language(tmp_path / "data", training=settings)), tmp_path / name)
        entries = [entry for entry in log(tmp_path / name) if "learning_rate" in entry]
        rates[name] = {entry["update"]: entry["learning_rate"] for entry in entries}
    assert [rates["longer"][update] for update in (5, 6, 7, 8)] == [rates["whole"][update] for update in (5, 6, 7, 8)]
    saved = [tmp_path / "longer" / "checkpoints" / f"checkpoint-{update}" / "model.safetensors" for update in (4, 5)]
    before, after = map(load_file, saved)
    assert not all(torch.equal(before[key], after[key]) for key in before)


def test_more_updates_without_a_checkpoint_are_a_run_of_their_own(one_task, tmp_path, capsys):
    longer = recipe(corpora.merged(one_task, {"training": {"updates": 8}}))
    train(recipe(one_task), tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    train(longer, tmp_path / "run")
    assert "has no checkpoint to go on from: it begins anew" in capsys.readouterr().err
    assert Run(tmp_path / "run").recipe().training.updates == 8
    train(longer, tmp_path / "whole")
    same(tmp_path / "run", tmp_path / "whole")


def test_more_micro_batches_than_before_are_said_to_draw_other_masks(one_task, tmp_path, capsys):
    train(recipe(one_task), tmp_path / "run")
    train(recipe(corpora.merged(one_task, {"training": {"updates": 8, "micro_batches": 2}})), tmp_path / "run")
    assert "begun with 1 micro-batches, going on with 2: where there is dropout" in capsys.readouterr().err


def test_micro_batches_change_nothing_but_the_last_bits(tables, tmp_path):
    quiet = corpora.merged(tables, {"model": {"dropout": 0.0, "attention_dropout": 0.0}})
    train(recipe(quiet), tmp_path / "one")
    train(recipe(corpora.merged(quiet, {"training": {"micro_batches": 3}})), tmp_path / "three")
    # Losses, not weights: Adam makes whole steps of gradients that are zero but for their last bits.
    one, three = (losses(tmp_path / name) for name in ("one", "three"))
    assert one == pytest.approx(three, rel=1e-4)


@pytest.mark.parametrize("final", ["last", "best", "average", "ema"])
def test_the_final_weights_are_those_asked_for(tmp_path, final):
    tables = _language(tmp_path / "data", training={"final": final, "average": 2, "ema": 0.5, "keep": 10})
    train(recipe(tables), tmp_path / "run")
    found = weights(tmp_path / "run")
    saved = {
        int(path.name.split("-")[1]): load_file(path / ("ema.safetensors" if final == "ema" else "model.safetensors"))
        for path in (tmp_path / "run" / "checkpoints").iterdir()
    }
    assert sorted(saved) == [4, 6]
    best = json.loads((tmp_path / "run" / "results.json").read_text())["best_update"]
    expected = {
        "last": lambda key: saved[6][key],
        "best": lambda key: saved[best][key],
        "average": lambda key: (saved[4][key].double() + saved[6][key].double()).div(2).float(),
        "ema": lambda key: saved[6][key],
    }[final]
    assert all(torch.equal(found[key], expected(key)) for key in saved[6] if key in found)


def test_patience_ends_a_run_and_is_remembered(tmp_path):
    still = {"learning_rate": 1e-30, "evaluate_every": 1, "patience": 2}  # nothing gets better
    tables = _language(tmp_path / "data", training=still)
    results = train(recipe(tables), tmp_path / "run").results
    assert (results["best_update"], results["updates"]) == (1, 3)
    (tmp_path / "run" / "results.json").unlink()
    assert train(recipe(tables), tmp_path / "run").results["updates"] == 3


def test_a_loss_that_is_no_number_stops_the_run_before_the_update(one_task, tmp_path, monkeypatch):
    whole = recipe(corpora.merged(one_task, {"training": {"save_every": 1}}))
    compute = SplitstepTrainer.compute_loss

    def spoilt(self, *args, **kwargs):
        loss = compute(self, *args, **kwargs)
        return loss * float("nan") if self.state.global_step == 3 else loss

    monkeypatch.setattr(SplitstepTrainer, "compute_loss", spoilt)
    with pytest.raises(NotFiniteError, match=r"in update 4 \(epoch 1, training examples .*checkpoint-3"):
        train(whole, tmp_path / "run")
    saved = load_file(tmp_path / "run" / "checkpoints" / "checkpoint-3" / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in saved.values())
    assert not (tmp_path / "run" / "results.json").exists()


def test_another_recipe_or_other_data_in_a_run_folder_are_refused(tables, tmp_path):
    train(recipe(tables), tmp_path / "run")
    other = recipe(corpora.merged(tables, {"training": {"learning_rate": 1e-4}}))
    with pytest.raises(UserError, match=r"another recipe: training.learning_rate was 0.003, now 0.0001. --fresh"):
        train(other, tmp_path / "run")
    changed = sorted(path for path in (tmp_path / "data").iterdir() if "train" in path.name)
    for path in changed:  # both sides of a parallel text
        path.write_bytes(path.with_name(path.name.replace("train", "valid")).read_bytes())
    names = ", ".join(path.name for path in changed)
    longer = recipe(corpora.merged(tables, {"training": {"updates": 9}}))
    with pytest.raises(UserError, match=f"was begun with other data: {re.escape(names)} changed"):
        train(longer, tmp_path / "run")


def test_a_folder_that_is_no_run_folder_is_left_alone(one_task, tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "text.tex").write_text("x")
    with pytest.raises(UserError, match=r"is no run folder: it has other files and no recipe\.toml"):
        train(recipe(one_task), tmp_path / "thesis")
    with pytest.raises(UserError, match=r"text.tex is a file, not a folder"):
        train(recipe(one_task), tmp_path / "thesis" / "text.tex")
    assert [path.name for path in (tmp_path / "thesis").iterdir()] == ["text.tex"]


def test_a_run_that_crashed_before_its_recipe_was_written_begins_anew(one_task, tmp_path):
    train(recipe(one_task), tmp_path / "whole")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    for name in (".lock", "environment.json", ".recipe.toml.unfinished"):
        (tmp_path / "run" / name).write_text("{}")
    train(recipe(one_task), tmp_path / "run")
    same(tmp_path / "whole", tmp_path / "run")


def test_bad_data_leave_no_half_made_run_folder(tables, tmp_path):
    missing = ["missing.{language}"]
    names = {"paragraphs": missing} if tables["task"] == "pre-training" else missing
    wrong = recipe(corpora.merged(tables, {"data": {"train": names}}))
    with pytest.raises(UserError, match="no file"):
        train(wrong, tmp_path / "run")
    with pytest.raises(UserError, match=r"model: .*does not divide"):
        train(recipe(corpora.merged(tables, {"model": {"num_attention_heads": 5}})), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("trying", [train, check], ids=["train", "check"])
def test_a_recipe_that_its_data_contradict_is_refused_at_once(tmp_path, trying):
    tables = _translation(tmp_path / "data")
    attempts = {
        "model: vocab_size = 10, and the data need": corpora.merged(tables, {"model": {"vocab_size": 10}}),
        "the recipe names no data.valid": {**tables, "data": {k: v for k, v in tables["data"].items() if k != "valid"}},
    }
    for complaint, wrong in attempts.items():
        with pytest.raises(UserError, match=complaint):
            trying(recipe(wrong), *([tmp_path / "run"] if trying is train else []))
    assert not (tmp_path / "run").exists()


def test_fewer_examples_than_an_update_takes_are_one_update(tmp_path):
    tables = _language(tmp_path / "data", training={"batch_size": 5000})
    assert train(recipe(tables), tmp_path / "run").results["updates"] == 6


def test_another_vocabulary_file_is_other_data(tmp_path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "one", "two", "three", "four", "zero", "."]
    (tmp_path / "vocab.txt").write_text("".join(f"{word}\n" for word in words))
    vocabulary = {"kind": "wordpiece", "file": str(tmp_path / "vocab.txt"), "lowercase": True}
    tables = _pretraining(tmp_path / "data", data={"vocabulary": vocabulary})
    train(recipe(tables), tmp_path / "run")
    (tmp_path / "vocab.txt").write_text("".join(f"{word}\n" for word in [*words, "five"]))
    with pytest.raises(UserError, match=r"was begun with other data: vocab\.txt changed"):
        train(recipe(tables), tmp_path / "run")


def test_check_finds_what_the_first_update_of_a_run_does_and_keeps_nothing(tables, tmp_path):
    still = {"model": {"dropout": 0.0, "attention_dropout": 0.0}, "training": {"evaluate_every": 1, "log_every": 1}}
    whole = recipe(corpora.merged(tables, still))
    report = check(whole)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "data"]
    assert report["updates"] == 6
    train(whole, tmp_path / "run")
    entries = [entry for entry in log(tmp_path / "run") if entry["update"] == 1]
    first, watched = (next(entry[key] for entry in entries if key in entry) for key in ("loss", "eval_loss"))
    assert (report["first_loss"], report["validation_loss"]) == pytest.approx((first, watched), rel=1e-6)
    assert report["first_loss"] != pytest.approx(report["validation_loss"], rel=1e-3)
    assert report["parameters"] == results(tmp_path / "run")["parameters"]["total"]


def test_every_task_overfits_one_batch(tables, tmp_path, monkeypatch):
    task = task_class(tables["task"])
    batch = task.batch
    # What is drawn is drawn once: otherwise there is no one batch.
    monkeypatch.setattr(task, "batch", lambda self, split, indices, **_: batch(self, split, indices))
    settings = {"updates": 120, "evaluate_every": 120, "log_every": 10, "learning_rate": 1e-2}
    quiet = corpora.merged(tables, {"model": {"dropout": 0.0, "attention_dropout": 0.0}, "training": settings})
    files = sorted((tmp_path / "data").iterdir())
    for path in files:  # the training text is the validation text, and one batch
        if "valid" in path.name:
            path.with_name(path.name.replace("valid", "train")).write_bytes(path.read_bytes())
    size = {"tokens_per_update": 2000, "batch_size": None} if tables["task"] == "translation" else {"batch_size": 100}
    whole = corpora.merged(quiet, {"training": size})
    whole["training"] = {key: value for key, value in whole["training"].items() if value is not None}
    results = train(recipe(whole), tmp_path / "run").results
    assert results["metrics"]["valid"]["loss"] < 0.35


def _command(tables, tmp_path) -> list[str]:
    (tmp_path / "recipe.toml").write_text(toml(tables))
    return [sys.executable, "-m", "splitstep", "train", str(tmp_path / "recipe.toml"), "--out"]


@pytest.mark.parametrize(
    ("number", "workers"),
    [
        (signal.SIGKILL, 0),
        (signal.SIGTERM, 0),
        (signal.SIGTERM, 1),
        pytest.param(signal.SIGINT, 0, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 1, marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_a_run_and_the_same_command_goes_on_to_the_same_bits(tmp_path, number, workers):
    slow = {"updates": 40, "save_every": 3, "evaluate_every": 20, "log_every": 1, "threads": 1, "workers": workers}
    command = _command(_language(tmp_path / "data", model=dropout, training=slow), tmp_path)
    subprocess.run([*command, str(tmp_path / "undisturbed")], check=True, capture_output=True, timeout=120)
    run = tmp_path / "disturbed"
    pipes = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL, "text": True}
    process = subprocess.Popen([*command, str(run)], start_new_session=True, **pipes)
    log = run / "metrics.jsonl"
    until = time.monotonic() + 100
    while not (log.exists() and len(log.read_text().splitlines()) >= 7) and time.monotonic() < until:
        time.sleep(0.01)
    os.killpg(process.pid, number)  # to its workers too, as a terminal does it
    _, said = process.communicate(timeout=60)
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    if number != signal.SIGKILL:
        assert "stopped by a signal after update" in said
    subprocess.run([*command, str(run)], check=True, capture_output=True, timeout=120)
    same(tmp_path / "undisturbed", run)


def test_two_processes_share_an_update(tmp_path):
    tables = _translation(tmp_path / "data", training={"threads": 1})
    command = _command(tables, tmp_path)
    subprocess.run([*command, str(tmp_path / "one")], check=True, capture_output=True, timeout=120)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "-m", "splitstep"]
    answer = subprocess.run([*launch, *command[3:], str(tmp_path / "two")], capture_output=True, text=True, timeout=200)
    assert answer.returncode == 0, answer.stderr
    assert losses(tmp_path / "one") == pytest.approx(losses(tmp_path / "two"), rel=1e-5)
    results = [json.loads((tmp_path / name / "results.json").read_text()) for name in ("one", "two")]
    assert results[0]["metrics"]["test"]["loss"] == pytest.approx(results[1]["metrics"]["test"]["loss"], rel=1e-4)
