"""Commands that use a finished model on text: translate, generate, classify."""

import sys
from collections.abc import Iterator
from itertools import islice
from typing import Annotated

import typer

from splitstep.cli.app import app
from splitstep.cli.run import RunFolder, changed
from splitstep.solver.errors import UserError
from splitstep.tasks import task_class

Batch = Annotated[int, typer.Option("--batch", min=1, help="Lines taken at a time.")]


def _input_lines(size: int) -> Iterator[list[str]]:
    """Lines of stdin, so many at a time; bytes that are no UTF-8 are replaced, and the line says so on stderr."""
    number = 0
    while raw := list(islice(sys.stdin.buffer, size)):
        texts = []
        for line in raw:
            number += 1
            try:
                text = line.decode("utf-8")
            except UnicodeDecodeError:
                typer.echo(f"line {number}: not UTF-8; the wrong bytes are replaced", err=True)
                text = line.decode("utf-8", errors="replace")
            texts.append(text.removesuffix("\n").removesuffix("\r"))
        yield texts


@app.command()
def translate(
    folder: RunFolder,
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[evaluation.KEY=VALUE ...]", help="Another beam or length penalty.")
    ] = None,
    nbest: Annotated[int, typer.Option(min=1, help="Translations a line, each with its score in front.")] = 1,
    batch: Batch = 64,
) -> None:
    """Translate stdin to stdout, a line for each line, in order.

    With --nbest N there are N lines for each, `number TAB score TAB translation`; the score is the mean log-probability
    of a token, under the length penalty.

    Example: echo 'Ein Hund rennt.' | splitstep translate runs/laptop/multi30k-de-en
    """
    from splitstep.training.engine import loaded
    from splitstep.training.run import Run

    run = Run.existing(folder)
    recipe = changed(run.recipe(), settings or [])
    if recipe.task != "translation":
        raise UserError(f"{folder} is a run of the task {recipe.task}, not translation")
    task, predictor = loaded(run, recipe)
    number = 0
    for texts in _input_lines(batch):
        filled = [text for text in texts if text.strip()]
        found = iter(task.translated(filled, predictor, nbest=nbest) if filled else [])  # type: ignore[attr-defined]
        for text in texts:
            beams = next(found) if text.strip() else [("", 0.0)] * nbest
            for line, score in beams:
                typer.echo(line if nbest == 1 else f"{number}\t{score:.4f}\t{line}")
            number += 1
        sys.stdout.flush()


@app.command()
def generate(
    folder: RunFolder,
    prompt: Annotated[str, typer.Option(help="What the text begins with.")],
    tokens: Annotated[int, typer.Option(min=1, help="How many tokens to write at most.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token each time.")] = 0.8,
    seed: Annotated[int, typer.Option(min=0, help="Of the draw.")] = 1,
) -> None:
    """Go on with a prompt by a trained language model.

    Example: splitstep generate runs/laptop/wikitext-2 --prompt 'The history of the city'
    """
    from splitstep.tasks.language_modelling import LanguageModelling
    from splitstep.training.run import Run

    run = Run.existing(folder)
    recipe = run.recipe()
    if not issubclass(task_class(recipe.task), LanguageModelling):
        raise UserError(f"{folder} is a run of the task {recipe.task}, not language-modelling")
    if not prompt.strip():
        raise UserError("--prompt is empty")

    from splitstep.training.engine import loaded

    task, predictor = loaded(run, recipe)
    assert isinstance(task, LanguageModelling)
    typer.echo(task.continued(prompt, predictor, tokens=tokens, temperature=temperature, seed=seed))


@app.command()
def classify(
    folder: RunFolder,
    batch: Batch = 64,
) -> None:
    """Label stdin on stdout, `label TAB probability` for each line, in order.

    A task with two texts takes them with a tab between them. An empty line gives an empty line, and a model of numbers
    the number alone.

    Example: echo 'Shares of the bank rose by two per cent.' | splitstep classify runs/laptop/ag-news
    """
    from splitstep.tasks.classification import Classification
    from splitstep.training.run import Run

    run = Run.existing(folder)
    recipe = run.recipe()
    if not issubclass(task_class(recipe.task), Classification):
        raise UserError(f"{folder} is a run of the task {recipe.task}, not of one that labels texts")

    from splitstep.training.engine import loaded

    task, predictor = loaded(run, recipe)
    assert isinstance(task, Classification)
    number = 0
    for lines in _input_lines(batch):
        rows = []
        for line in lines:
            number += 1
            if line.strip():
                rows.append(task.texts_of(line, place=f"line {number}"))
        found = iter(task.classified(rows, predictor) if rows else [])
        for line in lines:
            typer.echo(_labelled(*next(found)) if line.strip() else "")
        sys.stdout.flush()


def _labelled(label: str, probability: float | None) -> str:
    return label if probability is None else f"{label}\t{probability:.4f}"
