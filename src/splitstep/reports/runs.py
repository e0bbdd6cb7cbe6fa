"""Runs side by side as one table: a row a setting, its seeds together, and nothing said of differences."""

from collections.abc import Iterable
from typing import Any

from splitstep.models.presets import PRESETS, SCHEME_SETTINGS, preset
from splitstep.recipe import HOW_IT_IS_DONE, label
from splitstep.reports.published import UNTESTED, beside, mean, spread, whole_settings
from splitstep.solver.errors import UserError
from splitstep.tables import at, differences
from splitstep.tasks import task_class

Tables = dict[str, dict[str, Any]]  # of each run, by its name


def side_by_side(found: Tables, recipes: Tables, *, unfinished: Iterable[str] = ()) -> dict[str, Any]:
    """The results of finished runs with their recipes, as a comparison is written down."""
    recipes = {run: _with_preset(recipe) for run, recipe in recipes.items()}
    task, metric = _common(found)
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
        "unfinished": list(unfinished),
        "published": _beside(recipes, found, named, metric, split),
    }


def _common(found: Tables) -> tuple[str, str]:
    """The task and the metric of all runs."""
    kinds = sorted({(results["task"], results["metric"]) for results in found.values()})
    if len(kinds) > 1:
        several = ", ".join(f"{task} by {metric}" for task, metric in kinds)
        raise UserError(f"runs that fit no one table ({several}); name their folders")
    return kinds[0]


def _changed(recipes: Tables) -> list[str]:
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


def _row(name: str, runs: Tables, metric: str, split: str) -> dict[str, Any]:
    """Quality and costs of the runs under one setting."""
    some = next(iter(runs.values()))
    costs = ["flops", "seconds", "peak_memory_bytes", "latency_seconds"]
    costs += [key for key in some if key.endswith("_per_second")]
    return {
        "name": name,
        "metric": metric,
        **spread([results["metrics"][split][metric] for results in runs.values()]),
        **{key: mean([results.get(key) for results in runs.values()]) for key in costs},
        "evaluations_per_layer": some.get("evaluations_per_layer"),
        "parameters": some["parameters"]["total"],
        **{part: some["parameters"].get(part) for part in ("body", "embeddings", "head")},
        "runs": list(runs),
        "adjusted": {},
        "failed": {},
        **UNTESTED,
    }


def _beside(
    recipes: Tables,
    found: Tables,
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
