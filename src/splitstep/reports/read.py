"""What lies in folders of runs and comparisons, ready to be shown."""

import re
import tomllib
from pathlib import Path
from typing import Any

from splitstep.reports.runs import side_by_side
from splitstep.solver.errors import UserError
from splitstep.tables import read_json, read_json_lines

# The files of a run or a comparison that its report is made of.
EVIDENCE = (
    "results.json",
    "comparison.json",
    "costs.json",
    "recipe.toml",
    "metrics.jsonl",
    "environment.json",
    "examples.json",
)


def results_of(folder: Path) -> dict[str, Any]:
    """The results of a comparison, of a single run, or of the runs of a grid side by side."""
    path = folder / "results.json"
    if not path.is_file():
        return _side_by_side(folder, _runs_in(folder))
    results = read_json(path)
    if "comparisons" in results:
        raise UserError(
            f"{folder} is a report; name the folders in it: {', '.join(map(str, _reported(folder, results)))}"
        )
    if "schemes" in results:
        return results
    if "metrics" not in results:
        raise UserError(f"{path} is neither a run's nor a comparison's")
    return _side_by_side(folder, ["."])


def _reported(folder: Path, results: dict[str, Any]) -> list[Path]:
    return [folder / entry["folder"] for entry in results["comparisons"]]


def _runs_in(folder: Path) -> list[str]:
    """The runs of a grid, which lie in its folder; one of them at least is finished."""
    kind = "comparison" if (folder / "comparison.json").is_file() else "run"
    runs = [path.parent.name for path in folder.glob("*/recipe.toml")] if kind == "run" else []
    if not any((folder / run / "results.json").is_file() for run in runs):
        raise UserError(f"{folder} has no results.json: it is no finished {kind}")
    return sorted(runs, key=_by_numbers)


def _by_numbers(name: str) -> list[str | float]:
    """What puts 12 behind 6."""
    return [float(part) if place % 2 else part for place, part in enumerate(re.split(r"(\d+(?:\.\d+)?)", name))]


def _side_by_side(folder: Path, runs: list[str]) -> dict[str, Any]:
    found = {run: read_json(path) for run in runs if (path := folder / run / "results.json").is_file()}
    recipes = {run: recipe_of(folder / run) for run in found}
    try:
        return side_by_side(found, recipes, unfinished=[run for run in runs if run not in found])
    except UserError as error:
        raise UserError(f"{folder}: {error}") from None


def recipe_of(folder: Path) -> dict[str, Any]:
    """The resolved recipe of a run."""
    path = folder / "recipe.toml"
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is no TOML, or damaged ({error})") from None


def curve(folder: Path, metric: str) -> list[dict[str, float]]:
    """The validation metric of a run over updates, seconds and the share of its training."""
    points, seconds = [], 0.0
    entries = read_json_lines(folder / "metrics.jsonl")
    last = max((entry["update"] for entry in entries), default=1)
    for entry in entries:
        seconds = entry.get("seconds", seconds)
        value = entry.get(f"eval_{metric}", entry.get("eval_loss"))
        if value is not None:
            share = entry["update"] / last
            points.append({"update": entry["update"], "seconds": seconds, "share": share, "value": value})
    return points


def curve_name(folder: Path, metric: str) -> str:
    """What the curve of a run shows: the metric where it was followed in training, the loss otherwise."""
    text = (folder / "metrics.jsonl").read_text()
    return metric if f'"eval_{metric}"' in text else "loss"


def flops_of(folder: Path) -> float:
    """The training FLOPs of a run."""
    return read_json(folder / "results.json").get("flops") or 0.0


def provenance(folder: Path) -> dict[str, Any]:
    """Command, versions, commit and seed of a run."""
    return read_json(folder / "environment.json")
