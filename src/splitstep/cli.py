"""The command `splitstep`. Data goes to stdout, everything else to stderr; wrong use is one line and exit code 2.

Torch and transformers take seconds to import, so each command imports what it needs.
"""

import importlib
import json
import sys
import tomllib
from typing import Annotated, Any, NoReturn

import typer

from splitstep import __version__
from splitstep.models.presets import KINDS, PRESETS
from splitstep.solver.errors import UserError, lookup
from splitstep.solver.schemes import fixed_step_schemes
from splitstep.solver.splittings import SPLITTINGS
from splitstep.solver.tableaus import TABLEAUS

app = typer.Typer(
    name="splitstep",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Transformers as numerical ODE solvers: tokens are particles, depth is time.

    Every architecture is a row of data: how the right-hand side is split, which integrator advances it, which weights
    act when, and how attention evolves. Start with `splitstep list` for the names and `splitstep order` for what each
    scheme is worth numerically.""",
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def main() -> NoReturn:
    """Run the command and leave with its exit code."""
    try:
        code = app(standalone_mode=False)
    except UserError as error:
        _fail(str(error))
    except typer.TyperException as error:
        # A usage error carries its message; without arguments the message is the help page.
        _fail(getattr(error, "format_message", error.__str__)())
    except BrokenPipeError:
        sys.stderr.close()
        code = 141
    if code == 130:
        typer.echo("splitstep: interrupted", err=True)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str) -> NoReturn:
    typer.echo(f"splitstep: {message}", err=True)
    sys.exit(2)


@app.callback(invoke_without_command=True)
def options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
) -> None:
    """Options that stand before a command."""
    if version:
        typer.echo(__version__)
        raise typer.Exit


@app.command("list")
def list_names(as_json: Json = False) -> None:
    """Names of presets, splittings and integrators.

    A preset is a published architecture; `splitstep params PRESET` counts it.

    A splitting reads in the order of application; terms joined by + act together. The order of a scheme is the lower of
    the splitting's and the integrator's.
    """
    splittings = [
        {"part": part, "name": name, "order": _finite(entry.order), "substeps": str(entry)}
        for part, entries in SPLITTINGS.items()
        for name, entry in entries.items()
    ]
    integrators = [
        {"name": name, "order": entry.order, "stages": entry.stages, "adaptive": entry.adaptive}
        for name, entry in TABLEAUS.items()
    ]
    presets = [{"name": name, "settings": _assignments(row)} for name, row in PRESETS.items()]
    if as_json:
        _print_json({"presets": PRESETS, "kinds": KINDS, "splittings": splittings, "integrators": integrators})
        return
    _print_table("presets", presets)
    typer.echo()
    _print_table("kinds of model", [{"name": name, "defaults": _assignments(row)} for name, row in KINDS.items()])
    typer.echo()
    _print_table("splittings", [{**row, "substeps": _shortened(str(row["substeps"]))} for row in splittings])
    typer.echo()
    _print_table("integrators", integrators)


@app.command()
def params(
    name: Annotated[str, typer.Argument(metavar="PRESET", help="A preset; `splitstep list` names them.")],
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE ...]", help="Settings of the configuration.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Parameters by part, which layers share weights, FLOPs and evaluations.

    KEY is `kind` (encoder, causal, seq2seq, image) or any setting of the configuration, by its Hugging Face name. FLOPs
    are those of a forward pass over a full sequence, a token; a multiplication with its addition counts as two.

    Example: splitstep params parallel kind=image hidden_size=192 num_attention_heads=3 intermediate_size=768
    num_hidden_layers=12 num_independent_layers=4 num_labels=100
    """
    lookup("preset", name, PRESETS)
    chosen = dict(map(_setting, settings or []))
    kind = str(chosen.pop("kind", "encoder"))
    lookup("kind", kind, KINDS)

    from splitstep.models.accounting import account
    from splitstep.models.presets import preset

    report = account(preset(name, kind, **chosen))
    if as_json:
        _print_json(report)
        return
    counts = [{"part": part, "parameters": f"{report[part]:,}"} for part in ("body", "embeddings", "head", "total")]
    _print_table(f"{name}, {kind}", counts)
    typer.echo()
    for part, sharing in report["sharing"].items():
        typer.echo(f"weights of the {part}'s layers  {' '.join(map(str, sharing))}")
    evaluations = ", ".join(f"{term} {count}" for term, count in report["evaluations_per_layer"].items())
    typer.echo(f"evaluations a layer  {evaluations}")
    typer.echo(f"order of accuracy  {', '.join(f'{part} {order}' for part, order in report['order'].items())}")
    typer.echo(f"FLOPs a token  {report['flops_per_token']:,} at {report['sequence_length']} tokens")


def _setting(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UserError(f"a setting is KEY=VALUE, got {text!r}")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value


def _assignments(row: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in row.items())


@app.command()
def order(
    as_json: Json = False,
    part: Annotated[str | None, typer.Option(help="Only this part: encoder or decoder.")] = None,
    splitting: Annotated[str | None, typer.Option(help="Only this splitting.")] = None,
    integrator: Annotated[str | None, typer.Option(help="Only this integrator.")] = None,
) -> None:
    """Order of accuracy of every scheme, derived and measured.

    Derived: from the coefficients alone, in exact fractions. Measured: the slope of the error under halved steps, in
    float64, on the attention and feed-forward fields the models use. All schemes take about a minute; the options
    choose some.

    Example: splitstep order --splitting strang --integrator euler
    """
    rows = _chosen_schemes(part, splitting, integrator)

    from splitstep.fields.probe import measured_orders

    results = []
    widths = (8, 21, 11, 8, 9, 6)
    if not as_json:
        typer.echo(_columns(("part", "splitting", "integrator", "derived", "measured", "steps"), widths))
    for number, result in enumerate(measured_orders(rows), start=1):
        *names, derived, measurement = result
        if as_json:
            _progress(f"{number} of {len(rows)} schemes measured", last=number == len(rows))
        else:
            cells = (*names, derived, f"{measurement.order:.3f}", measurement.steps)
            typer.echo(f"{_columns(cells, widths)}  {measurement.note}".rstrip())
        results.append(
            dict(zip(("part", "splitting", "integrator"), names, strict=True))
            | {"derived": derived, "measured": measurement.order, "settled": measurement.settled}
        )
    if as_json:
        _print_json(results)


@app.command()
def bench(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="attention, evolution or losses; all without it.")
    ] = None,
    as_json: Json = False,
    repeats: Annotated[int, typer.Option(help="Measurements of each contestant, of which the median counts.")] = 7,
) -> None:
    """Speed side by side, in one process, in turns, as ratios.

    attention: explicit attention against torch's fused kernel. evolution: attention evolved in time against attention
    computed in every layer, with each feed-forward network. losses: the loss of an output layer chunk by chunk against
    all logits at once. Each ratio is to the fastest reference: above 1 is faster. A precision that the machine does not
    multiply natively is left out, and the report says which there were.
    """
    names = BENCHES if name is None else {name: lookup("benchmark", name, BENCHES)}
    if repeats < 1:
        raise UserError(f"--repeats must be at least 1, got {repeats}")

    from splitstep import bench as benches

    rows: list[dict[str, Any]] = []
    if not as_json:
        typer.echo(_columns(("precision", "case", "contestant", "seconds", "ratio"), BENCH_WIDTHS))
    for module in names.values():
        for case in importlib.import_module(module).cases(repeats=repeats):
            rows.append(case.row())
            if as_json:
                typer.echo(f"{case.case}: {case.contestant}", err=True)
            else:
                cells = (case.precision, case.case, case.contestant, f"{case.median_seconds:.4f}", f"{case.ratio:.2f}x")
                typer.echo(_columns(cells, BENCH_WIDTHS))
    if as_json:
        _print_json({"machine": benches.machine(), "cases": rows})
    else:
        typer.echo(", ".join(f"{key} {value}" for key, value in benches.machine().items()), err=True)


