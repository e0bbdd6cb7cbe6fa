"""What an experiment is: a TOML recipe over defaults, under the settings of the command line, checked as a whole."""

import itertools
import json
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, create_model, model_validator

from splitstep.data.settings import Section, validated
from splitstep.models.presets import PRESETS
from splitstep.solver.errors import UserError, lookup, unknown
from splitstep.tasks import TASKS, task_class

# Of each pair a recipe has one; the one that the command line names takes the place of the other.
_PAIRS = [("training.updates", "training.epochs"), ("training.tokens_per_update", "training.batch_size")]
EITHER = {key: other for pair in _PAIRS for key, other in (pair, pair[::-1])}

RECIPES = Path(__file__).parent / "recipes"
Positive = Annotated[int, Field(gt=0)]
Rate = Annotated[float, Field(ge=0, lt=1)]


class Training(Section):
    """How a model is trained. An update is one step of the optimizer, over all processes."""

    seed: int = Field(default=1, ge=0)
    init: str | None = None  # a run or a model folder to begin with; its vocabulary is used, and heads are new
    init_weights: Literal["trained", "random"] = "trained"  # random: its architecture and vocabulary alone
    updates: Positive | None = None
    epochs: Positive | None = None

    # The size of an update: padded tokens with sentences of like length together, or examples. It is cut into
    # `micro_batches` to fit memory, which changes nothing but the time.
    tokens_per_update: Positive | None = None
    batch_size: Positive | None = None
    micro_batches: Positive = 1
    repeated_augmentation: Positive = 1

    optimizer: Literal["adamw", "nag"] = "adamw"
    learning_rate: float = Field(gt=0)
    betas: Annotated[list[float], Field(min_length=2, max_length=2)] = [0.9, 0.98]
    eps: float = Field(default=1e-8, gt=0)
    momentum: Rate = 0.99
    weight_decay: float = Field(default=0.0, ge=0)  # decoupled
    decay: Literal["all", "matrices"] = "all"  # whether norms, biases and embeddings of positions decay too
    clip: float = Field(default=0.0, ge=0)  # the norm that gradients are cut to; 0 leaves them
    label_smoothing: Rate = 0.0

    schedule: Literal["constant", "inverse_sqrt", "linear", "cosine", "cosine_restarts", "transevolve"] = "constant"
    warmup: int = Field(default=0, ge=0)  # updates
    warmup_share: Rate = 0.0  # of all updates, in place of their number
    warmup_init: float = Field(default=0.0, ge=0)
    min_learning_rate: float = Field(default=0.0, ge=0)
    period: Positive | None = None  # of cosine_restarts, in updates; each next one `period_factor` times as long
    period_factor: float = 2.0
    shrink: float = 0.75  # of the peak from period to period

    precision: Literal["fp32", "bf16"] = "fp32"
    compile: bool = False
    gradient_checkpointing: bool = False
    sharding: Literal["none", "fsdp"] = "none"
    threads: Positive | None = None  # of this process; as torch chooses without it
    workers: int = Field(default=0, ge=0)  # processes that make batches

    evaluate_every: Positive = 1000  # updates
    save_every: Positive | None = None  # as often as evaluated without it
    log_every: Positive = 50
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
        if self.warmup and self.warmup_share:
            raise ValueError("give one of training.warmup and training.warmup_share")
        if self.final == "ema" and self.ema is None:
            raise ValueError("training.final = 'ema' needs training.ema, the decay of the average")
        if self.ema is not None and self.sharding != "none":
            raise ValueError("training.ema keeps whole weights, which training.sharding = 'fsdp' does not have")
        if self.schedule == "cosine_restarts" and self.period is None:
            raise ValueError("training.schedule = 'cosine_restarts' needs training.period")
        if self.repeated_augmentation > 1 and self.batch_size is None:
            raise ValueError("training.repeated_augmentation needs training.batch_size")
        return self

    @property
    def checkpoints_kept(self) -> int:
        """How many of the last checkpoints stay."""
        return max(self.keep, self.average if self.final == "average" else 1)


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


