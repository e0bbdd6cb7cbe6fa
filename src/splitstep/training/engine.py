"""From a recipe to a trained and measured model: train, check, evaluate."""

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from safetensors import SafetensorError
from transformers.utils import logging as transformers_logging

from splitstep.data.batches import Plan
from splitstep.models.accounting import account, parameters
from splitstep.models.configuration import SplitstepConfig
from splitstep.models.presets import preset
from splitstep.recipe import Recipe, Training
from splitstep.solver.errors import RunError, UserError, unknown
from splitstep.tasks import task_class
from splitstep.tasks.base import Task
from splitstep.tasks.memory import freed_memory
from splitstep.tasks.prediction import Predictor
from splitstep.training import checkpoints
from splitstep.training.initial import initial_checksums, initial_configuration, initial_folder
from splitstep.training.progress import Opened, clock, progress
from splitstep.training.rates import rate
from splitstep.training.run import Run
from splitstep.training.trainer import EMA, Signals, SplitstepTrainer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from splitstep.models.backbone import SplitstepPreTrainedModel

Say = Callable[[str], None]
transformers_logging.disable_progress_bar()  # a bar for each saved file hides our own


@dataclass(frozen=True)
class Outcome:
    """How a command ended: its exit code, and the results of a finished run."""

    code: int
    results: dict[str, Any] | None = None


def rank() -> int:
    """The number of this process among those that torchrun started."""
    return int(os.environ.get("RANK", "0"))


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


@contextmanager
def _named(section: str) -> Iterator[None]:
    """Say which section of the recipe an error is about."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{section}: {error}") from None


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


def build(recipe: Recipe, config: SplitstepConfig) -> "SplitstepPreTrainedModel":
    """The recipe's model with the weights of its seed, or those that training begins with."""
    model = task_class(recipe.task).model()
    torch.manual_seed(recipe.training.seed)
    folder = initial_folder(recipe)
    if folder is None or recipe.training.init_weights == "random":
        return model(config)
    return model.from_pretrained(folder, config=config).train()


def plan(task: Task, settings: Training) -> Plan:
    """Which examples make each update."""
    return Plan(
        task.lengths("train"),
        settings.seed,
        tokens=settings.tokens_per_update,
        examples=settings.batch_size,
        repeats=settings.repeated_augmentation,
        tilts=task.tilts("train"),
    )


@contextmanager
def processes(settings: Training) -> "Iterator[None]":
    """Join the processes that torchrun started, if it did."""
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    if "RANK" not in os.environ or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield
        return
    # The Trainer leaves out its own timeout on CPU, and a lost process would be waited for without end.
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    timeout = timedelta(seconds=settings.timeout)
    torch.distributed.init_process_group(backend, timeout=timeout, **_meeting(timeout))
    try:
        yield
    except RuntimeError as error:
        if not _LOST.search(str(error)):
            raise
        raise RunError(
            f"the other processes no longer answer ({str(error).splitlines()[0][:200]}); the same command goes on from "
            "the last checkpoint"
        ) from None
    finally:
        torch.distributed.destroy_process_group()


