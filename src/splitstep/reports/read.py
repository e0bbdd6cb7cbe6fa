"""What lies in folders of runs and comparisons, ready to be shown."""

import json
import tomllib
from pathlib import Path
from typing import Any

from splitstep.reports.published import beside
from splitstep.solver.errors import UserError

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
    """The results of a comparison, or of a single run as a comparison of one."""
    path = folder / "results.json"
    if not path.is_file():
        kind = "comparison" if (folder / "comparison.json").is_file() else "run"
        raise UserError(f"{folder} has no results.json: it is no finished {kind}")
    results = json.loads(path.read_text(encoding="utf-8"))
    if "comparisons" in results:
        raise UserError(
            f"{folder} is a report; name the folders in it: {', '.join(map(str, _reported(folder, results)))}"
        )
    return results if "schemes" in results else _single(folder, results)


def _reported(folder: Path, results: dict[str, Any]) -> list[Path]:
    return [folder / entry["folder"] for entry in results["comparisons"]]


def _single(folder: Path, results: dict[str, Any]) -> dict[str, Any]:
    recipe = recipe_of(folder)
    split = "test" if "test" in results["metrics"] else next(iter(results["metrics"]))
    value = results["metrics"][split][results["metric"]]
    row = {
        **{key: results.get(key) for key in ("flops", "evaluations_per_layer", "seconds")},
        **{key: results.get(key) for key in ("peak_memory_bytes", "latency_seconds")},
        **{key: value for key, value in results.items() if key.endswith("_per_second")},
        "name": recipe["model"].get("preset", "transformer"),
        "metric": results["metric"],
        "mean": value,
        "std": None,
        "values": [value],
        "parameters": results["parameters"]["total"],
        "body": results["parameters"].get("body"),
        "embeddings": results["parameters"].get("embeddings"),
        "head": results["parameters"].get("head"),
        "runs": ["."],
        "adjusted": {},
        "failed": {},
    }
    about = {"task": results["task"], "metric": results["metric"], "split": split, "match": "none", "seeds": 1}
    signature = {key: value for key, value in results["metrics"][split].items() if key == "signature"}
    return {
        **about,
        **signature,
        "schemes": [row],
        "published": _beside(recipe, row, results["metrics"][split]),
    }


def _beside(recipe: dict[str, Any], row: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    """The published numbers beside those of a run; BLEU only where it has the published convention."""
    published, own = recipe.get("published", {}), recipe.get("evaluation", {}).get("bleu")
    name, metric = row["name"], published.get("metric", row["metric"])
    reached = [measured[metric]] if metric in measured and published.get("convention", own) == own else []
    tables = recipe | {"model": recipe["model"] | {"preset": name}}
    return beside(published, {name: tables}, lambda _: reached, preset=name)


def recipe_of(folder: Path) -> dict[str, Any]:
    """The resolved recipe of a run."""
    return tomllib.loads((folder / "recipe.toml").read_text(encoding="utf-8"))


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