def packaged() -> dict[str, Path]:
    """The recipes that come with the package, by name."""
    return {
        str(path.relative_to(RECIPES).with_suffix("")).replace("\\", "/"): path
        for path in sorted(RECIPES.rglob("*.toml"))
    }


def read(name: str) -> dict[str, Any]:
    """The tables of a recipe file or of a packaged recipe."""
    recipes = packaged()
    path = recipes.get(name, Path(name))
    if not path.is_file():
        if path.suffix == ".toml" or ("/" in name and name.split("/")[0] not in {r.split("/")[0] for r in recipes}):
            raise UserError(f"no recipe file {name}")
        raise unknown("recipe", name, recipes)
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is no TOML: {error}") from None


def setting(text: str) -> tuple[str, Any]:
    """A KEY=VALUE of the command line; the value as TOML writes it, or as it stands."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UserError(f"a setting is KEY=VALUE, got {text!r}")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value


def with_setting(tables: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """The tables with one value exchanged, at a path such as `training.seed`."""
    first, _, rest = key.partition(".")
    if not rest:
        return {**tables, first: value}
    inner = tables.get(first, {})
    if not isinstance(inner, dict):
        raise UserError(f"{first} is no section, so there is no {key}")
    return {**tables, first: with_setting(inner, rest, value)}


def without(tables: Mapping[str, Any], key: str | None) -> dict[str, Any]:
    """The tables without a key such as `training.epochs`."""
    first, _, rest = (key or "").partition(".")
    if first not in tables:
        return dict(tables)
    if not rest:
        return {name: value for name, value in tables.items() if name != first}
    return {**tables, first: without(tables[first], rest)}


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
    lookup("preset", str(checked.model.get("preset", "transformer")), PRESETS)
    for key, values in checked.grid.items():
        if not values:
            raise UserError(f"grid.{key} has no values")
    return checked


def with_settings(tables: Mapping[str, Any], settings: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """The tables under settings, which stand over a grid too; of two keys that exclude each other the set one stays."""
    for key, value in settings:
        other = EITHER.get(key)
        tables = with_setting(without(tables, other), key, value)
        if "grid" in tables:
            grid = {name: values for name, values in tables["grid"].items() if name not in (key, other)}
            tables = {**tables, "grid": grid}
    return dict(tables)


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
        found.append((",".join(f"{key.rpartition('.')[2]}={value}" for key, value in chosen.items()), recipe(run)))
    return found


def differences(old: Mapping[str, Any], new: Mapping[str, Any], path: str = "") -> dict[str, tuple[Any, Any]]:
    """The keys at which two recipes differ, with both values."""
    found: dict[str, tuple[Any, Any]] = {}
    for key in [*old, *(key for key in new if key not in old)]:
        name, a, b = f"{path}{key}", old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found |= differences(a, b, f"{name}.")
        elif a != b:
            found[name] = (a, b)
    return found


def toml(tables: Mapping[str, Any], path: str = "") -> str:
    """Tables as TOML text."""
    simple = {key: value for key, value in tables.items() if not isinstance(value, dict)}
    lines = [f"{_key(key)} = {_value(value)}" for key, value in simple.items()]
    text = "".join(f"{line}\n" for line in lines)
    for key, value in tables.items():
        if isinstance(value, dict):
            name = f"{path}{_key(key)}"
            inner = toml(value, f"{name}.")
            header = f"[{name}]\n" if not value or any(not isinstance(v, dict) for v in value.values()) else ""
            text += f"\n{header}{inner}" if header else inner
    return text


def _key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else json.dumps(key)


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{_key(key)} = {_value(inner)}' for key, inner in value.items())} }}"
    if isinstance(value, str | bool):
        return json.dumps(value, ensure_ascii=False)
    return repr(value)
