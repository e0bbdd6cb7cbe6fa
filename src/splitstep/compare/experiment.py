"""All runs of a comparison, one after another or side by side, each resumable; then what they say."""

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from splitstep.compare.claims import CLAIMS
from splitstep.compare.schemes import Contestant, Scheme, contestants
from splitstep.compare.statistics import LEVEL, MEASURES, Difference, corrected, difference
from splitstep.recipe import Recipe, differences, recipe, toml
from splitstep.solver.errors import UserError
from splitstep.tasks import task_class
from splitstep.training.checkpoints import write_atomically
from splitstep.training.progress import clock
from splitstep.training.run import Run

Say = Callable[[str], None]
FAILURE = "failure.txt"


@dataclass(frozen=True)
class Experiment:
    """A recipe, the schemes that follow it on equal terms, and the seeds each is trained with."""

    folder: Path
    recipe: Recipe
    names: list[str]
    match: str
    seeds: int
    jobs: int = 1

    def run_folder(self, contestant: Contestant, seed: int) -> Path:
        """Where a run of the comparison lies."""
        return self.folder / contestant.scheme.name.replace("/", ",") / f"seed-{seed}"

    @property
    def file(self) -> Path:
        """What the comparison is."""
        return self.folder / "comparison.json"

    def paces(self) -> dict[str, float] | None:
        """Seconds of an update of each scheme where time is made equal: measured once, when the comparison begins."""
        if self.match != "seconds":
            return None
        if self.file.is_file() and "pace" in (before := json.loads(self.file.read_text())):
            return before["pace"]
        from splitstep.training.engine import paces

        plain = contestants(self.recipe, self.names, "none")
        return dict(zip((one.scheme.name for one in plain), paces([one.recipe for one in plain]), strict=True))

    def setup(self) -> dict[str, Any]:
        """What makes a comparison this one."""
        names = [Scheme.named(name).name for name in self.names]  # seeds may be added
        chosen = {"schemes": names, "match": self.match, "seeds": self.seeds, "jobs": self.jobs}
        return {"comparison": chosen, "recipe": self.recipe.settings()}

    def begin(self, pace: dict[str, float] | None) -> None:
        """Make the folder, or see that it is this comparison's."""
        whole = self.setup() | ({} if pace is None else {"pace": pace})
        if self.file.is_file():
            before, now = json.loads(self.file.read_text()), json.loads(json.dumps(whole))
            changed = {k: v for k, v in differences(before, now).items() if k != "comparison.seeds"}
            if changed:
                listed = "; ".join(f"{key} was {old!r}, now {new!r}" for key, (old, new) in changed.items())
                raise UserError(f"{self.folder} holds another comparison: {listed}")
        elif self.folder.is_dir() and any(self.folder.iterdir()):
            raise UserError(f"{self.folder} is no comparison: it has other files and no comparison.json")
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.file, json.dumps(whole, indent=2))


def compare(experiment: Experiment, *, say: Say) -> dict[str, Any]:
    """Train what is not yet trained, and say what the runs say."""
    pace = experiment.paces()
    rivals = contestants(experiment.recipe, experiment.names, experiment.match, pace=pace)
    experiment.begin(pace)
    for rival in rivals:
        changed = ", ".join(f"{key} = {value}" for key, value in rival.adjusted.items())
        say(f"{rival.scheme.name}: {rival.parameters.total:,} parameters{f'; adjusted: {changed}' if changed else ''}")
    first = experiment.recipe.training.seed
    runs = [
        (rival, first + number)
        for number in range(experiment.seeds)
        for rival in rivals
        if rival.scheme.seeds is None or number < rival.scheme.seeds
    ]
    jobs = [(rival, seed, experiment.run_folder(rival, seed)) for rival, seed in runs]
    for done, code in enumerate(_codes(experiment, jobs, say), start=1):
        say(f"{done} of {len(jobs)} runs done")
        if code >= 128:
            raise SystemExit(code)
    results = {"command": shlex.join(["splitstep", *sys.argv[1:]]), **summary(experiment, rivals, first)}
    write_atomically(experiment.folder / "results.json", json.dumps(results, indent=2, ensure_ascii=False))
    return results


