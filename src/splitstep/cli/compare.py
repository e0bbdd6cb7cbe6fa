"""Commands that set schemes side by side: compare, report."""

from pathlib import Path
from typing import Annotated

import typer

from splitstep.cli.app import app
from splitstep.cli.output import Json, print_json, print_table
from splitstep.cli.run import Fresh, RecipeName, Settings, chosen_folder, folder_name
from splitstep.solver.errors import UserError
from splitstep.tables import packaged, read

SCHEMES = "transformer,macaron,parallel,parallel-rk4,transevolve-full-1"


@app.command()
def compare(
    name: RecipeName,
    settings: Settings = None,
    schemes: Annotated[
        str,
        typer.Option(
            help="Presets with commas between them, the baseline first; PRESET/KEY=VALUE changes one, NAME:1 trains it "
            "with one seed."
        ),
    ] = SCHEMES,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each scheme.")] = 3,
    match: Annotated[str, typer.Option(help="What is made equal: parameters, flops, seconds or none.")] = "none",
    jobs: Annotated[int, typer.Option(min=1, help="Runs side by side.")] = 1,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The folder; without it comparisons/RECIPE, or comparisons/RECIPE+KEY=VALUE,... under other settings."
        ),
    ] = None,
    fresh: Fresh = False,
    as_json: Json = False,
) -> None:
    """Train several schemes on equal terms and say which is better, by how much, and how sure that is.

    Data order, vocabulary, schedule, averaging and evaluation are the same for all. With one seed a difference is held
    against the choice of test examples only; with more, against luck in training too. The same command goes on with
    what was interrupted, and with more seeds or further schemes it adds them. It ends with a page, FOLDER/report.html.

    Example: splitstep compare laptop/multi30k-de-en --schemes transformer,macaron,parallel/integrator=heun --seeds 3
    """
    from splitstep.recipe import load

    runs = load(name, [*(settings or [])])
    if len(runs) > 1:
        keys = ", ".join(read(name)["grid"])
        raise UserError(f"{name} has a grid over {keys}; compare takes one value of each (KEY=VALUE), and --schemes")
    folder = chosen_folder(out or Path("comparisons") / folder_name(name, settings or []), fresh=fresh)

    from splitstep.compare.experiment import Experiment
    from splitstep.compare.experiment import compare as compared
    from splitstep.reports import page, tables

    experiment = Experiment(folder, runs[0][1], [name.strip() for name in schemes.split(",")], match, seeds, jobs)
    results = compared(experiment, say=lambda line: typer.echo(line, err=True))
    report = page.write([folder], folder)
    if as_json:
        print_json(results)
        return
    print_table(
        f"{name}, {seeds} seed{'s' * (seeds > 1)}, match {match}", list(map(tables.brief, tables.rows(results)))
    )
    typer.echo(tables.sentence(results))
    typer.echo(f"report: {report}", err=True)


@app.command()
def report(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="DIR ...", help="Folders of comparisons, of finished runs, or of the runs of a grid."),
    ],
    out: Annotated[Path, typer.Option(help="Where the page, the Markdown and the numbers go.")] = Path("report"),
    as_json: Json = False,
) -> None:
    """Tables and plots of finished comparisons and runs as one page that needs no network.

    The runs that `splitstep train` makes of a recipe with a grid are one table, their seeds one row, with the published
    numbers beside them. Which differences are more than luck is for `splitstep compare` to say.

    Example: splitstep report comparisons/laptop/multi30k-de-en runs/laptop/mnist --out report
    """
    from splitstep.reports import page
    from splitstep.reports.read import results_of

    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"there is no folder {folder}")
    path = page.write(folders, out)
    if as_json:
        print_json([{"folder": str(folder), **results_of(folder)} for folder in folders])
    else:
        typer.echo(page.markdown(folders))
    typer.echo(f"report: {path}", err=True)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where the comparisons and the report go.")] = Path("demo"),
) -> None:
    """Compare five schemes on three small tasks whose data come with installed packages.

    Handwritten digits of scikit-learn, Python's own reference text, and names, dates and amounts of the CLDR in Babel
    from English to German. One seed, minutes on two cores; the same command goes on where it was.
    """
    from splitstep.compare.experiment import Experiment
    from splitstep.compare.experiment import compare as compared
    from splitstep.recipe import load
    from splitstep.reports import page, tables

    folders, found = [], []
    for name in sorted(name for name in packaged() if name.startswith("demo/")):
        ((_, recipe),) = load(name)
        folder = out / name.removeprefix("demo/")
        results = compared(
            Experiment(folder, recipe, SCHEMES.split(","), "none", 1), say=lambda line: typer.echo(line, err=True)
        )
        folders.append(folder)
        found.append(tables.sentence(results))
    path = page.write(folders, out / "report")
    for sentence in found:
        typer.echo(sentence)
    typer.echo(
        "Each difference was held against the choice of test examples only: one seed cannot tell luck in training."
    )
    typer.echo(f"report: {path}")
