"""What a run says of itself: TensorBoard has what the log has, time is shared out, lines tell the numbers."""

import json
import re
import sys
from itertools import pairwise
from time import sleep
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tests import corpora

from splitstep.recipe import recipe
from splitstep.tasks.language_modelling import LanguageModelling
from splitstep.training import progress as showing
from splitstep.training import timing
from splitstep.training.engine import train
from splitstep.training.progress import Bar, Lines, clock, described
from splitstep.training.timing import Clock


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPLITSTEP_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def tables(tmp_path):
    return corpora.language_recipe(corpora.articles(tmp_path / "data"))


class Hands:
    """A clock that stands still until it is moved."""

    def __init__(self, monkeypatch, *modules):
        self.now = 1000.0
        for module in modules:
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))

    def move(self, seconds):
        self.now += seconds


def logged(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# TensorBoard


def test_tensorboard_has_every_number_of_the_log_at_its_update(tables, tmp_path):
    train(recipe(tables), tmp_path / "run")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    found = {(tag, event.step): event.value for tag in events.Tags()["scalars"] for event in events.Scalars(tag)}
    expected = {}
    for entry in logged(tmp_path / "run"):
        for name, value in entry.items():
            kind, name = ("eval", name.removeprefix("eval_")) if name.startswith("eval_") else ("train", name)
            expected[f"{kind}/{name}", entry["update"]] = value
    assert {("train/loss", 2), ("train/loss", 6), ("eval/loss", 4), ("eval/perplexity", 6)} <= expected.keys()
    assert expected.keys() <= found.keys()
    assert {key: found[key] for key in expected} == pytest.approx(expected, rel=1e-6)


# Time


def test_waiting_is_a_share_of_training_and_evaluation_of_neither(monkeypatch):
    hands = Hands(monkeypatch, timing)
    time = Clock(_lap=hands.now)
    for _ in range(3):
        with time.waiting():
            hands.move(1)
        time.items += 50
        hands.move(4)
    hands.move(100)
    time.pause(100)  # an evaluation
    assert time.lap("tokens") == pytest.approx({"tokens_per_second": 150 / 15, "data_wait": 3 / 15, "seconds": 15})
    hands.move(5)
    time.items += 10
    assert time.lap("tokens") == pytest.approx({"tokens_per_second": 2, "data_wait": 0, "seconds": 20})


def test_a_clock_that_goes_on_counts_from_where_it_was(monkeypatch):
    hands = Hands(monkeypatch, timing)
    time = Clock(seconds=30, items=600, _lap=hands.now)
    hands.move(10)
    time.items += 50
    assert time.lap("images") == pytest.approx({"images_per_second": 5, "data_wait": 0, "seconds": 40})


def test_time_after_the_last_lap_is_training_too_but_evaluation_is_not(monkeypatch):
    hands = Hands(monkeypatch, timing)
    time = Clock(seconds=30, _lap=hands.now)
    hands.move(10)
    time.lap("tokens")
    hands.move(7)
    hands.move(100)
    time.pause(100)
    assert time.total == pytest.approx(47)
    assert time.seconds == pytest.approx(40)


def test_a_run_shorter_than_its_log_has_taken_time(tables, tmp_path):
    train(recipe(corpora.merged(tables, {"training": {"log_every": 1000}})), tmp_path / "run")
    found = json.loads((tmp_path / "run" / "results.json").read_text())
    assert found["seconds"] > 1e-3
    assert found["tokens_per_second"] == pytest.approx(found["tokens"] / found["seconds"])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_logs_the_share_of_time_it_waited_for_data(tables, tmp_path, monkeypatch, workers):
    batch, each = LanguageModelling.training_batch, 0.1  # seconds

    def slow(self, piece, **options):
        sleep(each)
        return batch(self, piece, **options)

    monkeypatch.setattr(LanguageModelling, "training_batch", slow)
    train(recipe(corpora.merged(tables, {"training": {"workers": workers, "log_every": 1}})), tmp_path / "run")
    entries = [entry for entry in logged(tmp_path / "run") if "loss" in entry]
    assert len(entries) == 6
    assert all(0 <= entry["data_wait"] <= 1 for entry in entries)
    passed = [after - before for before, after in pairwise([0.0, *(entry["seconds"] for entry in entries)])]
    waited = [entry["data_wait"] * seconds for entry, seconds in zip(entries, passed, strict=True)]
    # A worker makes the next batches meanwhile, but for the first there is no meanwhile.
    assert min(waited[:1] if workers else waited) >= 0.99 * each


# Going on


@pytest.mark.parametrize("threads", [1, 7])
def test_going_on_with_other_threads_is_said_and_with_the_same_not(tables, tmp_path, capsys, threads):
    train(recipe(corpora.merged(tables, {"training": {"updates": 1, "threads": 1}})), tmp_path / "run")
    place = tmp_path / "run" / "environment.json"
    begun = json.loads(place.read_text())
    assert begun["threads"] == 1
    place.write_text(json.dumps(begun | {"threads": threads}))  # as if it had been begun elsewhere
    train(recipe(corpora.merged(tables, {"training": {"updates": 2, "threads": 1}})), tmp_path / "run")
    said = [line for line in capsys.readouterr().err.splitlines() if "threads" in line]
    assert [line.split(":")[0] for line in said] == ["begun with 7 threads, going on with 1"] * (threads != 1)


def test_a_run_that_another_command_goes_on_with_says_so(tables, tmp_path, monkeypatch):
    from splitstep.training import run as running

    for commit, updates in (("one", 2), ("one", 4), ("two", 6), ("two", 8)):
        monkeypatch.setattr(running, "_commit", lambda commit=commit: commit)
        train(recipe(corpora.merged(tables, {"training": {"updates": updates}})), tmp_path / "run")
    noted = json.loads((tmp_path / "run" / "environment.json").read_text())
    told = [{key: value for key, value in entry.items() if key != "command"} for entry in noted["continued"]]
    assert noted["commit"] == "one"
    assert told == [
        {"update": 2, "updates": 4},
        {"update": 4, "commit": "two", "updates": 6},
        {"update": 6, "updates": 8},
    ]
    assert all("command" in entry for entry in noted["continued"])
    assert running.Run(tmp_path / "run").facts("commit") == {"one", "two"}


@pytest.mark.parametrize(("warmup", "said"), [(5, []), (6, ["100%"]), (12, ["50%"])])
def test_a_warm_up_that_is_not_over_is_named(tables, tmp_path, capsys, warmup, said):
    train(recipe(corpora.merged(tables, {"training": {"warmup": warmup}})), tmp_path / "run")
    lines = [line for line in capsys.readouterr().err.splitlines() if "warm-up" in line]
    assert [line.rpartition(" ")[2] for line in lines] == said


# Lines


def test_a_run_shows_a_line_for_every_entry_of_its_log(tables, tmp_path, capsys):
    train(recipe(tables), tmp_path / "run", name="mine")
    shown = [line for line in capsys.readouterr().err.splitlines() if line.startswith("mine: update ")]
    entries = logged(tmp_path / "run")
    assert len(shown) == len(entries)
    for line, entry in zip(shown, entries, strict=True):
        assert line.startswith(f"mine: update {entry['update']} of 6  ")
        if "loss" in entry:
            assert f"loss {entry['loss']:.4f}  {entry['tokens_per_second']:,.0f} tokens/s" in line
        else:
            assert f"valid loss {entry['eval_loss']:.4g}  valid perplexity {entry['eval_perplexity']:.4g}" in line
    assert "left" not in shown[0]
    assert re.search(r"  0 s left$", shown[-1])


def test_the_time_left_goes_on_at_the_pace_so_far(monkeypatch, capsys):
    hands = Hands(monkeypatch, showing)
    lines = Lines(10_000)
    for done, seconds in ((1000, 77), (1500, 50), (1500, 0), (3000, 200)):
        hands.move(seconds)
        lines.update(done, {"loss": 1.23456})
    first, second, again, last = capsys.readouterr().err.splitlines()
    assert first == "update 1,000 of 10,000  loss 1.2346"  # nothing is known yet
    assert second == again == f"update 1,500 of 10,000  loss 1.2346  {clock(8500 * 50 / 500)} left"
    assert last == f"update 3,000 of 10,000  loss 1.2346  {clock(7000 * 250 / 2000)} left"


@pytest.mark.parametrize("seconds", [0, 1, 59.4, 59.6, 60, 61, 3599, 3600, 3661, 7325, 360_000])
def test_a_duration_is_read_back_as_it_was(seconds):
    units = {"s": 1, "min": 60, "h": 3600}
    words = clock(seconds).split()
    numbers = dict(zip(words[1::2], map(int, words[::2]), strict=True))
    read = sum(units[unit] * number for unit, number in numbers.items())
    assert abs(read - seconds) <= (60 if "h" in numbers else 0.5)
    assert numbers.get("s", 0) < 60
    assert numbers.get("min", 0) < 60


@pytest.mark.parametrize(("waited", "shown"), [(0.0, False), (0.05, False), (0.06, True), (0.5, True)])
def test_waiting_for_data_is_shown_where_it_matters(waited, shown):
    words = described({"loss": 2.0, "tokens_per_second": 12345.6, "data_wait": waited})
    assert words.startswith("loss 2.0000  12,346 tokens/s")
    assert (f"waiting for data {waited:.0%}" in words) == shown


def test_a_bar_is_for_terminals(monkeypatch):
    for terminal, kind in ((True, Bar), (False, Lines)):
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal)
        assert type(showing.progress(5)) is kind


