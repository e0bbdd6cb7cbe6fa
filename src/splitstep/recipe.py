"""What an experiment is: a TOML recipe over defaults, under the settings of the command line, checked as a whole."""

import itertools
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import Field, create_model, model_validator

from splitstep.data.settings import Section, validated
from splitstep.models.presets import PRESETS
from splitstep.solver.errors import UserError, lookup, unknown
from splitstep.solver.splittings import SPLITTINGS
from splitstep.solver.tableaus import TABLEAUS
from splitstep.tables import read, setting, with_setting, with_settings
from splitstep.tasks import TASKS, task_class

Positive = Annotated[int, Field(gt=0)]
Rate = Annotated[float, Field(ge=0, lt=1)]


class Training(Section):
    """How a model is trained. An update is one step of the optimizer, over all processes."""

    seed: int = Field(default=1, ge=0, lt=2**32)
    init: str | None = None  # a run or a model folder to begin with: its weights and vocabulary; a classifier is new
    init_weights: Literal["trained", "random"] = "trained"  # random: its architecture and vocabulary alone
    updates: Positive | None = None  # steps of the optimizer, over all processes; or epochs
    epochs: Positive | None = None  # passes over the training examples

    tokens_per_update: Positive | None = None  # padded tokens, sentences of like length together; or batch_size
    batch_size: Positive | None = None  # examples of an update
    length_window: Positive = 1  # updates whose examples are dealt out by length, for less padding
    micro_batches: Positive = 1  # pieces of an update, to fit memory; each draws its own dropout masks
    repeated_augmentation: Positive = 1  # how often an image is in an update, each time drawn anew

    optimizer: Literal["adamw", "nag", "muon"] = "adamw"  # muon: of the layers' matrices, beside adamw of all else
    learning_rate: float = Field(gt=0)  # the highest; of transevolve a factor
    betas: Annotated[list[Rate], Field(min_length=2, max_length=2)] = [0.9, 0.98]
    eps: float = Field(default=1e-8, gt=0)
    momentum: Rate = 0.99  # of nag; that of muon is 0.95
    weight_decay: float = Field(default=0.0, ge=0)  # decoupled
    decay: Literal["all", "matrices"] = "all"  # whether norms, biases and embeddings of positions decay too
    clip: float = Field(default=0.0, ge=0)  # the norm that gradients are cut to; 0 leaves them
    label_smoothing: Rate = 0.0

    schedule: Literal["constant", "inverse_sqrt", "linear", "cosine", "cosine_restarts", "transevolve"] = "constant"
    warmup: int = Field(default=0, ge=0)  # updates
    warmup_share: Rate = 0.0  # of all updates, in place of their number
    warmup_init: float = Field(default=0.0, ge=0)  # the rate that warm-up begins with
    min_learning_rate: float = Field(default=0.0, ge=0)  # where linear and cosine end
    period: Positive | None = None  # of cosine_restarts, in updates; each next one `period_factor` times as long
    period_factor: float = Field(default=2.0, ge=1)
    shrink: float = Field(default=0.75, gt=0, le=1)  # of the peak from period to period

    precision: Literal["fp32", "bf16"] = "fp32"  # bf16: autocast
    compile: bool = False  # by torch.compile
    gradient_checkpointing: bool = False  # states between steps are computed again on the way back
    sharding: Literal["none", "fsdp"] = "none"  # fsdp: each process holds a part of the weights (FSDP2)
    threads: Annotated[int, Field(gt=0, le=1024)] | None = None  # of this process; as torch chooses without it
    workers: int = Field(default=0, ge=0)  # processes that make batches

    evaluate_every: Positive = 1000  # updates
    save_every: Positive | None = None  # as often as evaluated without it
    log_every: Positive = 50  # updates
    keep: Positive = 1  # last checkpoints, beside the best
    select: str = "loss"  # what is best is best at this, on the validation split
    patience: Positive | None = None  # evaluations without a better one, then stop
    final: Literal["last", "best", "average", "ema"] = "last"  # which weights become the model
    average: Positive = 5  # last checkpoints, for final = "average"
    ema: float | None = Field(default=None, gt=0, lt=1)  # decay of the moving average of weights
    timeout: Positive = 1800  # seconds that processes wait for each other

    @model_validator(mode="after")
    def _fits(self) -> "Training":
        if (self.updates is None) == (self.epochs is None):
            raise ValueError("give one of training.updates and training.epochs")
        if (self.tokens_per_update is None) == (self.batch_size is None):
            raise ValueError("give one of training.tokens_per_update and training.batch_size")
        if self.init_weights == "random" and self.init is None:
            raise ValueError("training.init_weights = 'random' needs training.init, the model it is like")
        if self.optimizer == "nag" and not self.momentum:
            raise ValueError("training.optimizer = 'nag' needs a training.momentum above 0")
        if self.warmup and self.warmup_share:
            raise ValueError("give one of training.warmup and training.warmup_share")
        if self.final == "ema" and self.ema is None:
            raise ValueError("training.final = 'ema' needs training.ema, the decay of the average")
        if self.ema is not None and self.sharding != "none":
            raise ValueError("training.ema keeps whole weights, which training.sharding = 'fsdp' does not have")
        if self.optimizer == "muon" and self.sharding != "none":
            raise ValueError("training.optimizer = 'muon' needs whole matrices, which training.sharding = 'fsdp' cuts")
        if self.schedule == "cosine_restarts" and self.period is None:
            raise ValueError("training.schedule = 'cosine_restarts' needs training.period")
        if self.repeated_augmentation > 1 and self.batch_size is None:
            raise ValueError("training.repeated_augmentation needs training.batch_size")
        if self.length_window > 1 and self.batch_size is None:
            raise ValueError(
                "training.length_window needs training.batch_size: tokens_per_update sorts by length anyway"
            )
        return self

    @property
    def checkpoints_kept(self) -> int:
        """How many of the last checkpoints stay."""
        return max(self.keep, self.average if self.final == "average" else 1)


