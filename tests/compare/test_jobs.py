"""Runs of a comparison: what strikes one is its own, what is meant for all reaches all, and nothing outlives them."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
from tests import corpora, faults
from tests.runs import results

from splitstep.compare import jobs
from splitstep.compare.child import at_work, wait_for
from splitstep.compare.jobs import Job, Work, finish
from splitstep.recipe import recipe
from splitstep.tables import toml
from splitstep.training.engine import Outcome
from splitstep.training.run import Run


def _jobs(folder, count):
    whole = recipe(corpora.language_recipe(folder))
    return [Job(f"job {number}", whole, folder / f"run-{number}", 6) for number in range(count)]


def _nothing(line):
    pass


@pytest.mark.parametrize("error", [RuntimeError("out of luck"), KeyError("key"), MemoryError(), AssertionError("no")])
def test_whatever_a_run_raises_is_its_failure_and_the_others_go_on(tmp_path, monkeypatch, error):
    from splitstep.training import engine

    done = []

    def train(whole, folder, **options):
        done.append(folder.name)
        if folder.name == "run-1":
            raise error
        return Outcome(0)

    monkeypatch.setattr(engine, "train", train)
    first, second, third = _jobs(tmp_path, 3)
    list(finish([first, second, third], at_a_time=1, say=_nothing))
    assert done == ["run-0", "run-1", "run-2"]
    assert (first.failure, third.failure) == (None, None)
    assert second.failure == (str(error) or "MemoryError")
    assert (second.done, second.updates) == (6, 6)  # nothing of it is left to do


def test_a_failed_run_that_is_tried_again_begins_with_nothing_done(tmp_path, monkeypatch):
    from splitstep.training import engine

    (job,) = _jobs(tmp_path, 1)
    job.note.write_text("out of luck")
    found = []

    def train(whole, folder, **options):
        found.append((job.done, job.failure))
        return Outcome(0)

    monkeypatch.setattr(engine, "train", train)
    assert list(finish([job], at_a_time=1, say=_nothing)) == [job]
    assert found == [(0, None)]


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_what_ends_a_command_is_no_failure_of_a_run(tmp_path, monkeypatch, stop):
    from splitstep.training import engine

    def train(whole, folder, **options):
        raise stop

    monkeypatch.setattr(engine, "train", train)
    (job, *others) = _jobs(tmp_path, 2)
    with pytest.raises(stop):
        list(finish([job, *others], at_a_time=1, say=_nothing))
    assert job.failure is None


def _children(monkeypatch, *commands):
    """Other commands in place of training, one a run; the processes as they start."""
    started, left = [], iter(commands)

    def start(job, at_a_time, say):
        said = (job.folder.parent / f"{job.folder.name}.log").open("w+b")
        process = subprocess.Popen(["sh", "-c", next(left)], stderr=said)
        started.append(process)
        return jobs._Child(job, process, said)

    monkeypatch.setattr(jobs._Child, "started", start)
    return started


FAILURES = {
    "exit 0": None,
    "echo 'line\nsplitstep: no data' >&2; exit 2": "no data",
    "echo 'Traceback\nKeyError: 3' >&2; exit 1": "KeyError: 3",
    "exit 1": "exit code 1",
    "kill -9 $$": "killed by signal 9",
    "kill -11 $$": "killed by signal 11",
}


def test_a_process_that_fails_leaves_its_reason(tmp_path, monkeypatch):
    started = _children(monkeypatch, *FAILURES)
    own = _jobs(tmp_path, len(FAILURES))
    list(finish(own, at_a_time=2, say=_nothing))
    assert len(started) == len(FAILURES)
    assert [job.failure for job in own] == list(FAILURES.values())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_all_processes_and_no_other_starts(tmp_path, monkeypatch, number):
    noting = f"trap 'exit {128 + number}' {number:d}; sleep 30 & wait"
    started = _children(monkeypatch, *[noting] * 4)
    threading.Timer(0.5, os.kill, (os.getpid(), number)).start()
    begun = time.monotonic()
    with pytest.raises(SystemExit) as end:
        list(finish(_jobs(tmp_path, 4), at_a_time=2, say=_nothing))
    assert end.value.code == 128 + number
    assert [process.poll() for process in started] == [128 + number] * 2
    assert time.monotonic() - begun < 20


@pytest.mark.parametrize("end", ["exit 143", "exit 130", "kill -15 $$", "kill -2 $$"])
def test_a_process_that_was_told_to_end_ends_the_others(tmp_path, monkeypatch, end):
    started = _children(monkeypatch, end, "exec sleep 30", "exec sleep 30")
    with pytest.raises(SystemExit) as raised:
        list(finish(_jobs(tmp_path, 3), at_a_time=2, say=_nothing))
    assert raised.value.code in jobs.STOPPED
    assert len(started) == 2
    assert None not in [process.poll() for process in started]


@pytest.mark.parametrize("costs", [(1, 1, 1), (1, 4, 2.5), (7e9, 2e9, 1e9)])
def test_an_update_counts_by_what_it_costs(tmp_path, costs):
    jobs = [replace(job, cost=cost) for job, cost in zip(_jobs(tmp_path, 3), costs, strict=True)]
    work = Work(jobs)
    assert (work.total, work.done) == (18, 0)
    for number, job in enumerate(jobs, start=1):
        job.folder.mkdir()
        (job.folder / "results.json").write_text("{}")
        assert work.done == round(18 * sum(costs[:number]) / sum(costs))


def _process(code, *words):
    return subprocess.Popen([sys.executable, "-c", code, *words], stdout=subprocess.PIPE, text=True)


def test_a_run_waits_until_no_other_is_at_work_in_its_folder(tmp_path):
    assert not at_work(tmp_path)
    holding = """if True:
        import sys, time
        from pathlib import Path
        from splitstep.training.run import Run
        with Run(Path(sys.argv[1])).locked():
            print("locked", flush=True)
            sys.stdin.readline()"""
    other = subprocess.Popen(
        [sys.executable, "-c", holding, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout.readline() == "locked\n"
    assert at_work(tmp_path)
    begun = time.monotonic()
    wait_for(tmp_path, patience=0.5)
    assert time.monotonic() - begun > 0.4
    assert at_work(tmp_path)
    threading.Timer(0.5, other.communicate, ("end\n",)).start()
    wait_for(tmp_path)
    assert not at_work(tmp_path)
    with Run(tmp_path).locked():
        pass


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no process is told of its parent's end")
def test_a_child_ends_with_its_parent():
    child = "import os, time; from splitstep.compare.child import end_with; end_with(os.getppid()); print(os.getpid(), "
    parent = f'import subprocess, sys; subprocess.run([sys.executable, "-c", "{child}flush=True); time.sleep(60)"])'
    process = _process(parent)
    pid = int(process.stdout.readline())
    process.kill()
    process.communicate(timeout=20)  # which waits for the child too: it holds the other end of the pipe
    assert pid != process.pid


def _quality(folder):
    columns = ("name", "mean", "std", "values", "seeds", "difference", "interval", "p_value", "p_corrected", "verdict")
    return [{key: row.get(key) for key in columns} for row in results(folder)["schemes"]]


def _compared(words, log):
    """The comparison, run to its end."""
    process = faults.start(words, log=log)
    process.join(400)
    assert process.exitcode == 0, log.read_text()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_comparison_that_is_struck_and_run_again_ends_the_same(tmp_path, monkeypatch):
    monkeypatch.setenv("SPLITSTEP_CACHE", str(tmp_path / "cache"))
    training = {"updates": 60, "evaluate_every": 20, "save_every": 4, "log_every": 1}
    tables = corpora.language_recipe(corpora.articles(tmp_path / "data"), model={"dropout": 0.2}, training=training)
    (tmp_path / "recipe.toml").write_text(toml(tables))
    asked = ["compare", str(tmp_path / "recipe.toml"), "--schemes", "transformer,parallel", "--seeds", "1"]
    words = [*asked, "--jobs", "2", "--out"]
    _compared([*words, str(tmp_path / "whole")], tmp_path / "whole.log")
    for number, code in ((signal.SIGKILL, -9), (signal.SIGTERM, 143)):
        out = tmp_path / number.name
        struck = faults.start([*words, str(out)], log=tmp_path / "struck.log")
        runs = [out / name / "seed-1" for name in ("transformer", "parallel")]
        while not all((run / "metrics.jsonl").is_file() for run in runs):
            assert struck.exitcode is None
            time.sleep(0.02)
        os.kill(struck.pid, number)
        struck.join(60)
        assert struck.exitcode == code
        assert not any((run / "results.json").is_file() for run in runs)
        _compared([*words, str(out)], tmp_path / "again.log")
        assert _quality(out) == _quality(tmp_path / "whole")