def test_a_bar_keeps_evaluations_as_lines(monkeypatch, capsys):
    monkeypatch.setenv("TERM", "dumb")
    with Bar(10, name="mine") as bar:
        bar.update(4, {"update": 4, "loss": 3.0})
        bar.update(4, {"update": 4, "eval_loss": 2.5})
        bar.say("[a line] as it is")
        assert bar.display.tasks[0].completed == 4
        assert bar.display.tasks[0].fields["described"] == "loss 3.0000"
    shown = [line.rstrip() for line in capsys.readouterr().err.splitlines()]
    assert "update 4  valid loss 2.5" in shown
    assert "[a line] as it is" in shown


def test_under_the_bar_of_all_runs_is_that_of_the_one_at_work(monkeypatch, capsys):
    monkeypatch.setenv("TERM", "dumb")
    with Bar(10, name="all runs") as whole:
        for number, (total, weight) in enumerate(((4, 0.5), (6, 4 / 3))):
            with whole.part(total, name=f"run {number}", weight=weight) as part:
                part.update(3, {"loss": 3.0})
                part.update(3, {"eval_loss": 2.5})
                above, below = whole.display.tasks
                assert (above.description, below.description) == ("all runs", f"run {number}")
                assert (above.completed, below.completed) == (2 + 4 if number else round(1.5), 3)
                assert (above.fields["described"], below.fields["described"]) == ("", "loss 3.0000")
        assert [task.completed for task in whole.display.tasks] == [10]
    shown = [line.rstrip() for line in capsys.readouterr().err.splitlines()]
    assert [line for line in shown if "valid" in line] == [f"run {n}: update 3  valid loss 2.5" for n in range(2)]