def _codes(experiment: Experiment, jobs: list[tuple[Contestant, int, Path]], say: Say) -> Iterator[int]:
    """The exit code of each run, as they end."""
    if experiment.jobs == 1:  # signals reach the main thread only
        for rival, seed, folder in jobs:
            yield _in_this_process(rival, seed, folder, say)
        return
    with ThreadPoolExecutor(experiment.jobs) as pool:
        begun = time.monotonic()
        waiting = {pool.submit(_in_another_process, *job, experiment.jobs, say) for job in jobs}
        before = share = _share_done([folder for _, _, folder in jobs])
        while waiting:
            ended, waiting = wait(waiting, timeout=SHOWN_EVERY, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in ended)
            share = _share_done([folder for _, _, folder in jobs])
            if waiting and share > before:
                left = (time.monotonic() - begun) * (1 - share) / (share - before)
                say(f"{share:.0%} of all updates done, about {clock(left)} left")


SHOWN_EVERY = 30.0  # seconds between lines about runs side by side


def _share_done(folders: list[Path]) -> float:
    """How much of the work of all runs is done; a run that has not begun is as long as the others."""
    return sum(map(_done, folders)) / len(folders)


def _done(folder: Path) -> float:
    run = Run(folder)
    if run.results_file.is_file():
        return 1.0
    if not run.metrics_file.is_file():
        return 0.0
    last = run.metrics_file.read_text(encoding="utf-8").rsplit("\n", 2)[-2:]
    return json.loads(last[0])["update"] / run.environment()["updates"] if last[0] else 0.0


def _seeded(rival: Contestant, seed: int) -> Recipe:
    tables = rival.recipe.settings() | {"published": rival.recipe.published}
    tables["training"] = {**tables["training"], "seed": seed}
    return recipe(tables)


def _in_this_process(rival: Contestant, seed: int, folder: Path, say: Say) -> int:
    from splitstep.training.engine import train

    return _noted(folder, say, lambda: train(_seeded(rival, seed), folder, name=f"{rival.scheme.name} {seed}").code)


