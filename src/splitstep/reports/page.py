"""One self-contained HTML page: tables, learning curves, quality against cost, and where each number comes from."""

import html
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from splitstep.recipe import toml
from splitstep.reports import drawing, tables
from splitstep.reports.read import EVIDENCE, curve, curve_name, provenance, recipe_of, results_of
from splitstep.solver.errors import UserError

# Okabe and Ito's colours, which colour-blind readers can tell apart, and dashes for print.
COLOURS = ["#000000", "#E69F00", "#56B4E9", "#009E73", "#D55E00", "#0072B2", "#CC79A7", "#F0E442"]
DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot", "solid", "dash"]
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 68rem; padding: 1rem; color: #111; }
table { border-collapse: collapse; font-size: 0.85rem; } th, td { padding: 0.3rem 0.6rem; text-align: left; }
thead { border-bottom: 2px solid #111; } tr:nth-child(even) td { background: #f4f4f4; }
.wide { overflow-x: auto; } figure { margin: 1.5rem 0; } figcaption { font-size: 0.9rem; color: #444; }
details { margin: 0.5rem 0; } pre { overflow-x: auto; background: #f4f4f4; padding: 0.6rem; font-size: 0.8rem; }
@media print { details { display: block; } figure { break-inside: avoid; } }
"""


def page(folders: list[Path]) -> str:
    """The page of some comparisons and runs."""
    from plotly.offline import get_plotlyjs

    sections = "\n".join(_section(folder, number) for number, folder in enumerate(folders))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Splitstep: comparison of schemes</title><style>{STYLE}</style>"
        f"<script>{get_plotlyjs()}</script></head><body><h1>Comparison of schemes</h1>\n{sections}\n</body></html>\n"
    )


def _section(folder: Path, number: int) -> str:
    results = results_of(folder)
    parts = [
        f"<h2>{_escaped(results['task'])}: {_escaped(folder.name)}</h2>",
        f"<p>{_escaped(tables.sentence(results))}</p>",
        _table(tables.rows(results)),
        f"<p>{_escaped(_terms(results))}</p>",
        *_plots(folder, results, number),
        _claims(results),
        _published(results),
        "<h3>Runs</h3>",
        *(_run(folder, name) for row in results["schemes"] for name in row["runs"]),
        _failures(results),
    ]
    return f"<section>{''.join(parts)}</section>"


def _escaped(value: object) -> str:
    return html.escape(str(value))


def _table(rows: list[dict[str, str]]) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{_escaped(key)}</th>" for key in rows[0])
    body = "".join(f"<tr>{''.join(f'<td>{_escaped(cell)}</td>' for cell in row.values())}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _terms(results: dict[str, Any]) -> str:
    match = {
        "none": "nothing is matched",
        "parameters": "equal parameters",
        "flops": "equal training FLOPs",
        "seconds": "equal seconds of training",
    }
    said = f"Terms: {match[results['match']]}; measured on the {results['split']} split."
    tests = {row["test"] for row in results["schemes"] if "test" in row}
    if tests:
        said += f" Differences: {'; '.join(sorted(tests))}; p-values corrected for the number of schemes (Holm)."
    adjusted = [
        f"{row['name']}: {', '.join(f'{key} = {value}' for key, value in row['adjusted'].items())}"
        for row in results["schemes"]
        if row["adjusted"]
    ]
    return f"{said} Adjusted: {'; '.join(adjusted)}." if adjusted else said


# What a learning curve is drawn over: (title, value of a point, given the FLOPs of the whole run).
AXES: dict[str, tuple[str, Callable[[dict[str, float], float], float]]] = {
    "updates": ("updates", lambda point, flops: point["update"]),
    "flops": ("training FLOPs", lambda point, flops: point["share"] * flops),
    "seconds": ("seconds of training", lambda point, flops: point["seconds"]),
}


def _plots(folder: Path, results: dict[str, Any], number: int) -> list[str]:
    drawn = []
    for key, (title, where) in AXES.items():
        lines = []
        name = "loss"
        for index, row in enumerate(results["schemes"]):
            for place, run in enumerate(row["runs"]):
                name = curve_name(folder / run, results["metric"])
                points = curve(folder / run, results["metric"])
                xs = [where(point, row["flops"] or 0.0) for point in points]
                lines.append(_line(row["name"], xs, [p["value"] for p in points], index, first=place == 0))
        caption = f"Validation {name} over {title}; a line a seed."
        drawn.append(_figure(f"curve-{number}-{key}", lines, title, f"validation {name}", caption))
    finished = [(index, row) for index, row in enumerate(results["schemes"]) if row["values"]]
    dots = [_dot(row, index) for index, row in finished]
    caption = f"{results['metric']} on the {results['split']} split against training FLOPs; bars are one deviation."
    drawn.append(_figure(f"cost-{number}", dots, "training FLOPs", results["metric"], caption))
    return drawn


def _line(name: str, xs: list[float], ys: list[float], index: int, *, first: bool) -> dict[str, Any]:
    style = {"color": COLOURS[index % len(COLOURS)], "dash": DASHES[index % len(DASHES)]}
    shared = {"name": name, "legendgroup": name, "showlegend": first}
    return {"type": "scatter", "mode": "lines+markers", "x": xs, "y": ys, "line": style, **shared}


def _dot(row: dict[str, Any], index: int) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers+text",
        "x": [row["flops"]],
        "y": [row["mean"]],
        "text": [row["name"]],
        "textposition": "top center",
        "error_y": {"type": "data", "array": [row["std"] or 0]},
        "marker": {"color": COLOURS[index % len(COLOURS)], "size": 11, "symbol": index},
        "name": row["name"],
    }


def _figure(name: str, traces: list[dict[str, Any]], x: str, y: str, caption: str) -> str:
    layout = {
        "xaxis": {"title": {"text": x}},
        "yaxis": {"title": {"text": y}},
        "margin": {"t": 20},
        "legend": {"orientation": "h", "y": -0.25},
        "font": {"size": 13},
    }
    # Inside a script element only "</" could end it.
    drawing = json.dumps([traces, layout]).replace("</", "<\\/")
    return (
        f'<figure role="img" aria-label="{_escaped(caption)}"><div id="{name}" style="height:26rem"></div>'
        f"<figcaption>{_escaped(caption)}</figcaption></figure>"
        f"<script>(function () {{ const [traces, layout] = {drawing}; "
        f'Plotly.newPlot("{name}", traces, layout, {{responsive: true, displaylogo: false}}); }})();</script>'
    )


def _claims(results: dict[str, Any]) -> str:
    rows = tables.claim_rows(results)
    return f"<h3>What the papers claim</h3>{_table(rows)}" if rows else ""


def _published(results: dict[str, Any]) -> str:
    rows = tables.published_rows(results)
    quoted = results.get("published") or {}
    if not quoted:
        return ""
    notes = [
        f"{label}: {quoted[key]}" for key, label in (("claim", "Claim"), ("differs", "How it differs")) if key in quoted
    ]
    source = f"Source: {quoted['source']}." if "source" in quoted else ""
    return f"<h3>Published</h3>{_table(rows)}<p>{_escaped(' '.join([source, *notes]))}</p>"


def _run(folder: Path, name: str) -> str:
    about = provenance(folder / name)
    facts = "\n".join(f"{key} = {value}" for key, value in about.items() if key != "data")
    recipe = {key: value for key, value in recipe_of(folder / name).items() if key != "published"}
    return (
        f"<details><summary>{_escaped(name if name != '.' else folder.name)}</summary>"
        f"<pre>{_escaped(facts)}</pre><pre>{_escaped(toml(recipe))}</pre></details>"
    )


def _failures(results: dict[str, Any]) -> str:
    said = [
        f"<li>{_escaped(row['name'])}, {_escaped(run)}: {_escaped(reason)}</li>"
        for row in results["schemes"]
        for run, reason in row["failed"].items()
    ]
    return f"<h3>Failed</h3><ul>{''.join(said)}</ul>" if said else ""


SUMMARY = "summary.svg"


def markdown(folders: list[Path]) -> str:
    """The same in Markdown, with one picture instead of the plots."""
    parts = ["# Comparison of schemes"]
    if len(_comparisons(folders)):
        parts += [f"![Differences to the baselines, with their intervals]({SUMMARY})"]
    for folder in folders:
        results = results_of(folder)
        parts += [f"## {results['task']}: {folder.name}", tables.sentence(results)]
        if "command" in results:
            parts += [f"    {results['command']}"]
        parts += [tables.markdown(tables.rows(results)), _terms(results)]
        parts += [
            tables.markdown(rows) for rows in (tables.claim_rows(results), tables.published_rows(results)) if rows
        ]
    return "\n\n".join(parts) + "\n"


def _comparisons(folders: list[Path]) -> dict[str, dict[str, Any]]:
    found = {folder.name: results_of(folder) for folder in folders}
    return {name: results for name, results in found.items() if len(results["schemes"]) > 1}


def write(folders: list[Path], out: Path) -> Path:
    """The page, the Markdown, the picture and the numbers in a folder; the path of the page.

    Beside them lies what they were made of, without weights and predictions, so that they can be made again from there.
    """
    folders = [folder.resolve() for folder in folders]  # a name even for "."
    if len({folder.name for folder in folders}) < len(folders):
        names = ", ".join(folder.name for folder in folders)
        raise UserError(f"a report tells comparisons apart by the names of their folders, got {names}")
    whole = page(folders)
    out.mkdir(parents=True, exist_ok=True)
    (out / "report.html").write_text(whole, encoding="utf-8")
    (out / "report.md").write_text(markdown(folders), encoding="utf-8")
    if compared := _comparisons(folders):
        (out / SUMMARY).write_text(drawing.differences(compared), encoding="utf-8")
    if len(folders) > 1 or out.resolve() != folders[0]:
        numbers = [{"folder": folder.name, **results_of(folder)} for folder in folders]
        schemes = [scheme for entry in numbers for scheme in entry["schemes"]]
        (out / "results.json").write_text(json.dumps({"schemes": schemes, "comparisons": numbers}, indent=2))
        for folder in folders:
            _keep_evidence(folder, out / folder.name)
    return out / "report.html"


def _keep_evidence(folder: Path, out: Path) -> None:
    if out.exists() and out.samefile(folder):
        return
    runs = [run for row in results_of(folder)["schemes"] for run in row["runs"]]
    for place in dict.fromkeys([".", *runs]):
        (out / place).mkdir(parents=True, exist_ok=True)
        for name in EVIDENCE:
            if (folder / place / name).is_file():
                shutil.copy(folder / place / name, out / place / name)
