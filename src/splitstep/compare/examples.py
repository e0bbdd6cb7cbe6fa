"""What each test example adds to the metric of a run: all that a test of significance needs, and none of the data."""

import json
from typing import Any

import numpy as np

from splitstep.compare.measures import MEASURES, Array, measure_name, measure_settings
from splitstep.solver.errors import UserError
from splitstep.tables import read_json, read_json_lines
from splitstep.tasks.base import Task
from splitstep.training.checkpoints import write_atomically
from splitstep.training.run import Run

NAME = "examples.json"


def predictions(run: Run, task: Task) -> list[dict[str, Any]] | None:
    """What a run did with each example; None where only the sums of it were kept."""
    path = run.folder / f"predictions-{task.measured_split}.jsonl"
    return read_json_lines(path) if path.is_file() else None


def keep(run: Run, task: Task) -> None:
    """Write the statistics of a finished run beside its results, for where its predictions are left behind."""
    rows = predictions(run, task)
    if rows is not None:
        found = MEASURES[measure_name(task)].of_examples(rows, measure_settings(task))
        counts = np.isfinite(found).all() and np.array_equal(found, np.round(found))
        whole = found.astype(np.int64) if counts else found
        content = {"measure": measure_name(task), "settings": measure_settings(task), "examples": whole.tolist()}
        write_atomically(run.folder / NAME, json.dumps(content, separators=(",", ":"), ensure_ascii=False))


def statistics(run: Run, task: Task) -> Array:
    """The statistics of a finished run: an example a row."""
    path = run.folder / NAME
    if not path.is_file():
        raise UserError(f"{run.folder} has neither predictions nor {NAME}, which a test of significance needs")
    kept = read_json(path)
    asked = {"measure": measure_name(task), "settings": measure_settings(task)}
    for key, value in asked.items():
        if kept.get(key) != json.loads(json.dumps(value)):
            raise UserError(f"{path} is of the {key} {kept.get(key)!r}, and the comparison needs {value!r}")
    return np.asarray(kept["examples"], dtype=np.float64)