def _meeting(timeout: timedelta) -> dict[str, Any]:
    """Where processes find each other. After a restart torchrun's store still has the addresses of the dead."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    world = int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = torch.distributed.TCPStore(address, port, world, is_master=False, timeout=timeout)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return {"store": torch.distributed.PrefixStore(f"attempt-{attempt}", store), "rank": rank(), "world_size": world}


# How gloo and NCCL say that another process died, hangs or cannot be reached.
_LOST = re.compile(r"gloo|NCCL|[Cc]onnection (closed|reset|refused)|[Tt]imed out|Broken pipe")


@freed_memory("kept")
def train(
    recipe: Recipe, folder: Path, *, name: str = "", say: Say | None = None, display: Opened = progress
) -> Outcome:
    """Train a recipe in a folder, or go on with it; a finished run is left as it is."""
    tell = say or _Teller(name)
    run = Run(folder)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file, not a folder")
    if folder.is_dir() and any(folder.iterdir()) and not run.recipe_file.is_file() and not _hardly_begun(folder):
        raise UserError(f"{folder} is no run folder: it has other files and no recipe.toml")
    task, config = ready(recipe, tell)
    settings = recipe.training
    batches = plan(task, settings)
    updates = settings.updates or batches.updates_in(settings.epochs or 1)
    begun = run.recipe_file.is_file()
    made_from = origin(task)
    if begun:
        run.check(recipe, made_from)
        results = run.results()
        if results is not None and results["updates_asked"] >= updates:
            tell(f"{folder} is finished after {results['updates']:,} updates; nothing to do")
            return Outcome(0, results)
    model = build(recipe, config)
    if task.initial is not None:
        tell(
            f"beginning with the {settings.init_weights} weights, the architecture and the vocabulary of {task.initial}"
        )
    with processes(settings), run.locked() if rank() == 0 else nullcontext():
        if not begun and rank() == 0:
            run.begin(recipe, made_from, threads=torch.get_num_threads(), processes=_world(), updates=updates)
        _together()
        return _train(recipe, run, task, model, batches, updates, partial(display, name=name), tell)


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


def origin(task: Task) -> dict[str, str]:
    """All that a run of the task is made from, with its checksums: the data, and the model it begins with."""
    return task.origin | initial_checksums(task.initial)


def _check_training(settings: Training, task: Task, config: SplitstepConfig) -> None:
    """Refuse what a model of the task cannot be trained with."""
    if settings.select not in task.reported:
        raise unknown("training.select", settings.select, task.reported)
    if config.adaptive_cutoffs is not None and settings.label_smoothing:
        raise UserError("training.label_smoothing needs all log-probabilities, which an adaptive softmax does not make")
    if config.reversible and settings.gradient_checkpointing:
        raise UserError("training.gradient_checkpointing has no part in a reversible model, which keeps no states")
    if config.reversible and settings.sharding != "none":
        raise UserError("training.sharding: a reversible model finds its weights whole; it is not sharded")


def all_ready(recipes: Iterable[Recipe]) -> None:
    """Refuse before the first of several runs what any of them would be refused for."""
    known: list[tuple[dict[str, Any], Task, SplitstepConfig]] = []
    for recipe in recipes:
        # What is read and built depends on all sections but training, and on what that begins with.
        told = recipe.settings() | {"training": recipe.training.init}
        same = [(task, config) for before, task, config in known if before == told]
        for task, config in same:
            _check_training(recipe.training, task, config)
        if not same:
            known.append((told, *ready(recipe)))


def _hardly_begun(folder: Path) -> bool:
    """Whether there is nothing but what a run writes before its recipe, which a crash can leave alone."""
    names = {path.name for path in folder.iterdir() if path.suffix != ".unfinished"}
    return names <= {".lock", "checkpoints", "environment.json"}


@dataclass(frozen=True)
class _Teller:
    """Says what happens on stderr, once whatever the number of processes."""

    name: str = ""

    def __call__(self, line: str) -> None:
        if rank() == 0:
            print(f"{self.name}: {line}" if self.name else line, file=sys.stderr, flush=True)


def _world() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def _together() -> None:
    if _world() > 1:
        torch.distributed.barrier()


def task_of(recipe: Recipe, say: Say = lambda line: None, folder: Path | None = None) -> Task:
    """The task of a recipe with its data, and the vocabulary of a model where a folder is given."""
    initial = initial_folder(recipe) if folder is None else None
    return task_class(recipe.task)(recipe.data, recipe.evaluation, folder=folder, initial=initial, say=say)


def _train(
    recipe: Recipe, run: Run, task: Task, model: Any, batches: Plan, updates: int, display: Opened, tell: Say
) -> Outcome:
    settings = recipe.training
    checkpoint = checkpoints.newest(run.checkpoints, tell, clear=rank() == 0)
    done = 0 if checkpoint is None else checkpoints.update_of(checkpoint)
    forget_peak_memory()
    counted = parameters(model)
    tell(f"{counted.total:,} parameters, {counted.body:,} of them in the layers; {updates:,} updates in {run.folder}")
    if checkpoint is not None:
        _resumed(run, settings, done, updates, model.config.hidden_size, tell)
    begun = time.monotonic()
    with Signals() as signals, display(updates) as shown:
        trainer = SplitstepTrainer(
            model,
            task=task,
            settings=settings,
            run=run,
            plan=batches,
            updates=updates,
            signals=signals,
            show=shown.update,
        )
        if trainer.pieces != settings.micro_batches:
            tell(f"every update is cut into {trainer.pieces} micro-batches for {_world()} processes; its size stays")
        stopped = checkpoint is not None and _stopped_early(checkpoint, settings)
        if done < updates and not stopped:
            trainer.train_from(checkpoint)
            if signals.received is not None and trainer.state.global_step < updates:
                tell(f"stopped by a signal after update {trainer.state.global_step:,}; the same command goes on")
                return Outcome(signals.exit_code)
    return Outcome(0, _finish(recipe, run, task, trainer, updates, tell, time.monotonic() - begun))


def _resumed(run: Run, settings: Training, done: int, updates: int, width: int, tell: Say) -> None:
    tell(f"going on from update {done:,}")
    environment = run.environment()
    if environment["threads"] != torch.get_num_threads():
        tell(
            f"begun with {environment['threads']} threads, going on with {torch.get_num_threads()}: sums of floats "
            "are taken in another order, so the last bits of the weights will differ"
        )
    before = run.recipe().training
    if (before.updates, before.epochs) != (settings.updates, settings.epochs):
        now = rate(settings, done, total=updates, width=width)
        tell(
            f"now {updates:,} updates are asked for; the schedule {settings.schedule!r} goes on at a rate of {now:.3g}"
        )
        if rank() == 0:
            run.results_file.unlink(missing_ok=True)
            run.write_recipe(run.recipe().model_copy(update={"training": settings}))


def _stopped_early(checkpoint: Path, settings: Training) -> bool:
    """Whether a run that was interrupted after its last evaluation had run out of patience."""
    from splitstep.training.trainer import since_best

    history = json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]
    return settings.patience is not None and since_best(history, settings.select) >= settings.patience


def _finish(
    recipe: Recipe, run: Run, task: Task, trainer: SplitstepTrainer, updates: int, tell: Say, seconds: float
) -> dict[str, Any]:
    """The final weights as a model folder, measured on every held-out split."""
    settings = recipe.training
    last = checkpoints.newest(run.checkpoints, tell, clear=False)
    assert last is not None
    state = json.loads((last / "trainer_state.json").read_text())
    trained = trainer.accelerator.unwrap_model(trainer.model)
    # A sharded model gives way to a whole one.
    model: Any = trained if settings.sharding == "none" else build(recipe, trained.config)
    model.to(trainer.args.device)
    model.load_state_dict(_final_weights(run, trainer, last, state), strict=False)
    model.tie_weights()
    if rank() == 0:
        _write_model(run, task, model)
    _together()
    predictor = trainer.predictor(model)
    measured = {}
    for split in (split for split in task.splits if split != "train"):
        tell(f"measuring the {settings.final} weights on {split}")
        measured[split] = task.measure(predictor, split)
    known = json.loads((last / "training.json").read_text())
    results = {
        "task": recipe.task,
        "metric": task.metric,
        "metrics": {split: result.metrics for split, result in measured.items()},
        "weights": settings.final,
        "updates": checkpoints.update_of(last),
        "updates_asked": updates,
        "best_update": state["best_global_step"],
        "seed": settings.seed,
        "parameters": vars(parameters(model)) | {"total": parameters(model).total},
        "flops": known["items"] * training_flops(recipe, task, model.config),
        task.unit: known["items"],
        "seconds": known["seconds"],
        f"{task.unit}_per_second": known["items"] / max(known["seconds"], 1e-9),
        "evaluations_per_layer": account(model.config)["evaluations_per_layer"],
        "peak_memory_bytes": peak_memory(),
        "latency_seconds": latency(predictor, task),
    }
    if rank() == 0:
        for split, result in measured.items():
            rows = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in result.examples)
            checkpoints.write_atomically(run.folder / f"predictions-{split}.jsonl", rows)
        checkpoints.write_atomically(run.results_file, json.dumps(results, indent=2, ensure_ascii=False))
    _together()
    tell(f"finished after {clock(known['seconds'])} of training: {run.results_file}")
    return results


def training_flops(recipe: Recipe, task: Task, config: SplitstepConfig) -> int:
    """Floating-point operations of training, a unit: forwards, backwards, and what the way back evaluates again."""
    settings = recipe.training
    updates = plan(task, settings).updates_in(1)
    sequences = max(round(len(task.lengths("train")) / updates / settings.micro_batches), 1)
    passes = 4 if settings.gradient_checkpointing or config.reversible else 3
    return passes * task.flops_per_unit(config, sequences=sequences)


def peak_memory() -> int:
    """The most bytes this process held at a time."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status")
    if status.is_file():
        return next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if "VmHWM" in line)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def forget_peak_memory() -> None:
    """Begin to count anew, so that a run in a process that made others before reports its own."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    elif Path("/proc/self/clear_refs").is_file():
        Path("/proc/self/clear_refs").write_text("5")


def latency(predictor: Predictor, task: Task) -> float:
    """Seconds of a forward pass over one validation example, the median of several."""
    batch = predictor.to_device(task.batch("valid", np.zeros(1, dtype=np.int64)))
    batch = {name: tensor for name, tensor in batch.items() if not name.startswith("num_")}
    times = []
    with predictor:
        for _ in range(7):
            begun = time.perf_counter()
            predictor.model(**batch)
            if predictor.device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begun)
    return float(np.median(times))


def _final_weights(run: Run, trainer: SplitstepTrainer, last: Path, state: dict[str, Any]) -> dict[str, Any]:
    from safetensors.torch import load_file

    settings = trainer.settings
    if settings.final == "ema":
        return load_file(last / EMA)
    if settings.final == "average":
        return checkpoints.averaged(checkpoints.last(run.checkpoints, settings.average, trainer.regular))
    if settings.final == "best" and state["best_global_step"]:
        best = run.checkpoints / f"{checkpoints.PREFIX}{state['best_global_step']}"
        wrong = checkpoints.flaw(best)
        if wrong is not None:
            raise UserError(f"the best checkpoint {best} cannot be used: {wrong}")
        return load_file(best / "model.safetensors")
    return load_file(last / "model.safetensors")


def _write_model(run: Run, task: Task, model: Any) -> None:
    unfinished = run.folder / ".model.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished)
    task.save_processor(unfinished)
    shutil.rmtree(run.model, ignore_errors=True)
    unfinished.rename(run.model)


def check(recipe: Recipe, *, say: Say | None = None) -> dict[str, Any]:
    """What a long run will meet, met now: the recipe, the data, one update at full size, one evaluation, memory."""
    task, _ = ready(recipe, say or _Teller())
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


@contextmanager
def _trial(recipe: Recipe, task: Task, *, updates: int = 1) -> "Iterator[tuple[SplitstepTrainer, int]]":
    """A trainer of a few updates that leaves nothing on the disk, and how many the run would have."""
    import tempfile

    batches = plan(task, recipe.training)
    whole = recipe.training.updates or batches.updates_in(recipe.training.epochs or 1)
    # Workers are left out: to start them takes longer than an update.
    short = {"evaluate_every": 10**9, "save_every": 10**9, "ema": None, "workers": 0}
    with tempfile.TemporaryDirectory() as scratch:
        yield (
            SplitstepTrainer(
                build(recipe, configuration(recipe, task)),
                task=task,
                settings=recipe.training.model_copy(update=short),
                run=Run(Path(scratch, "none")),
                plan=batches,
                updates=updates,
                signals=Signals(),
                show=lambda done, entry: None,
            ),
            whole,
        )


@freed_memory("kept")
def paces(recipes: Sequence[Recipe], *, threads: int | None = None, repeats: int = 9) -> list[float]:
    """Seconds that an update by each recipe takes: medians over the same updates, measured in turns."""
    seconds: list[list[float]] = [[] for _ in recipes]
    with ExitStack() as trials:
        trials.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(threads or torch.get_num_threads())
        trainers = [trials.enter_context(_trial(recipe, task_of(recipe), updates=repeats + 1))[0] for recipe in recipes]
        updates = [trainer.trial_updates() for trainer in trainers]
        for _ in range(repeats + 1):
            for own, measured in zip(updates, seconds, strict=True):
                begun = time.monotonic()
                next(own)
                measured.append(time.monotonic() - begun)
    return [median(measured[1:]) for measured in seconds]  # the first is warm-up


def evaluate(run: Run, recipe: Recipe, split: str, *, say: Say | None = None) -> dict[str, Any]:
    """The metrics of a finished run's model on a split."""
    task, predictor = loaded(run, recipe, say=say)
    if split not in task.splits:
        raise UserError(f"unknown split {split!r}; choose from {', '.join(task.splits)}")
    return {"task": recipe.task, "split": split, "metrics": task.measure(predictor, split).metrics}


def loaded(run: Run, recipe: Recipe, *, say: Say | None = None) -> tuple[Task, Predictor]:
    """The task and the model of a finished run."""
    if not run.model.is_dir():
        raise UserError(f"{run.folder} has no model yet; the same `splitstep train` command finishes it")
    task = task_of(recipe, say or _Teller(), folder=run.model)
    try:
        model = task.model().from_pretrained(run.model)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{run.model} is no whole model: {str(error).splitlines()[0]}") from None
    told = task.settings()
    words, room = told.get("vocab_size", 0), model.config.vocab_size
    spare = "vocab_size" in recipe.model or recipe.training.init is not None
    if words > room or (0 < words < room and not spare):
        raise UserError(
            f"the vocabulary of {run.model} has {words} tokens and the model {room}: it belongs to another model"
        )
    for contradiction in contradictions(model.config, told):
        raise UserError(f"the model of {run.model} is not one for these data: {contradiction}")
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    autocast = torch.bfloat16 if recipe.training.precision == "bf16" else None
    return task, Predictor(model.to(device), autocast=autocast)
