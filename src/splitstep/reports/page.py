"""One self-contained HTML page: tables, learning curves, quality against cost, and where each number comes from."""

import html
import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from splitstep.reports import drawing, tables
from splitstep.reports.read import EVIDENCE, curve, curve_name, flops_of, provenance, recipe_of, results_of
from splitstep.solver.errors import UserError
from splitstep.tables import read_json, toml

# Okabe and Ito's colours, which colour-blind readers can tell apart, and dashes for print.
COLOURS = ["#000000", "#E69F00", "#56B4E9", "#009E73", "#D55E00", "#0072B2", "#CC79A7", "#F0E442"]
DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"]
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 68rem; padding: 1rem; color: #111;
  overflow-wrap: anywhere; }
table { border-collapse: collapse; font-size: 0.85rem; } th, td { padding: 0.3rem 0.6rem; text-align: left; }
tbody th { font-weight: normal; } .wide th, .wide td { overflow-wrap: normal; }
thead { border-bottom: 2px solid #111; } tr:nth-child(even) > * { background: #f4f4f4; }
.wide { overflow-x: auto; } figure { margin: 1.5rem 0; } figcaption { font-size: 0.9rem; color: #444; }
details { margin: 0.5rem 0; } pre { overflow-x: auto; background: #f4f4f4; padding: 0.6rem; font-size: 0.8rem; }
@media print {
  @page { size: landscape; margin: 1cm; } body { max-width: none; padding: 0; } figure, tr { break-inside: avoid; }
  .wide { overflow: visible; } table { font-size: 0.55rem; } th, td { padding: 0.15rem 0.25rem; }
  .wide th, .wide td { overflow-wrap: anywhere; } pre { overflow: visible; white-space: pre-wrap; }
  figure { margin: 0.3rem 0; } figure > div { height: 300px !important; } details, .modebar-container { display: none; }
}
"""
# Two plots a sheet.
PRINTED = """<script>
const sized = size => document.querySelectorAll(".js-plotly-plot").forEach(plot => Plotly.relayout(plot, size));
window.addEventListener("beforeprint", () => sized({width: 980, height: 300}));
window.addEventListener("afterprint", () => sized({width: null, height: null, autosize: true}));
</script>"""


def page(folders: list[Path]) -> str:
    """The page of some comparisons and runs."""
    from plotly.offline import get_plotlyjs

    sections = "\n".join(_section(folder, number) for number, folder in enumerate(folders))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Splitstep: comparison of schemes</title><style>{STYLE}</style>"
        f"<script>{get_plotlyjs()}</script></head><body><h1>Comparison of schemes</h1>\n{sections}\n"
        f"{PRINTED}</body></html>\n"
    )


def _section(folder: Path, number: int) -> str:
    results = results_of(folder)
    parts = [
        f"<h2>{_escaped(results['task'])}: {_escaped(folder.name)}</h2>",
        f"<p>{_escaped(tables.sentence(results))}</p>",
        f"<pre>{_escaped(results['command'])}</pre><p>{AGAIN}</p>" if "command" in results else "",
        _table(tables.rows(results)),
        f"<p>{_escaped(tables.terms(results))}</p>",
        _differences(folder, results),
        *_plots(folder, results, number),
        _claims(results),
        _published(results),
        f"<h3>Runs</h3>{_table(_provenance_rows(folder, results))}",
        *(_run(folder, name) for row in results["schemes"] for name in row["runs"]),
        _failures(results),
    ]
    return f"<section>{''.join(parts)}</section>"


AGAIN = "To make it again, give the command another --out: where these runs are, it has nothing left to train."


def _differences(folder: Path, results: dict[str, Any]) -> str:
    if not tables.is_comparison(results):
        return ""
    caption = "Differences to the baseline with their intervals, dashed of one seed; to the right is better."
    picture = drawing.differences({folder.name: results})
    return f'<figure class="wide">{picture}<figcaption>{caption}</figcaption></figure>'


def _escaped(value: object) -> str:
    return html.escape(str(value))


def _table(rows: list[dict[str, str]]) -> str:
    if not rows:
        return ""
    head = "".join(f'<th scope="col">{_escaped(key)}</th>' for key in rows[0])
    body = "".join(f"<tr>{_cells(*row.values())}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cells(name: str, *values: str) -> str:
    return f'<th scope="row">{_escaped(name)}</th>' + "".join(f"<td>{_escaped(value)}</td>" for value in values)


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
                xs = [where(point, flops_of(folder / run)) for point in points]
                lines.append(_line(row["name"], xs, [p["value"] for p in points], index, first=place == 0))
        caption = f"Validation {name} over {title}; a line a seed."
        drawn.append(_figure(f"curve-{number}-{key}", lines, title, name, caption, y_title=f"validation {name}"))
    finished = [(index, row) for index, row in enumerate(results["schemes"]) if row["values"]]
    for key, title in COSTS.items():
        dots = [_dot(row, key, index) for index, row in finished]
        caption = f"{results['metric']} on the {results['split']} split against {title}; bars are one deviation."
        drawn.append(_figure(f"cost-{number}-{key}", dots, title, results["metric"], caption))
    return drawn


COSTS = {"flops": "training FLOPs", "seconds": "seconds of training", "parameters": "parameters"}


def look(index: int) -> tuple[str, str]:
    """Colour and dash of a scheme: no two have both in common among as many as there are pairs."""
    turn, place = divmod(index, len(COLOURS))
    return COLOURS[place], DASHES[(place + turn) % len(DASHES)]


def _line(name: str, xs: list[float], ys: list[float], index: int, *, first: bool) -> dict[str, Any]:
    style = dict(zip(("color", "dash"), look(index), strict=True))
    shared = {"name": name, "legendgroup": name, "showlegend": first}
    return {"type": "scatter", "mode": "lines+markers", "x": xs, "y": ys, "line": style, **shared}


def _dot(row: dict[str, Any], cost: str, index: int) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [row[cost]],
        "y": [row["mean"]],
        "error_y": {"type": "data", "array": [row["std"] or 0]},
        "marker": {"color": look(index)[0], "size": 11, "symbol": index},
        "name": row["name"],
    }


def _figure(
    name: str, traces: list[dict[str, Any]], x: str, metric: str, caption: str, *, y_title: str | None = None
) -> str:
    percent = {"tickformat": ".1%"} if metric in tables.PERCENT else {}
    layout = {
        "xaxis": {"title": {"text": x}},
        "yaxis": {"title": {"text": y_title or tables.NAMES.get(metric, metric)}, **percent},
        "margin": {"t": 20},
        "legend": {"orientation": "h", "y": -0.25},
        "font": {"size": 13},
    }
    # Inside a script element only "</" could end it.
    drawing = json.dumps([traces, layout]).replace("</", "<\\/")
    words = _escaped(f"{caption} {_ends(traces)}")
    return (
        f'<figure><div id="{name}" role="img" aria-label="{words}" style="height:26rem"></div>'
        f"<figcaption>{_escaped(caption)}</figcaption></figure>"
        f"<script>(function () {{ const [traces, layout] = {drawing}; "
        f'Plotly.newPlot("{name}", traces, layout, {{responsive: true, displaylogo: false}}); }})();</script>'
    )


def _ends(traces: list[dict[str, Any]]) -> str:
    """Where each scheme ends up, for readers who do not see the plot."""
    ends: dict[str, list[str]] = {}
    for trace in traces:
        if trace["y"]:
            ends.setdefault(trace["name"], []).append(f"{trace['y'][-1]:.4g} at {trace['x'][-1]:.4g}")
    return "; ".join(f"{name}: {', '.join(places)}" for name, places in ends.items())


def _claims(results: dict[str, Any]) -> str:
    rows = tables.claim_rows(results)
    return f"<h3>What the papers claim</h3>{_table(rows)}" if rows else ""


def _published(results: dict[str, Any]) -> str:
    if not results.get("published"):
        return ""
    notes = _escaped(tables.published_notes(results))
    return f"<h3>Published</h3>{_table(tables.published_rows(results))}<p>{notes}</p>"


def _run(folder: Path, name: str) -> str:
    about = provenance(folder / name)
    about["command"] = f"splitstep {shlex.join(about.get('command', []))}"
    facts = "\n".join(f"{key} = {value}" for key, value in about.items() if key != "data")
    recipe = {key: value for key, value in recipe_of(folder / name).items() if key != "published"}
    return (
        f"<details><summary>{_escaped(name if name != '.' else folder.name)}</summary>"
        f"<pre>{_escaped(facts)}</pre><pre>{_escaped(toml(recipe))}</pre></details>"
    )


def _failures(results: dict[str, Any]) -> str:
    said = "".join(f"<li>{_escaped(line)}</li>" for line in tables.failures(results))
    return f"<h3>Failed</h3><ul>{said}</ul>" if said else ""


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
            parts += [f"    {results['command']}", AGAIN]
        parts += [tables.markdown(tables.rows(results)), tables.terms(results)]
        parts += [
            tables.markdown(rows) for rows in (tables.claim_rows(results), tables.published_rows(results)) if rows
        ]
        parts += filter(None, [tables.published_notes(results), tables.markdown(_provenance_rows(folder, results))])
        if failed := tables.failures(results):
            parts += ["Failed:", "\n".join(f"- {line}" for line in failed)]
    return "\n\n".join(parts) + "\n"


def _provenance_rows(folder: Path, results: dict[str, Any]) -> list[dict[str, str]]:
    """What each run was made by."""
    rows = []
    for name in (name for row in results["schemes"] for name in row["runs"]):
        about = provenance(folder / name)
        made = [about, *about.get("continued", [])]
        rows.append(
            {
                "run": name if name != "." else folder.name,
                "seed": str(about["seed"]),
                "splitstep": ", then ".join(_version(entry) for entry in made if "commit" in entry),
                "torch": str(about.get("torch", "-")),
                "threads": str(about.get("threads", "-")),
                "command": f"splitstep train {shlex.quote(_place(folder, name))} --out DIR",
            }
        )
    return rows


def _place(folder: Path, run: str) -> str:
    """Where the recipe of a run lies, seen from the folder that its comparison lies in."""
    return (Path(folder.name) / run / "recipe.toml").as_posix()


def _version(entry: dict[str, Any]) -> str:
    return " ".join(filter(None, (entry.get("splitstep"), tables.version(entry["commit"]))))


def _comparisons(folders: list[Path]) -> dict[str, dict[str, Any]]:
    found = {folder.name: results_of(folder) for folder in folders}
    return {name: results for name, results in found.items() if tables.is_comparison(results)}


def write(folders: list[Path], out: Path) -> Path:
    """The page, the Markdown, the picture and the numbers in a folder; the path of the page.

    Beside them lies what they were made of, without weights and predictions, so that they can be made again from there
    and comparisons can go on.
    """
    folders = [folder.resolve() for folder in folders]  # a name even for "."
    if len({folder.name for folder in folders}) < len(folders):
        names = ", ".join(folder.name for folder in folders)
        raise UserError(f"a report tells comparisons apart by the names of their folders, got {names}")
    alone = len(folders) == 1 and out.resolve() == folders[0]
    if not alone:
        _refuse_to_overwrite(out)
    whole = page(folders)
    out.mkdir(parents=True, exist_ok=True)
    (out / "report.html").write_text(whole, encoding="utf-8")
    (out / "report.md").write_text(markdown(folders), encoding="utf-8")
    if compared := _comparisons(folders):
        (out / SUMMARY).write_text(drawing.differences(compared), encoding="utf-8")
    if not alone:
        numbers = [{"folder": folder.name, **results_of(folder)} for folder in folders]
        schemes = [scheme for entry in numbers for scheme in entry["schemes"]]
        (out / "results.json").write_text(json.dumps({"schemes": schemes, "comparisons": numbers}, indent=2))
        for folder in folders:
            _keep_evidence(folder, out / folder.name)
    return out / "report.html"


def _refuse_to_overwrite(out: Path) -> None:
    """The results of a run or a comparison are not made room for a report's."""
    path = out / "results.json"
    if path.is_file() and "comparisons" not in read_json(path):
        raise UserError(f"{path} is no report's and would be overwritten; choose another --out")


def _keep_evidence(folder: Path, out: Path) -> None:
    if out.exists() and out.samefile(folder):
        return
    results = results_of(folder)
    runs = [run for row in results["schemes"] for run in row["runs"]]
    for place in dict.fromkeys([".", *runs, *results.get("unfinished", [])]):
        (out / place).mkdir(parents=True, exist_ok=True)
        for name in EVIDENCE:
            if (folder / place / name).is_file():
                shutil.copy(folder / place / name, out / place / name)
