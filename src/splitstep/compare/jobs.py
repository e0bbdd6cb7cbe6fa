"""Runs one after another or side by side: each leaves its results or the reason why there are none."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from signal import SIGINT, SIGTERM
from typing import IO

from splitstep.compare.child import at_work, wait_for
from splitstep.recipe import Recipe
from splitstep.solver.errors import UserError
from splitstep.tables import toml
from splitstep.training.checkpoints import write_atomically
from splitstep.training.progress import Bar, Lines, Say, clock, progress
from splitstep.training.run import SIDE_BY_SIDE, Run

Ended = Iterator[tuple["Job", str | None]]  # a run, and why it failed if it did

LOOKED_EVERY = 0.1  # seconds between looks at the processes
SHOWN_EVERY = 1.0 if sys.stderr.isatty() else 30.0  # seconds between looks at what they have done
STOPPED = (128 + SIGINT, 128 + SIGTERM)  # exit codes of a run that was told to end


@dataclass(frozen=True)
class Job:
    """A run that is to be done."""

    name: str
    recipe: Recipe
    folder: Path
    updates: int
    cost: float = 1.0  # of an update, beside those of other runs

    @property
    def note(self) -> Path:
        """Where the reason of a failure stands."""
        return self.folder.parent / f"{self.folder.name}.failure.txt"

    @property
    def failure(self) -> str | None:
        """Why the run has no results, where it failed."""
        if Run(self.folder).results_file.is_file() or not self.note.is_file():
            return None
        return self.note.read_text(encoding="utf-8").strip()

    def finished(self, data: dict[str, str]) -> bool:
        """Whether nothing is left to do; a run of another recipe or of other data is refused."""
        run = Run(self.folder)
        results = run.results()
        if results is None:
            return False
        instead = "choose another --out"
        run.check(self.recipe, data, instead=instead)
        if results["updates_asked"] != self.updates:
            raise UserError(
                f"{self.folder} is a finished run of {results['updates_asked']:,} updates, and {self.updates:,} are "
                f"asked for; {instead}"
            )
        return True

    @property
    def done(self) -> int:
        """Its updates so far; all of them where none is to come."""
        run = Run(self.folder)
        if run.results_file.is_file() or self.failure is not None:
            return self.updates
        if not run.metrics_file.is_file():
            return 0
        whole = run.metrics_file.read_text(encoding="utf-8").split("\n")[:-1]  # the last line may be half written
        return json.loads(whole[-1])["update"] if whole else 0


def finish(jobs: list[Job], *, at_a_time: int, say: Say) -> Iterator[Job]:
    """Do what is not done, each when it is. A run that fails leaves its reason; a signal ends them all."""
    if not jobs:
        return
    for job in jobs:
        job.note.unlink(missing_ok=True)  # it is tried again
    work = Work(jobs)
    begun, before = time.monotonic(), work.done
    with progress(work.total, name="all runs") as display:
        ended = _one_by_one(work, display, say) if at_a_time == 1 else _side_by_side(work, at_a_time, display, say)
        for number, (job, reason) in enumerate(ended, start=1):
            if reason is None:
                yield job
            else:
                job.note.parent.mkdir(parents=True, exist_ok=True)
                job.note.write_text(f"{reason}\n", encoding="utf-8")
                say(f"{job.folder} failed: {reason}")
            say(f"{number} of {len(jobs)} runs done{_left(work, time.monotonic() - begun, before)}")


@dataclass(frozen=True)
class Work:
    """Runs as one piece of work: an update counts by what it costs, and one of middling cost counts as one."""

    jobs: list[Job]

    @property
    def total(self) -> int:
        """The updates of all runs."""
        return sum(job.updates for job in self.jobs)

    def weight(self, job: Job) -> float:
        """What an update of a run counts."""
        return job.cost * self.total / sum(other.cost * other.updates for other in self.jobs)

    @property
    def done(self) -> int:
        """How much of the total is done."""
        return round(sum(self.weight(job) * job.done for job in self.jobs))


def _left(work: Work, seconds: float, before: int) -> str:
    """How long the rest will take, if the work goes on at the same pace."""
    done, total = work.done, work.total
    return f", about {clock(seconds * (total - done) / (done - before))} left" if before < done < total else ""


def _one_by_one(work: Work, display: Lines | Bar, say: Say) -> Ended:
    """In this process."""
    from splitstep.training.engine import train

    for number, job in enumerate(work.jobs, start=1):
        _tell_of_others(job, say)
        wait_for(job.folder)
        try:
            name = f"run {number} of {len(work.jobs)}, {job.name}"
            part = partial(display.part, weight=work.weight(job))
            code = train(job.recipe, job.folder, name=name, display=part).code
        except Exception as error:  # whatever it is, it is this run's
            yield job, str(error) or type(error).__name__
            continue
        if code:
            raise SystemExit(code)
        yield job, None


def _tell_of_others(job: Job, say: Say) -> None:
    if at_work(job.folder):
        say(f"another process is at work in {job.folder}; waiting until it ends")


def _side_by_side(work: Work, at_a_time: int, display: Lines | Bar, say: Say) -> Ended:
    """In processes of their own, which get the signals that this one gets and end when it does."""
    from splitstep.training.signals import Signals

    waiting, running, stop, told, shown = deque(work.jobs), list[_Child](), 0, False, 0.0
    with Signals() as signals:
        while running or (waiting and not stop):
            while waiting and not stop and len(running) < at_a_time:
                running.append(_Child.started(waiting.popleft(), at_a_time, say))
            time.sleep(LOOKED_EVERY)
            if time.monotonic() - shown > SHOWN_EVERY:
                display.update(work.done, {})
                shown = time.monotonic()
            for child in [child for child in running if child.process.poll() is not None]:
                running.remove(child)
                reason = child.reason()
                if child.code in STOPPED:
                    stop = stop or child.code
                else:
                    yield child.job, reason
            stop = stop or signals.exit_code
            if stop and not told:
                told = True
                for child in running:
                    child.process.send_signal(stop - 128)
    if stop:
        raise SystemExit(stop)


@dataclass(frozen=True)
class _Child:
    """A run in a process of its own."""

    job: Job
    process: "subprocess.Popen[bytes]"
    said: IO[bytes]

    @classmethod
    def started(cls, job: Job, at_a_time: int, say: Say) -> "_Child":
        """The run at work, with its share of the cores."""
        wanted = job.folder.parent / f"{job.folder.name}.toml"
        wanted.parent.mkdir(parents=True, exist_ok=True)
        published = {"published": job.recipe.published} if job.recipe.published else {}
        write_atomically(wanted, toml(job.recipe.settings() | published))
        _tell_of_others(job, say)
        words = ["train", str(wanted), "--out", str(job.folder)]
        command = [sys.executable, "-m", "splitstep.compare.child", str(os.getpid()), str(job.folder), *words]
        threads = str(threads_of_each(at_a_time))
        said = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the child)
        environment = {**os.environ, "OMP_NUM_THREADS": threads, SIDE_BY_SIDE: str(at_a_time)}
        return cls(job, subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=said), said)

    @property
    def code(self) -> int:
        """The exit code, as a shell counts it."""
        code = self.process.returncode
        return 128 - code if code < 0 else code

    def reason(self) -> str | None:
        """Why the run failed: by which signal, or what it said last."""
        with self.said as file:
            file.seek(0)
            lines = file.read().decode(errors="replace").strip().splitlines()
        if not self.code:
            return None
        if self.code > 128:
            return f"killed by signal {self.code - 128}"
        return lines[-1].removeprefix("splitstep: ") if lines else f"exit code {self.code}"


def threads_of_each(at_a_time: int) -> int:
    """How many threads a run has when so many go on side by side."""
    return max((os.cpu_count() or 1) // at_a_time, 1)
