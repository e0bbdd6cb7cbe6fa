"""Commands that make and measure models: check, train, evaluate."""

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from splitstep.cli.app import app
from splitstep.cli.output import Json, print_json, print_table
from splitstep.solver.errors import UserError
from splitstep.tables import packaged, setting, with_setting
from splitstep.tasks import task_class

if TYPE_CHECKING:
    from splitstep.recipe import Recipe

RecipeName = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A TOML file, or a packaged recipe; `splitstep list` names them.")
]
Settings = Annotated[
    list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE ...]", help="Settings over those of the recipe.")
]
Fresh = Annotated[
    bool, typer.Option("--fresh", help="Start anew, in a folder beside the one there is; go on with it by --out.")
]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")]


@app.command()
def check(name: RecipeName, settings: Settings = None, as_json: Json = False) -> None:
    """Try a recipe before a long run: data, one update, one evaluation, memory.

    Nothing is kept. The time an update takes, multiplied by the number of updates, is a first guess: the first update
    of a process is slower than those after it.

    Example: splitstep check laptop/multi30k-en-de
    """
    from splitstep.recipe import load

    runs = load(name, settings or [])  # before seconds of imports: is the recipe one?

    from splitstep.training.trials import check as checked

    rows = [{"run": label or name} | checked(recipe) for label, recipe in runs]
    if as_json:
        print_json(rows if len(rows) > 1 else rows[0])
        return
    for row in rows:
        print_table(row.pop("run"), [{"what": key.replace("_", " "), "value": _shown(v)} for key, v in row.items()])


@app.command()
def train(
    name: RecipeName,
    settings: Settings = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The run folder; without it runs/RECIPE, or runs/RECIPE+KEY=VALUE,... under other settings."),
    ] = None,
    fresh: Fresh = False,
    as_json: Json = False,
) -> None:
    """Train a recipe, or go on where it was interrupted.

    The same command continues after a crash or a signal as if nothing had happened, does nothing when the run is
    finished, and refuses when the recipe or the data changed. Ctrl-C and SIGTERM save after the update at hand. Under
    torchrun the update is shared among the processes. A recipe with a grid makes one run a combination.

    Example: splitstep train laptop/multi30k-en-de training.seed=2 --out runs/second
    """
    from splitstep.recipe import load

    runs = load(name, settings or [])
    base = chosen_folder(out or Path("runs") / folder_name(name, settings or []), fresh=fresh)

    for _, recipe in runs:  # before seconds of imports: are the data there?
        _ = task_class(recipe.task)(recipe.data, recipe.evaluation).fingerprint

    from splitstep.training.engine import train as trained
    from splitstep.training.processes import rank
    from splitstep.training.ready import all_ready

    if len(runs) > 1:
        all_ready(recipe for _, recipe in runs)
    found = []
    for label, recipe in runs:
        folder = base / label if label else base
        outcome = trained(recipe, folder, name=label)
        if outcome.code:
            raise typer.Exit(outcome.code)
        found.append({"run": str(folder)} | (outcome.results or {}))
        if rank() == 0 and not as_json:
            _print_results(folder, outcome.results or {})
    if rank() == 0 and as_json:
        print_json(found if len(found) > 1 else found[0])


@app.command()
def evaluate(
    folder: RunFolder,
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE ...]", help="Other data or another evaluation.")
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(help="train, valid, test or, of MNLI, mismatched; without it test, or valid where there is none."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure the model of a finished run.

    Example: splitstep evaluate runs/laptop/multi30k-en-de data.test='["test_2017_flickr.{language}"]'
    """
    from splitstep.training.engine import evaluate as evaluated
    from splitstep.training.run import Run

    run = Run.existing(folder)
    result = evaluated(run, changed(run.recipe(), settings or []), split)
    if as_json:
        print_json(result)
        return
    print_table(
        f"{folder}, {result['split']}", [{"metric": key, "value": _shown(v)} for key, v in result["metrics"].items()]
    )


def changed(recipe: "Recipe", settings: list[str]) -> "Recipe":
    """The recipe of a run with other data or another evaluation; its model stays."""
    from splitstep.recipe import recipe as checked

    tables = recipe.settings()
    for key, value in map(setting, settings):
        if key.partition(".")[0] not in ("data", "evaluation"):
            raise UserError(f"{key}: of a finished run only data.KEY and evaluation.KEY can be set")
        tables = with_setting(tables, key, value)
    return checked(tables)


def folder_name(name: str, settings: list[str]) -> str:
    """A folder for a recipe under these settings, the same for the same command."""
    stem = name if name in packaged() else Path(name).stem
    if not settings:
        return stem
    suffix = ",".join(sorted(settings))
    if len(suffix) > 80 or "/" in suffix:
        suffix = hashlib.sha256(suffix.encode()).hexdigest()[:12]
    return f"{stem}+{suffix}"


def chosen_folder(folder: Path, *, fresh: bool) -> Path:
    """The folder, or one beside it where it is taken and a fresh one is asked for."""
    if fresh and "RANK" in os.environ:  # one of them may have made the folder before another looks
        raise UserError("--fresh: processes of torchrun cannot agree on a new folder; name one with --out")
    if not fresh or not folder.exists():
        return folder
    number = 2
    while (other := folder.with_name(f"{folder.name}-{number}")).exists():
        number += 1
    return other


def _print_results(folder: Path, results: dict[str, Any]) -> None:
    for split, metrics in results.get("metrics", {}).items():
        rows = [{"metric": key, "value": _shown(value)} for key, value in metrics.items()]
        print_table(f"{folder}, {split}", rows)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(inner)}" for key, inner in value.items())
    return f"{value:,}" if isinstance(value, int) else str(value)