# What no number of a run depends on but those of the clock, and the masks that dropout draws in each micro-batch. Where
# the data lie is among it: their checksums tell them.
HOW_IT_IS_DONE = {"data.root"} | {
    f"training.{key}" for key in ("micro_batches", "workers", "threads", "log_every", "keep", "timeout")
}


class Recipe(Section):
    """A whole experiment. `model` is a preset and settings of its configuration; `grid` and `published` stand aside."""

    task: str
    model: dict[str, Any] = {}
    data: Any
    training: Training
    evaluation: Any
    grid: dict[str, list[Any]] = {}
    published: dict[str, Any] = {}

    def settings(self) -> dict[str, Any]:
        """What a run is made of, as plain data."""
        return self.model_dump(exclude={"grid", "published"}, exclude_none=True)


@cache
def schema(task: str) -> type[Recipe]:
    """The recipe of a task: its own data and evaluation sections."""
    cls = task_class(task)
    evaluation = (cls.Evaluation, cls.Evaluation())
    return create_model(f"{cls.__name__}Recipe", __base__=Recipe, data=(cls.Data, ...), evaluation=evaluation)


def recipe(tables: Mapping[str, Any]) -> Recipe:
    """The tables as a recipe, or what is wrong with them in one line."""
    if "task" not in tables:
        raise UserError(f"the recipe lacks task; choose from {', '.join(TASKS)}")
    lookup("task", str(tables["task"]), TASKS)
    known = Recipe.model_fields
    for key in tables:
        if key not in known:
            raise unknown("section", key, known)
    checked = validated(schema(tables["task"]), tables)
    _check_scheme(checked.model)
    for key, values in checked.grid.items():
        if not values:
            raise UserError(f"grid.{key} has no values")
    return checked


def _check_scheme(model: Mapping[str, Any]) -> None:
    """Refuse a scheme that is in no table, before seconds of imports; a configuration checks all else."""
    splittings = {name for part in SPLITTINGS.values() for name in part}
    tables: dict[str, Iterable[str]] = {
        "preset": PRESETS,
        "integrator": TABLEAUS,
        "splitting": splittings,
        "decoder_splitting": splittings,
    }
    for key, table in tables.items():
        if model.get(key) is not None and str(model[key]) not in table:
            raise unknown(key, model[key], table)


def load(name: str, settings: Iterable[str] = ()) -> list[tuple[str, Recipe]]:
    """The runs of a recipe under the command line's settings."""
    return runs(with_settings(read(name), map(setting, settings)))


def runs(tables: Mapping[str, Any]) -> list[tuple[str, Recipe]]:
    """The runs of a recipe's tables: one, or one a combination of its grid, with its name."""
    whole = recipe(tables)
    if not whole.grid:
        return [("", whole)]
    found = []
    for values in itertools.product(*whole.grid.values()):
        chosen = dict(zip(whole.grid, values, strict=True))
        run = {key: value for key, value in tables.items() if key != "grid"}
        for key, value in chosen.items():
            run = with_setting(run, key, value)
        found.append((label(chosen), recipe(run)))
    return found


def label(chosen: Mapping[str, Any]) -> str:
    """The name of a run, and of its folder, by what it has of a grid."""
    return ",".join(f"{key.rpartition('.')[2]}={value}" for key, value in chosen.items()).replace("/", "_")