def _in_another_process(rival: Contestant, seed: int, folder: Path, jobs: int, say: Say) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    wanted = folder.parent / f"seed-{seed}.toml"
    write_atomically(wanted, toml(_seeded(rival, seed).settings()))
    threads = str(max((os.cpu_count() or 1) // jobs, 1))
    command = [sys.executable, "-m", "splitstep", "train", str(wanted), "--out", str(folder)]

    def trained() -> int:
        answer = subprocess.run(
            command,
            env={**os.environ, "OMP_NUM_THREADS": threads},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        if answer.returncode in (1, 2):
            raise RuntimeError(answer.stderr.strip().splitlines()[-1])
        return answer.returncode

    return _noted(folder, say, trained)


def _noted(folder: Path, say: Say, trained: Callable[[], int]) -> int:
    """The exit code of a run; one that fails leaves its reason, and the others go on."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    note = folder.parent / f"{folder.name}.{FAILURE}"
    try:
        code = trained()
    except (RuntimeError, ValueError, OSError) as error:
        note.write_text(f"{error}\n")
        say(f"{folder} failed: {error}")
        return 1
    note.unlink(missing_ok=True)
    return code


def summary(experiment: Experiment, rivals: list[Contestant], first: int) -> dict[str, Any]:
    """Means over seeds, differences to the first scheme with their certainty, and costs."""
    task = task_class(experiment.recipe.task)
    split = "test" if "test" in _splits(experiment, rivals[0], first) else "valid"
    rows = [_row(experiment, rival, first, task.metric, split) for rival in rivals]
    known = {rival.scheme.name: rival for rival in rivals}
    seeds = {row["name"]: set(row["seeds"]) for row in rows}

    def comparable(name: str, other: str) -> bool:
        return bool(seeds.get(name, set()) & seeds.get(other, set()))

    base = rivals[0]
    others = [row for row in rows[1:] if comparable(row["name"], base.scheme.name)]
    held = _held(experiment, [(known[row["name"]], base) for row in others], first, split)
    for row, found in zip(others, held, strict=True):
        row |= found
    claims = [claim for claim in CLAIMS if comparable(claim.scheme, claim.other)]
    held = _held(experiment, [(known[claim.scheme], known[claim.other]) for claim in claims], first, split)
    return {
        "task": experiment.recipe.task,
        "metric": task.metric,
        "split": split,
        "match": experiment.match,
        "seeds": experiment.seeds,
        "level": LEVEL,
        "schemes": rows,
        "claims": [
            {"claim": claim.says, "source": claim.source, "answer": claim.answer(found["verdict"]), **found}
            for claim, found in zip(claims, held, strict=True)
        ],
        "published": experiment.recipe.published,
    }


def _held(
    experiment: Experiment, pairs: list[tuple[Contestant, Contestant]], first: int, split: str
) -> list[dict[str, Any]]:
    """Each pair held against each other, corrected for their number."""
    metric = task_class(experiment.recipe.task).metric
    differ = [_difference(experiment, rival, other, first, metric, split) for rival, other in pairs]
    return [
        {
            "difference": found.value,
            "interval": list(found.interval),
            "p_value": found.p_value,
            "test": found.method,
            "p_corrected": chance,
            "verdict": verdict(found.value, chance, metric),
        }
        for found, chance in zip(differ, corrected([found.p_value for found in differ]), strict=True)
    ]


def verdict(value: float, chance: float, metric: str) -> str:
    """What can be said about a difference."""
    from splitstep.tasks.base import METRICS

    if chance >= LEVEL:
        return "no significant difference"
    return "better" if (value > 0) == (METRICS[metric] is max) else "worse"


def _finished(experiment: Experiment, rival: Contestant, first: int) -> Iterator[tuple[int, Run, dict[str, Any]]]:
    for seed in range(first, first + experiment.seeds):
        run = Run(experiment.run_folder(rival, seed))
        results = run.results()
        if results is not None:
            yield seed, run, results


def _splits(experiment: Experiment, rival: Contestant, first: int) -> list[str]:
    return [split for _, _, results in _finished(experiment, rival, first) for split in results["metrics"]]


def _row(experiment: Experiment, rival: Contestant, first: int, metric: str, split: str) -> dict[str, Any]:
    finished = list(_finished(experiment, rival, first))
    values = [results["metrics"][split][metric] for _, _, results in finished]

    def mean(key: str) -> float | None:
        found = [results[key] for _, _, results in finished if key in results]
        return float(np.mean(found)) if found else None

    unit = task_class(experiment.recipe.task).unit
    failures = {
        path.name.split(".")[0]: path.read_text().strip()
        for path in (experiment.folder / rival.scheme.name.replace("/", ",")).glob(f"*.{FAILURE}")
    }
    return {
        "name": rival.scheme.name,
        "metric": metric,
        "mean": float(np.mean(values)) if values else None,
        "std": float(np.std(values, ddof=1)) if len(values) > 1 else None,
        "values": values,
        "seeds": [seed for seed, _, _ in finished],
        "failed": failures,
        "adjusted": rival.adjusted,
        "parameters": rival.parameters.total,
        "body": rival.parameters.body,
        "flops": mean("flops"),
        "evaluations_per_layer": finished[0][2]["evaluations_per_layer"] if finished else None,
        f"{unit}_per_second": mean(f"{unit}_per_second"),
        "seconds": mean("seconds"),
        "peak_memory_bytes": mean("peak_memory_bytes"),
        "latency_seconds": mean("latency_seconds"),
        "runs": [str(run.folder.relative_to(experiment.folder)) for _, run, _ in finished],
    }


def _measure_settings(whole: Recipe) -> dict[str, Any]:
    if whole.task != "translation":
        return {}
    return {"convention": whole.evaluation.bleu, "language": whole.data.target}


def _difference(
    experiment: Experiment, rival: Contestant, other: Contestant, first: int, metric: str, split: str
) -> Difference:
    settings = _measure_settings(experiment.recipe)
    runs = [{seed: run for seed, run, _ in _finished(experiment, who, first)} for who in (rival, other)]
    both = sorted(runs[0].keys() & runs[1].keys())
    statistics = [
        [MEASURES[metric].of_examples(_predictions(which[seed], split), settings) for seed in both] for which in runs
    ]
    return difference(metric, *statistics)


def _predictions(run: Run, split: str) -> list[dict[str, Any]]:
    path = run.folder / f"predictions-{split}.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