BENCHES = {name: f"splitstep.bench.{name}" for name in ("attention", "evolution", "losses")}
BENCH_WIDTHS = (9, 32, 36, 9, 8)


def _chosen_schemes(part: str | None, splitting: str | None, integrator: str | None) -> list[tuple[str, str, str]]:
    rows = fixed_step_schemes()
    for index, (kind, name) in enumerate({"part": part, "splitting": splitting, "integrator": integrator}.items()):
        if name is not None:
            lookup(kind, name, {row[index]: row for row in rows})
            rows = [row for row in rows if row[index] == name]
    return rows


def _finite(order: float) -> int | None:
    return None if order == float("inf") else int(order)


def _shortened(sentence: str, width: int = 78) -> str:
    return sentence if len(sentence) <= width else f"{sentence[: width - 4].rpartition(',')[0]}, ..."


def _columns(cells: tuple[object, ...], widths: tuple[int, ...]) -> str:
    return " ".join(str(cell).ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def _print_table(title: str, rows: list[dict[str, Any]]) -> None:
    """A title, the keys of the rows as a header, and a line a row."""
    cells = [tuple(rows[0])] + [tuple("-" if v is None else v for v in row.values()) for row in rows]
    widths = tuple(max(len(str(cell)) for cell in column) + 1 for column in zip(*cells, strict=True))
    typer.echo(title)
    for line in cells:
        typer.echo(f"  {_columns(line, widths)}")


def _print_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=2))


def _progress(line: str, *, last: bool) -> None:
    if sys.stderr.isatty():
        typer.echo(f"\r{line}", err=True, nl=last)
    elif last:
        typer.echo(line, err=True)
