"""Speed and latency of schemes, measured in turns when all runs are done: a run may have had other work beside it."""

import json
from statistics import median
from typing import TYPE_CHECKING

from splitstep.compare.schemes import Contestant
from splitstep.tables import read_json
from splitstep.training.checkpoints import write_atomically
from splitstep.training.progress import Say
from splitstep.training.run import Run

if TYPE_CHECKING:
    from splitstep.compare.experiment import Experiment

Costs = dict[str, dict[str, float]]  # by the names of schemes
ROUNDS = 3
PACE, LATENCY = "seconds_an_update", "latency_seconds"


def in_turns(experiment: "Experiment", rivals: list[Contestant], *, say: Say) -> Costs:
    """Seconds of an update and of an answer, kept with the comparison.

    They are measured anew, for all schemes, where one is without that could have them: numbers of different days are
    hard to compare. A scheme without a finished run has no costs, and one whose weights were not kept no new latency.
    """
    path = experiment.folder / "costs.json"
    found: Costs = read_json(path) if path.is_file() else {}
    finished = {rival.scheme.name: runs for rival in rivals if (runs := _finished(experiment, rival))}
    measured = {
        PACE: ([rival for rival in rivals if rival.scheme.name in finished], _paces),
        LATENCY: ([rival for rival in rivals if _with_weights(finished.get(rival.scheme.name, []))], _latencies),
    }
    for key, (able, measure) in measured.items():
        if any(key not in found.get(rival.scheme.name, {}) for rival in able):
            try:
                seconds = measure(experiment, able)
            except Exception as error:  # whatever it is, the results of training are worth more
                say(f"{key.replace('_', ' ')} could not be measured: {error}")
                continue
            for name, value in seconds.items():
                found.setdefault(name, {})[key] = value
    write_atomically(path, json.dumps(found, indent=2))
    return found


def _finished(experiment: "Experiment", rival: Contestant) -> list[Run]:
    runs = [Run(job.folder) for job in experiment.runs(rival).values()]
    return [run for run in runs if run.results()]


def _with_weights(runs: list[Run]) -> list[Run]:
    return [run for run in runs if run.model.is_dir()]


def _paces(experiment: "Experiment", rivals: list[Contestant]) -> dict[str, float]:
    from splitstep.training import trials

    measured = trials.paces([rival.recipe for rival in rivals], threads=experiment.threads, rounds=ROUNDS, repeats=2)
    return {rival.scheme.name: pace for rival, pace in zip(rivals, measured, strict=True)}


def _latencies(experiment: "Experiment", rivals: list[Contestant]) -> dict[str, float]:
    """Of the first run of each scheme whose weights are there."""
    from splitstep.training.costs import latency
    from splitstep.training.engine import loaded

    found: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for rival in rivals:
            run = _with_weights(_finished(experiment, rival))[0]
            task, predictor = loaded(run, rival.recipe, say=lambda line: None)
            found.setdefault(rival.scheme.name, []).append(latency(predictor, task, repeats=5))
    return {name: median(seconds) for name, seconds in found.items()}
