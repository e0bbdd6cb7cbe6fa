"""Speed and latency of schemes, measured in turns when all runs are done: a run may have had other work beside it."""

import json
from statistics import median
from typing import TYPE_CHECKING

from splitstep.compare.schemes import Contestant
from splitstep.training.checkpoints import write_atomically
from splitstep.training.run import Run

if TYPE_CHECKING:
    from splitstep.compare.experiment import Experiment

Costs = dict[str, dict[str, float]]  # by the names of schemes
ROUNDS = 3


def in_turns(experiment: "Experiment", rivals: list[Contestant]) -> Costs:
    """Seconds of an update and of an answer; measured once, and kept with the comparison."""
    path = experiment.folder / "costs.json"
    if path.is_file():
        return json.loads(path.read_text(encoding="utf-8"))
    found: Costs = {rival.scheme.name: {"seconds_an_update": pace} for rival, pace in _paces(experiment, rivals)}
    for name, seconds in _latencies(experiment, rivals).items():
        found[name]["latency_seconds"] = seconds
    write_atomically(path, json.dumps(found, indent=2))
    return found


def _paces(experiment: "Experiment", rivals: list[Contestant]) -> list[tuple[Contestant, float]]:
    from splitstep.training import trials

    measured = trials.paces([rival.recipe for rival in rivals], threads=experiment.threads, rounds=ROUNDS, repeats=2)
    return list(zip(rivals, measured, strict=True))


def _latencies(experiment: "Experiment", rivals: list[Contestant]) -> dict[str, float]:
    """Of the first finished run of each scheme that has one."""
    from splitstep.training.costs import latency
    from splitstep.training.engine import loaded

    found: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for rival in rivals:
            runs = [Run(job.folder) for job in experiment.runs(rival).values()]
            if (run := next((run for run in runs if run.results() and run.model.is_dir()), None)) is not None:
                task, predictor = loaded(run, rival.recipe, say=lambda line: None)
                found.setdefault(rival.scheme.name, []).append(latency(predictor, task, repeats=5))
    return {name: median(seconds) for name, seconds in found.items()}
