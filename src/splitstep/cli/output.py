"""Tables, JSON and progress on the terminal. Data goes to stdout, everything else to stderr."""

import json
import sys
from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def columns(cells: tuple[object, ...], widths: tuple[int, ...]) -> str:
    """The cells of one line."""
    return " ".join(str(cell).ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def print_table(title: str, rows: list[dict[str, Any]]) -> None:
    """A title, the keys of the rows as a header, and a line a row."""
    cells = [tuple(rows[0])] + [tuple("-" if v is None else v for v in row.values()) for row in rows]
    widths = tuple(max(len(str(cell)) for cell in column) + 1 for column in zip(*cells, strict=True))
    typer.echo(title)
    for line in cells:
        typer.echo(f"  {columns(line, widths)}")


def print_json(value: object) -> None:
    """The value as JSON on stdout."""
    typer.echo(json.dumps(value, indent=2))


def progress(line: str, *, last: bool) -> None:
    """A line that the next one overwrites, on a terminal."""
    if sys.stderr.isatty():
        typer.echo(f"\r{line}", err=True, nl=last)
    elif last:
        typer.echo(line, err=True)
