"""The command bench."""

import importlib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from splitstep.cli.app import app
from splitstep.cli.output import Json, columns, print_json
from splitstep.solver.errors import UserError, lookup

if TYPE_CHECKING:
    from splitstep.bench import Case


@app.command()
def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME ...]",
            help="attention, decoding, evolution, losses, memory, startup, training; all without it.",
        ),
    ] = None,
    as_json: Json = False,
    repeats: Annotated[int, typer.Option(help="Measurements of each contestant, of which the median counts.")] = 7,
) -> None:
    """Speed side by side, in one process, in turns, as ratios.

    attention: explicit attention against torch's fused kernel. decoding: beam search against transformers' generate.
    evolution: attention evolved in time against attention computed in every layer, with each feed-forward network.
    losses: the loss of a vocabulary in chunks or in bands against all logits at once. memory: activations of
    deep stacks, plain, with checkpointing, reversible. startup: commands and imports against importing transformers.
    training: a training step of encoders, images and language models against transformers, torch and x-transformers,
    and of the schemes against each other, with the share of the machine's own matrix product. A peer that is not
    installed is named as missing; pip install 'splitstep[bench]' has them. Each ratio is to the fastest reference:
    above 1 is faster. A precision that the machine does not multiply natively is left out, and the report says which
    there were.
    """
    chosen = [lookup("benchmark", name, BENCHES) for name in names or BENCHES]
    if repeats < 1:
        raise UserError(f"--repeats must be at least 1, got {repeats}")

    from splitstep import bench as benches

    rows: list[dict[str, Any]] = []
    if not as_json:
        header = ("precision", "case", "contestant", "seconds", "spread", "ratio", "of peak", "memory")
        typer.echo(columns(header, BENCH_WIDTHS))
    for module in chosen:
        for case in importlib.import_module(module).cases(repeats=repeats):
            rows.append(case.row())
            if as_json:
                typer.echo(f"{case.case}: {case.contestant}", err=True)
            else:
                typer.echo(columns((case.precision, case.case, case.contestant, *_figures(case)), BENCH_WIDTHS))
    if as_json:
        print_json({"machine": benches.machine(), "cases": rows})
    else:
        typer.echo(", ".join(f"{key} {value}" for key, value in benches.machine().items()), err=True)


def _figures(case: "Case") -> tuple[str, ...]:
    if case.missing is not None:
        return f"not installed: {case.missing}", "", "", "", ""
    memory = "" if case.peak_bytes is None else f"{case.peak_bytes / 2**20:,.0f} MiB"
    share = "" if case.share_of_peak is None else f"{case.share_of_peak:.0%}"
    ratio = "" if case.ratio is None else f"{case.ratio:.2f}x"
    return f"{case.median_seconds:.4f}", f"{case.spread:.0%}", ratio, share, memory


BENCHES = {
    name: f"splitstep.bench.{name}"
    for name in ("attention", "decoding", "evolution", "losses", "memory", "startup", "training")
}
BENCH_WIDTHS = (9, 34, 36, 9, 7, 8, 8, 10)
