"""Commands that use a finished model: translate, generate, classify."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from queue import Empty, Queue
from threading import Thread
from typing import IO, Annotated, Any

import typer

from splitstep.cli.app import app
from splitstep.cli.run import RunFolder, changed
from splitstep.solver.errors import UserError
from splitstep.tasks import task_class

Batch = Annotated[int, typer.Option("--batch", min=1, help="The most lines that are taken at a time.")]
UNKNOWN = "the model does not know some of its words, and reads them as unknown"
PATIENCE = 0.05  # seconds that a line is waited for before those that came are answered


def _answer(
    answers: Callable[[Sequence[tuple[int, str]]], Iterator[str]],
    *,
    batch: int,
    empty: Callable[[int], str] = lambda number: "",
) -> None:
    """Write what is answered to the numbered lines of stdin, so many at a time; empty ones are not asked about."""
    if sys.stdin is None:
        raise UserError("stdin is closed; the lines to work on are read from it")
    if sys.stdout is None:
        raise UserError("stdout is closed; the answers are written to it")
    number = 0
    for raw in _as_they_come(sys.stdin.buffer, batch):
        lines = []
        for line in raw:
            number += 1
            lines.append((number, _decoded(line, number)))
        filled = [(number, text) for number, text in lines if text.strip()]
        found = answers(filled) if filled else iter(())
        for place, text in lines:
            typer.echo(next(found) if text.strip() else empty(place))
        sys.stdout.flush()


def _as_they_come(stream: IO[bytes], most: int) -> Iterator[list[bytes]]:
    """Lines of a stream, some at a time: so many, or what there is when the next one makes us wait."""
    waiting: Queue[bytes] = Queue(maxsize=most)

    def read() -> None:
        try:
            for line in stream:
                waiting.put(line)
        finally:
            waiting.put(b"")  # nothing more comes

    Thread(target=read, daemon=True).start()
    while line := waiting.get():
        lines = [line]
        with suppress(Empty):
            while len(lines) < most and (line := waiting.get(timeout=PATIENCE)):
                lines.append(line)
        yield lines
        if not line:
            return


def _decoded(line: bytes, number: int) -> str:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError:
        typer.echo(f"line {number}: not UTF-8; the wrong bytes are replaced", err=True)
        text = line.decode("utf-8", errors="replace")
    return text.removesuffix("\n").removesuffix("\r")


def _warn(numbers: list[int], cut: list[int], what: str) -> None:
    for index in cut:
        typer.echo(f"line {numbers[index]}: {what}", err=True)


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

    With --nbest N there are N lines for each, `number TAB score TAB translation`; the score is the log-probability
    divided as evaluation.normalization and evaluation.length_penalty say: of a token, without them.

    Example: echo 'Ein Hund rennt.' | splitstep translate runs/laptop/multi30k-de-en
    """
    from splitstep.tasks.translation import Translation
    from splitstep.training.engine import loaded
    from splitstep.training.run import Run

    run = Run.existing(folder)
    recipe = changed(run.recipe(), settings or [])
    if recipe.task != "translation":
        raise UserError(f"{folder} is a run of the task {recipe.task}, not translation")
    task, predictor = loaded(run, recipe)
    assert isinstance(task, Translation)

    def translations(lines: Sequence[tuple[int, str]]) -> Iterator[str]:
        numbers, texts = [number for number, _ in lines], [text for _, text in lines]
        _warn(numbers, task.too_long(texts), f"longer than {task.evaluation.max_source} tokens; its end is cut off")
        for number, beams in zip(numbers, task.translated(texts, predictor, nbest=nbest), strict=True):
            yield shown(number, beams)

    def shown(number: int, beams: list[tuple[str, float]]) -> str:
        return "\n".join(line if nbest == 1 else f"{number - 1}\t{score:.4f}\t{line}" for line, score in beams)

    _answer(translations, batch=batch, empty=lambda number: shown(number, [("", 0.0)] * nbest))


@app.command()
def generate(
    folder: RunFolder,
    prompt: Annotated[
        str | None, typer.Option(help="What the text begins with; without it, each line of stdin.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="How many tokens to write at most.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token each time.")] = 0.8,
    seed: Annotated[int, typer.Option(min=0, help="Of the draw.")] = 1,
) -> None:
    """Go on with a prompt by a trained language model.

    Prompts on stdin are answered by a line each, in order, in which a space stands for every line break.

    Example: splitstep generate runs/laptop/wikitext-2 --prompt 'The history of the city'
    """
    from splitstep.tasks.language_modelling import LanguageModelling
    from splitstep.training.run import Run

    run = Run.existing(folder)
    recipe = run.recipe()
    if not issubclass(task_class(recipe.task), LanguageModelling):
        raise UserError(f"{folder} is a run of the task {recipe.task}, not language-modelling")
    if prompt is not None and not prompt.strip():
        raise UserError("--prompt is empty")

    from splitstep.training.engine import loaded

    task, predictor = loaded(run, recipe)
    assert isinstance(task, LanguageModelling)

    def continued(text: str) -> str:
        return task.continued(text, predictor, tokens=tokens, temperature=temperature, seed=seed)

    def lines_of(lines: Sequence[tuple[int, str]]) -> Iterator[str]:
        numbers, texts = [number for number, _ in lines], [text for _, text in lines]
        _warn(numbers, task.too_long(texts), "longer than what the model sees; its end counts")
        _warn(numbers, task.unknown(texts), UNKNOWN)
        return (" ".join(continued(text).split("\n")) for text in texts)

    if prompt is None:
        _answer(lines_of, batch=1)
    else:
        if task.unknown([prompt]):
            typer.echo(f"--prompt: {UNKNOWN}", err=True)
        typer.echo(continued(prompt))


@app.command()
def classify(
    folder: RunFolder,
    batch: Batch = 64,
) -> None:
    """Label stdin on stdout, `label TAB probability` for each line, in order.

    A line is a text, or the path of an image. A task with two texts takes them with a tab between them. An empty line
    gives an empty line, and a model of numbers the number alone.

    Example: echo 'Shares of the bank rose by two per cent.' | splitstep classify runs/laptop/ag-news
    """
    from splitstep.tasks.classification import Classification
    from splitstep.tasks.images import Images
    from splitstep.training.run import Run

    run = Run.existing(folder)
    recipe = run.recipe()
    if not issubclass(task_class(recipe.task), Classification | Images):
        raise UserError(f"{folder} is a run of the task {recipe.task}, not of one that labels texts or images")

    from splitstep.training.engine import loaded

    task, predictor = loaded(run, recipe, alone=recipe.task == "images")
    assert isinstance(task, Classification | Images)

    def labels(lines: Sequence[tuple[int, str]]) -> Iterator[str]:
        rows: list[Any] = [task.example_of(text, place=f"line {number}") for number, text in lines]
        for index, remark in task.remarks(rows):
            typer.echo(f"line {lines[index][0]}: {remark}", err=True)
        return (_labelled(*answer) for answer in task.classified(rows, predictor))

    _answer(labels, batch=batch)


def _labelled(label: str, probability: float | None) -> str:
    return label if probability is None else f"{label}\t{probability:.4f}"
