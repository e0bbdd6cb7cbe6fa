"""The tables of README.md and of the documentation, computed from the data.

python docs/tables.py --write     rewrite the tables between their markers
python docs/tables.py             check that they are up to date
"""

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from splitstep.data.hub import SOURCES
from splitstep.models.presets import KINDS, PRESETS, preset
from splitstep.recipe import Training
from splitstep.reports.tables import NAMES, chance, count, gap, quality, verdict
from splitstep.solver.schemes import scheme
from splitstep.solver.splittings import SPLITTINGS
from splitstep.solver.tableaus import TABLEAUS
from splitstep.tasks import TASKS, task_class

ROOT = Path(__file__).parent.parent
PAGES = (
    "README.md",
    "docs/evolved-attention.md",
    "docs/mathematics.md",
    "docs/models.md",
    "docs/performance.md",
    "docs/recipes.md",
    "docs/training.md",
)
MEASURED = ROOT / "benchmarks" / "results.json"
COMPARED = ROOT / "docs" / "results" / "results.json"
FINE_TUNED = ROOT / "docs" / "results" / "glue"


def markdown(header: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    lines = [list(header), ["---"] * len(list(header)), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def orders() -> str:
    """The order of every splitting x fixed-step integrator."""
    fixed = [name for name, entry in TABLEAUS.items() if not entry.adaptive]
    rows = [
        [part, f"`{name}`", *(scheme(part, splitting=name, integrator=integrator).order for integrator in fixed)]
        for part, entries in SPLITTINGS.items()
        for name in entries
    ]
    return markdown(["part", "splitting", *(f"`{name}`" for name in fixed)], rows)


def splittings() -> str:
    """Every splitting as its sentence."""
    rows = [
        [part, f"`{name}`", "exact" if entry.order == float("inf") else entry.order, str(entry)]
        for part, entries in SPLITTINGS.items()
        for name, entry in entries.items()
    ]
    return markdown(["part", "splitting", "order", "sub-steps"], rows)


def integrators() -> str:
    """Every integrator with what its coefficients give."""
    rows = [
        [
            f"`{name}`",
            entry.order,
            entry.stages,
            f"adaptive, error of order {entry.embedded_order}" if entry.adaptive else "",
        ]
        for name, entry in TABLEAUS.items()
    ]
    return markdown(["integrator", "order", "evaluations a sub-step", ""], rows)


def presets() -> str:
    """Every preset with what it changes."""
    rows = [[f"`{name}`", ", ".join(f"`{key}={value}`" for key, value in row.items())] for name, row in PRESETS.items()]
    return markdown(["preset", "settings"], rows)


def preset_parameters() -> str:
    """Every preset of every kind with the default sizes: parameters, operations, evaluations, order."""
    from splitstep.models.accounting import account

    rows = []
    for name in PRESETS:
        for kind in KINDS:
            report = account(preset(name, kind))
            evaluations = ", ".join(f"{term} {count}" for term, count in report["evaluations_per_layer"].items())
            orders = ", ".join(map(str, dict.fromkeys(report["order"].values())))
            flops = f"{report['flops_per_token'] / 1e6:.1f} M"
            rows.append([f"`{name}`", kind, f"{report['total']:,}", f"{report['body']:,}", flops, evaluations, orders])
    header = ["preset", "kind", "parameters", "of them body", "FLOPs a token", "evaluations a layer", "order"]
    return markdown(header, rows)


def benchmarks() -> str:
    """What `make bench` measured, and on what."""
    measured = json.loads(MEASURED.read_text())
    rows = [[row["precision"], row["case"], row["contestant"], *_measured(row)] for row in measured["cases"]]
    header = ["precision", "work", "contestant", "seconds", "spread", "ratio", "share of peak", "memory"]
    return f"{markdown(header, rows)}\n\n{', '.join(f'{key} {value}' for key, value in measured['machine'].items())}."


def evolution() -> str:
    """Evolved attention against full attention, from what `make bench` measured."""
    ratios: dict[str, dict[str, str]] = {}
    for row in json.loads(MEASURED.read_text())["cases"]:
        found = re.fullmatch(r"(attention alone|with feed-forward), d (\d+), n (\d+)", row["case"])
        if found is None or not row["contestant"].startswith("evolved"):
            continue
        name = "attention alone, literal" if "literal" in row["contestant"] else "attention alone"
        if found[1] == "with feed-forward":
            name = row["contestant"].removeprefix("evolved, fast, ").removesuffix(" feed-forward") + " network"
        ratios.setdefault(f"{found[2]} | {found[3]}", {})[name] = f"{row['ratio']:.2f}"
    header = ["width | tokens a sequence", *next(iter(ratios.values()))]
    width = markdown(header, [[place, *row.values()] for place, row in ratios.items()])
    return width.replace("| --- |", "| --- | --- |", 1)


def sources() -> str:
    """The data sets that the hub has."""
    return markdown(["data.folder", "repository"], [[f"`{name}`", f"`{s.repository}`"] for name, s in SOURCES.items()])


def _measured(row: dict[str, Any]) -> list[str]:
    if row["missing"] is not None:
        return [f"not installed: {row['missing']}", "", "", "", ""]
    share, peak = row["share_of_peak"], row["peak_bytes"]
    return [
        f"{row['median_seconds']:.4f}",
        f"{row['spread']:.0%}",
        f"{row['ratio']:.2f}",
        "" if share is None else f"{share:.0%}",
        "" if peak is None else f"{peak / 2**20:,.0f} MiB",
    ]


def results() -> str:
    """Every comparison of docs/results in short."""
    rows = [
        [
            compared["folder"],
            f"`{row['name']}`",
            f"{NAMES.get(row['metric'], row['metric'])} {quality(row)}",
            gap(row),
            chance(row["p_corrected"], compared) if "p_corrected" in row else "",
            verdict(row, baseline=row is compared["schemes"][0]),
            count(row["body"]),
            count(row["flops"]),
        ]
        for compared in json.loads(COMPARED.read_text())["comparisons"]
        for row in compared["schemes"]
    ]
    header = ["data", "scheme", "quality", "difference", "p", "verdict", "parameters in layers", "training FLOPs"]
    return markdown(header, rows)


WEIGHTS = {"pre-trained": "pre-trained", "reviews": "pre-trained, with reviews", "random": "random weights"}


def glue() -> str:
    """What fine-tuning reaches on the eight tasks, a column for each set of weights it began with."""
    columns = {title: json.loads((FINE_TUNED / f"{name}.json").read_text()) for name, title in WEIGHTS.items()}
    first = columns["random weights"]
    scores = [{row["task"]: row["score"] for row in column["tasks"]} for column in columns.values()]
    rows = [
        [f"{row['task']} ({', '.join(row['metrics'])})", *(_seeds(own[row["task"]]) for own in scores)]
        for row in first["tasks"]
    ]
    means = [[name, *(_seeds(c["averages"][name]) for c in columns.values())] for name in first["averages"]]
    return markdown(["task", *columns], [*rows, *means])


def _seeds(spread: dict[str, Any]) -> str:
    return f"{spread['mean']:.1f} ± {spread['std']:.1f}"


def evolved_quality() -> str:
    """What evolved attention with each network reaches on AG News, with the trained weights of its networks."""
    (compared,) = (c for c in json.loads(COMPARED.read_text())["comparisons"] if c["folder"] == "ag-news")
    rows = [
        [f"`{row['name']}`", f"{_network(row['name']):,}", quality(row), gap(row), f"{row['examples_per_second']:.0f}"]
        for row in compared["schemes"]
        if row["name"].startswith("trans")
    ]
    return markdown(["scheme", "trained weights of all networks", "accuracy", "difference", "examples/s"], rows)


def _network(name: str) -> int:
    """The trained weights of the feed-forward networks of a scheme at the size of laptop/ag-news."""
    from splitstep.compare.schemes import Candidate
    from splitstep.models.accounting import empty_model
    from splitstep.tables import read

    chosen = {**read("laptop/ag-news")["model"], **Candidate.named(name).settings}
    model = empty_model(preset(chosen.pop("preset"), "encoder", **chosen))
    return sum(p.numel() for name, p in model.named_parameters() if "convection" in name and p.requires_grad)


KINDS_OF_VALUES = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true or false"}


def keys(path: str, section: type[BaseModel]) -> str:
    """The keys of a section of recipes, and of the sections in it."""
    return markdown(["key", "value", "default", ""], _keys(path, section))


def _keys(path: str, section: type[BaseModel]) -> Iterator[list[str]]:
    properties, comments = section.model_json_schema()["properties"], _comments(section)
    for name, field in section.model_fields.items():
        key = f"{path}.{name}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _keys(key, field.annotation)
            continue
        default = "needed" if field.is_required() else "" if field.default is None else f"`{json.dumps(field.default)}`"
        yield [f"`{key}`", _value(properties[name]), default, comments.get(name, "").replace("|", "\\|")]


def configuration() -> str:
    """The settings of a model, with what the source says beside each."""
    from splitstep.models.configuration import NAMED, SplitstepConfig

    splittings = {"splitting": SPLITTINGS["encoder"], "decoder_splitting": SPLITTINGS["decoder"]}
    named = NAMED | splittings | {"integrator": TABLEAUS}
    comments = _beside(SplitstepConfig)
    rows = []
    for field in fields(SplitstepConfig):
        if isinstance(field.type, str) or field.name.endswith("token_id"):  # Hugging Face's own
            continue
        default = "" if field.default is None else f"`{field.default}`"
        values = ", ".join(f"`{name}`" for name in named.get(field.name, ()))
        rows.append([f"`{field.name}`", default, values, comments.get(field.name, "")])
    return markdown(["key", "default", "one of", ""], rows)


def _value(allowed: dict[str, Any]) -> str:
    """What a key takes, from its JSON schema."""
    if "anyOf" in allowed:
        return " or ".join(_value(one) for one in allowed["anyOf"] if one.get("type") != "null")
    if "enum" in allowed:
        return ", ".join(f"`{value}`" for value in allowed["enum"])
    if allowed.get("type") == "array":
        return f"list of {_value(allowed['items'])}" if "items" in allowed else "list"
    return KINDS_OF_VALUES.get(allowed.get("type", ""), "table")


def _comments(section: type[BaseModel]) -> dict[str, str]:
    """What the source says beside each field, those it inherits among them."""
    found: dict[str, str] = {}
    for owner in reversed(section.__mro__):
        if issubclass(owner, BaseModel) and owner is not BaseModel:
            found |= _beside(owner)
    return found


def _beside(owner: type[Any]) -> dict[str, str]:
    return dict(re.findall(r"(?m)^    (\w+): (?:.*?|[^)]*\n    \))  # (.+)$", inspect.getsource(owner)))


TABLES: dict[str, Callable[[], str]] = {
    "keys_training": partial(keys, "training", Training),
    **{
        f"keys_{section}_{name.replace('-', '_')}": partial(keys, section, getattr(task_class(name), section.title()))
        for name in TASKS
        for section in ("data", "evaluation")
    },
    "orders": orders,
    "splittings": splittings,
    "integrators": integrators,
    "presets": presets,
    "configuration": configuration,
    "preset_parameters": preset_parameters,
    "benchmarks": benchmarks,
    "evolution": evolution,
    "evolved_quality": evolved_quality,
    "sources": sources,
    "results": results,
    "glue": glue,
}


def filled(page: str) -> str:
    """The page with every table between its markers made anew."""

    def fill(match: re.Match[str]) -> str:
        return f"{match[1]}\n{TABLES[match[2]]()}\n{match[3]}"

    return re.sub(r"(<!-- table: (\w+) -->).*?(<!-- end -->)", fill, page, flags=re.DOTALL)


def main() -> int:
    stale = []
    for name in PAGES:
        path = ROOT / name
        page = path.read_text(encoding="utf-8")
        if filled(page) != page:
            stale.append(name)
            if "--write" in sys.argv:
                path.write_text(filled(page), encoding="utf-8")
    verb = "rewritten" if "--write" in sys.argv else "out of date (make tables rewrites them)"
    print(f"{verb}: {', '.join(stale)}" if stale else "the tables are up to date")
    return int(bool(stale) and "--write" not in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
