"""A few updates that leave nothing behind: what a long run will meet, and how fast it will be."""

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, cast

import torch

from splitstep.models.accounting import parameters
from splitstep.recipe import Recipe
from splitstep.tasks.base import Task
from splitstep.tasks.memory import freed_memory
from splitstep.training.costs import peak_memory
from splitstep.training.processes import Teller
from splitstep.training.progress import Say
from splitstep.training.ready import build, configuration, plan, ready, task_of, updates_of
from splitstep.training.run import Run
from splitstep.training.signals import Signals
from splitstep.training.trainer import SplitstepTrainer

if TYPE_CHECKING:
    from splitstep.models.backbone import SplitstepPreTrainedModel


def check(recipe: Recipe, *, say: Say | None = None) -> dict[str, Any]:
    """What a long run will meet, met now: the recipe, the data, one update at full size, one evaluation, memory."""
    task, _ = ready(recipe, say or Teller())
    sizes = {split: len(task.lengths(split)) for split in task.splits}
    with _trial(recipe, task) as (trainer, updates):
        begun = time.monotonic()
        loss = next(trainer.trial_updates())
        seconds = time.monotonic() - begun
        valid = task.validate(trainer.predictor(), "valid")["loss"]
        count = parameters(cast("SplitstepPreTrainedModel", trainer.model)).total
    return {
        "task": recipe.task,
        "examples": sizes,
        "parameters": count,
        "updates": updates,
        "padding": trainer.plan.padding(),
        "first_loss": loss,
        "validation_loss": valid,
        "seconds_an_update": seconds,
        "seconds_in_all": seconds * updates,
        "peak_memory_bytes": peak_memory(),
    }


@freed_memory("kept")
def paces(recipes: Sequence[Recipe], *, threads: int | None = None, rounds: int = 3, repeats: int = 3) -> list[float]:
    """Seconds that an update by each recipe takes: medians over the same updates, measured in turns.

    One model is held at a time, however many there are.
    """
    seconds: list[list[float]] = [[] for _ in recipes]
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        for _ in range(rounds):
            for recipe, measured in zip(recipes, seconds, strict=True):
                with _trial(recipe, task_of(recipe), updates=repeats + 1) as (trainer, _):
                    updates = trainer.trial_updates()
                    next(updates)  # warm-up
                    measured += [_seconds_of(updates) for _ in range(repeats)]
    finally:
        torch.set_num_threads(before)
    return [median(measured) for measured in seconds]


def _seconds_of(updates: Iterator[float]) -> float:
    begun = time.monotonic()
    next(updates)
    return time.monotonic() - begun


@contextmanager
def _trial(recipe: Recipe, task: Task, *, updates: int = 1) -> Iterator[tuple[SplitstepTrainer, int]]:
    """A trainer of a few updates that leaves nothing on the disk, and how many the run would have."""
    # Workers are left out: to start them takes longer than an update.
    short = {"evaluate_every": 10**9, "save_every": 10**9, "ema": None, "workers": 0}
    with tempfile.TemporaryDirectory() as scratch:
        yield (
            SplitstepTrainer(
                build(recipe, configuration(recipe, task)),
                task=task,
                settings=recipe.training.model_copy(update=short),
                run=Run(Path(scratch, "none")),
                plan=plan(task, recipe.training),
                updates=updates,
                signals=Signals(),
                show=lambda done, entry: None,
            ),
            updates_of(task, recipe.training),
        )
