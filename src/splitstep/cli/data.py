"""Commands that make data: make-listops."""

from pathlib import Path
from typing import Annotated

import typer

from splitstep.cli.app import app
from splitstep.data.listops import Shape, write

Count = Annotated[int, typer.Option(min=0, help="Expressions in the file.")]


@app.command("make-listops")
def make_listops(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder for NAME_{train,val,test}.tsv.")],
    name: Annotated[str, typer.Option(help="What the names of the files begin with.")] = "basic",
    train: Count = 96_000,
    val: Count = 2_000,
    test: Count = 2_000,
    seed: Annotated[int, typer.Option(help="The same seed gives the same files.")] = 1,
    max_depth: Annotated[int, typer.Option(help="How deep expressions are nested.")] = Shape.max_depth,
    max_args: Annotated[int, typer.Option(help="Arguments of an operator, at most.")] = Shape.max_args,
    min_length: Annotated[int, typer.Option(help="Expressions are longer than this.")] = Shape.min_length,
    max_length: Annotated[int, typer.Option(help="Expressions are shorter than this.")] = Shape.max_length,
) -> None:
    """Draw the ListOps of the Long Range Arena, by its distribution and in its layout.

    A thousand expressions of the default lengths take some seconds.

    Example: splitstep make-listops data/lra_listops
    """
    shape = Shape(max_depth, max_args, min_length, max_length)
    counts = {"train": train, "val": val, "test": test}
    for path in write(out, name=name, counts=counts, seed=seed, shape=shape):
        typer.echo(path)
