"""What lies in folders of runs and comparisons, ready to be shown."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

from splitstep.models.presets import PRESETS, SCHEME_SETTINGS, preset
from splitstep.recipe import HOW_IT_IS_DONE, label
from splitstep.reports.published import beside, spread, whole_settings
from splitstep.solver.errors import UserError
from splitstep.tables import at, differences
from splitstep.tasks import task_class

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
    """Runs as rows of one table, those that differ in their seed alone as one. Nothing is said of differences."""
    found = {run: read_json(path) for run in runs if (path := folder / run / "results.json").is_file()}
    recipes = {run: _with_preset(recipe_of(folder / run)) for run in found}
    task, metric = _common(folder, found)
    first = next(iter(found.values()))
    measured = first["metrics"]
    split = "test" if "test" in measured else next(iter(measured))
    changed = _changed(recipes)
    named: dict[str, list[str]] = {}
    for run, recipe in recipes.items():
        named.setdefault(_name(recipe, changed), []).append(run)
    return {
        "task": task,
        "metric": metric,
        "split": split,
        "weights": first.get("weights"),
        **{key: value for key, value in measured[split].items() if key == "signature"},
        "schemes": [_row(name, {run: found[run] for run in own}, metric, split) for name, own in named.items()],
        "unfinished": [run for run in runs if run not in found],
        "published": _beside(recipes, found, named, metric, split),
    }


def _common(folder: Path, found: dict[str, dict[str, Any]]) -> tuple[str, str]:
    """The task and the metric of all runs."""
    kinds = sorted({(results["task"], results["metric"]) for results in found.values()})
    if len(kinds) > 1:
        several = ", ".join(f"{task} by {metric}" for task, metric in kinds)
        raise UserError(f"{folder} has runs that fit no one table ({several}); name their folders")
    return kinds[0]


def _changed(recipes: dict[str, dict[str, Any]]) -> list[str]:
    """In what the recipes of runs differ, but for their seeds and what no number depends on."""
    first, *others = recipes.values()
    pairs = ((key, values) for other in others for key, values in differences(first, other).items())
    # A recipe that was resolved before there was a key lacks it; [model] has what was set alone.
    keys = dict.fromkeys(key for key, values in pairs if None not in values or key.startswith("model."))
    return [key for key in keys if key not in HOW_IT_IS_DONE | {"training.seed"} and not key.startswith("published")]


def _name(recipe: dict[str, Any], changed: list[str]) -> str:
    """What a run is called by what it has changed, as its grid calls it; by its preset alone otherwise."""
    return label({key: at(recipe, key) for key in changed}) or recipe["model"]["preset"]


def _with_preset(recipe: dict[str, Any]) -> dict[str, Any]:
    return recipe | {"model": {"preset": "transformer", **recipe["model"]}}


def _row(name: str, runs: dict[str, dict[str, Any]], metric: str, split: str) -> dict[str, Any]:
    """Quality and costs of the runs under one setting."""
    some = next(iter(runs.values()))
    costs = ["flops", "seconds", "peak_memory_bytes", "latency_seconds"]
    costs += [key for key in some if key.endswith("_per_second")]
    return {
        "name": name,
        "metric": metric,
        **spread([results["metrics"][split][metric] for results in runs.values()]),
        **{key: _mean([results.get(key) for results in runs.values()]) for key in costs},
        "evaluations_per_layer": some.get("evaluations_per_layer"),
        "parameters": some["parameters"]["total"],
        **{part: some["parameters"].get(part) for part in ("body", "embeddings", "head")},
        "runs": list(runs),
        "adjusted": {},
        "failed": {},
    }


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _beside(
    recipes: dict[str, dict[str, Any]],
    found: dict[str, dict[str, Any]],
    named: dict[str, list[str]],
    metric: str,
    split: str,
) -> dict[str, Any]:
    """The published numbers beside those of the runs; BLEU only where it has the published convention."""
    some = next(iter(recipes.values()))
    published, own = some.get("published", {}), some.get("evaluation", {}).get("bleu")
    quoted, fits = published.get("metric", metric), published.get("convention", own) == own

    def reached(name: str) -> list[float]:
        measured = [found[run]["metrics"][split] for run in named[name]]
        return [metrics[quoted] for metrics in measured if fits and quoted in metrics]

    schemes = {name: _whole(recipes[runs[0]]) for name, runs in named.items()}
    varied = {key for key in _changed(recipes) if key.startswith("model.")}
    changed = {name: varied | _own_scheme(recipes[runs[0]]) for name, runs in named.items()}
    presets = {recipe["model"]["preset"] for recipe in recipes.values()}
    return beside(published, schemes, reached, preset=presets.pop() if len(presets) == 1 else None, changed=changed)


def _whole(recipe: dict[str, Any]) -> dict[str, Any]:
    """The recipe with what its model has by default, as far as that can be known without the data."""
    model = dict(recipe["model"])
    try:
        kind = model.pop("kind", task_class(recipe["task"]).kind)
        return whole_settings(recipe, preset(model.pop("preset"), kind, **model))
    except UserError:  # a size that only the data tell, or a setting that is no more
        return recipe


def _own_scheme(recipe: dict[str, Any]) -> set[str]:
    """What a run has in the place of what makes its preset."""
    model = recipe["model"]
    usual = PRESETS.get(model["preset"], {})
    return {f"model.{key}" for key in SCHEME_SETTINGS & model.keys() if model[key] != usual.get(key)}


def read_json(path: Path) -> dict[str, Any]:
    """The numbers of a run, a comparison or a report."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is no JSON, or damaged ({error})") from None


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
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
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
    return json.loads((folder / "results.json").read_text(encoding="utf-8")).get("flops") or 0.0


def provenance(folder: Path) -> dict[str, Any]:
    """Command, versions, commit and seed of a run."""
    return json.loads((folder / "environment.json").read_text(encoding="utf-8"))
