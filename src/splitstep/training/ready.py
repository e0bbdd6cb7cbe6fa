"""What a recipe asks for, read and built: its task, configuration, model and batches."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.utils import logging as transformers_logging

from splitstep.data.batches import Plan
from splitstep.models.accounting import empty_model, parameters
from splitstep.models.configuration import SplitstepConfig
from splitstep.models.presets import preset
from splitstep.recipe import Recipe, Training
from splitstep.solver.errors import RunError, UserError, unknown
from splitstep.tasks import task_class
from splitstep.tasks.base import Task
from splitstep.tasks.memory import out_of_memory
from splitstep.training.initial import initial_checksums, initial_configuration, initial_folder
from splitstep.training.progress import Say

if TYPE_CHECKING:
    from splitstep.models.backbone import SplitstepPreTrainedModel

transformers_logging.disable_progress_bar()  # a bar for each file hides our own


def ready(recipe: Recipe, say: Say = lambda line: None) -> tuple[Task, SplitstepConfig]:
    """The task and the configuration of a recipe, when all that a run of it will read is there and fits together."""
    with _named("model"):
        SplitstepConfig.check_names(recipe.model.keys() - {"preset"})
    task = task_of(recipe, say)
    if "valid" not in task.splits:
        raise UserError("the recipe names no data.valid, the split that a run is watched by")
    config = configuration(recipe, task)
    _check_training(recipe.training, task, config)
    for split in task.splits:
        task.lengths(split)
    return task, config


def all_ready(recipes: Iterable[Recipe], say: Say = lambda line: None) -> list[Task]:
    """The tasks of several runs, when none of them would be refused; what is to be said of the data is said once."""
    known: list[tuple[dict[str, Any], Task, SplitstepConfig]] = []
    tasks, said = [], set[str]()

    def once(line: str) -> None:
        if line not in said:
            said.add(line)
            say(line)

    for recipe in recipes:
        # What is read and built depends on all sections but training, and on what that begins with.
        told = recipe.settings() | {"training": recipe.training.init}
        same = [(task, config) for before, task, config in known if before == told]
        for task, config in same:
            _check_training(recipe.training, task, config)
        if not same:
            known.append((told, *ready(recipe, once)))
        tasks.append(same[0][0] if same else known[-1][1])
    return tasks


def _check_training(settings: Training, task: Task, config: SplitstepConfig) -> None:
    """Refuse what a model of the task cannot be trained with, or measured by when it is."""
    task.check(config)
    if settings.select not in task.reported:
        raise unknown("training.select", settings.select, task.reported)
    if config.adaptive_cutoffs is not None and settings.label_smoothing:
        raise UserError("training.label_smoothing needs all log-probabilities, which an adaptive softmax does not make")
    if config.reversible and settings.gradient_checkpointing:
        raise UserError("training.gradient_checkpointing has no part in a reversible model, which keeps no states")
    if config.reversible and settings.sharding != "none":
        raise UserError("training.sharding: a reversible model finds its weights whole; it is not sharded")
    adaptive = any(config.scheme(part).tableau.adaptive for part in config.parts)
    if adaptive and settings.sharding != "none":
        raise UserError(
            f"training.sharding: with integrator {config.integrator!r} every process chooses steps of its own, and "
            "sharded weights are gathered by all at each; choose a fixed-step integrator or train without sharding"
        )


def task_of(recipe: Recipe, say: Say = lambda line: None, folder: Path | None = None) -> Task:
    """The task of a recipe with its data, and the vocabulary of a model where a folder is given."""
    initial = initial_folder(recipe) if folder is None else None
    return task_class(recipe.task)(recipe.data, recipe.evaluation, folder=folder, initial=initial, say=say)


def origin(task: Task) -> dict[str, str]:
    """All that a run of the task is made from, with its checksums: the data, and the model it begins with."""
    return task.origin | initial_checksums(task.initial)


def configuration(recipe: Recipe, task: Task) -> SplitstepConfig:
    """The configuration of the recipe's model, or of the one that training begins with, with what the data tell."""
    chosen = dict(recipe.model)
    found = task.settings()
    told = {key: value for key, value in found.items() if key not in chosen}
    with _named("model"):
        if task.initial is not None:
            config = initial_configuration(task.initial, recipe, told)
        else:
            name, kind = chosen.pop("preset", "transformer"), chosen.pop("kind", task.kind)
            config = preset(name, kind, **{**told, **chosen})
        for contradiction in contradictions(config, found):
            raise UserError(contradiction)
    return config


ROOM = ("vocab_size", "max_position_embeddings")  # of which a model may have more than the data need


def contradictions(config: SplitstepConfig, told: Mapping[str, Any]) -> Iterator[str]:
    """Where a model is not what the data say it must be."""
    needed = {key: value for key, value in told.items() if key not in ("id2label", "label2id")}
    if "id2label" in told:
        needed["num_labels"] = len(told["id2label"])
    for key, value in needed.items():
        has = getattr(config, key)
        if (has < value) if key in ROOM else (has != value):
            yield f"{key} = {has}, and the data need {value}"


@contextmanager
def _named(section: str) -> Iterator[None]:
    """Say which section of the recipe an error is about."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{section}: {error}") from None


def build(recipe: Recipe, config: SplitstepConfig) -> "SplitstepPreTrainedModel":
    """The recipe's model with the weights of its seed, or with those that training begins with but for the labels'."""
    model = task_class(recipe.task).model()
    torch.manual_seed(recipe.training.seed)
    try:
        made = model(config)
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        size = parameters(empty_model(config, model)).total
        raise RunError(f"out of memory while a model of {size:,} parameters was made") from error
    folder = initial_folder(recipe)
    if folder is None or recipe.training.init_weights == "random":
        return made
    trained = model.from_pretrained(folder, config=config, ignore_mismatched_sizes=True)
    for part in model.of_labels:
        setattr(trained, part, getattr(made, part))
    return trained.train()


def plan(task: Task, settings: Training) -> Plan:
    """Which examples make each update."""
    return Plan(
        task.lengths("train"),
        settings.seed,
        tokens=settings.tokens_per_update,
        examples=settings.batch_size,
        repeats=settings.repeated_augmentation,
        window=settings.length_window,
        tilts=task.tilts("train"),
    )


def updates_of(task: Task, settings: Training) -> int:
    """How many updates a run has."""
    return settings.updates or plan(task, settings).updates_in(settings.epochs or 1)
