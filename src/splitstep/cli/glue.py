"""The command that fine-tunes a model on all tasks of GLUE."""

from pathlib import Path
from typing import Annotated, Any

import typer

from splitstep.cli.app import app
from splitstep.cli.output import Json, print_json, print_table
from splitstep.cli.run import RunFolder, Settings

RECIPES = ("laptop/glue-small", "laptop/glue-large")


@app.command()
def glue(
    run: RunFolder,
    settings: Settings = None,
    recipe: Annotated[
        list[str] | None,
        typer.Option(help=f"A recipe of the task glue, whose grid is searched; {' and '.join(RECIPES)} without it."),
    ] = None,
    tasks: Annotated[str | None, typer.Option(help="Some tasks, with commas between them.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Runs of each task; as the recipe says without it.")] = None,
    from_scratch: Annotated[
        bool, typer.Option("--from-scratch", help="Random weights: the architecture and the vocabulary alone.")
    ] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Runs side by side.")] = 1,
    out: Annotated[Path | None, typer.Option(help="The folder; glue/RUN without it.")] = None,
    as_json: Json = False,
) -> None:
    """Fine-tune a pre-trained model on the eight tasks of GLUE, and print one table.

    RUN is a finished run, or the folder of a model: an encoder or a causal model. Of several settings in the recipe's
    grid, the one that is best on a task's development set is shown, which makes its score a little too good. The same
    command goes on with what was interrupted. Scores are in per cent, with the deviation over seeds.

    Example: splitstep glue runs/laptop/pretrain --tasks SST-2,RTE --seeds 3
    """
    from splitstep.compare.glue import Experiment, fine_tune

    weights = "random" if from_scratch else "trained"
    folder = out or Path("glue") / f"{_name(run.resolve())}{'-from-scratch' if from_scratch else ''}"
    chosen = tuple(tasks.split(",")) if tasks else ()
    names = tuple(recipe or RECIPES)
    experiment = Experiment(folder, names, run, chosen, seeds, weights, tuple(settings or ()), jobs)
    results = fine_tune(experiment, say=lambda line: typer.echo(line, err=True))
    if as_json:
        print_json(results)
        return
    print_table(f"{run}, {weights} weights, {', '.join(names)}", [_row(row) for row in results["tasks"]])
    for name, spread in results["averages"].items():
        typer.echo(f"{name}  {_shown(spread)}")
    for task, reason in results["skipped"].items():
        typer.echo(f"{task}  {reason}")


def _name(model: Path) -> str:
    """The name of a run or of a model; of one that lies in a run, as in every run under the same name, both names."""
    run = next((parent for parent in model.parents if (parent / "recipe.toml").is_file()), None)
    return model.name if run is None else f"{run.name}-{model.name}"


def _row(row: dict[str, Any]) -> dict[str, str]:
    metrics = ", ".join(f"{name} {_shown(spread)}" for name, spread in row["metrics"].items())
    shown = {"task": row["task"], "score": _shown(row["score"]), "metrics": metrics}
    return shown | ({"setting": row["setting"]} if row["settings_tried"] > 1 else {})


def _shown(spread: dict[str, Any]) -> str:
    several = len(spread["values"]) > 1
    return f"{spread['mean']:.1f}" + (f" ± {spread['std']:.1f}" if several else "")
