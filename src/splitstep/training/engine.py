"""From a recipe to a trained and measured model: train, evaluate."""

import json
import shutil
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from splitstep.data.batches import Plan
from splitstep.models.accounting import account, parameters
from splitstep.recipe import Recipe, Training
from splitstep.solver.errors import UserError
from splitstep.tasks.base import Task
from splitstep.tasks.memory import freed_memory
from splitstep.tasks.prediction import Predictor
from splitstep.training import checkpoints
from splitstep.training.costs import forget_peak_memory, latency, peak_memory, training_flops
from splitstep.training.processes import Teller, processes, rank, together, world
from splitstep.training.progress import Lines, Opened, Say, clock, progress
from splitstep.training.rates import rate
from splitstep.training.ready import build, contradictions, origin, plan, ready, task_of, updates_of
from splitstep.training.run import Run
from splitstep.training.signals import Signals
from splitstep.training.trainer import EMA, SplitstepTrainer, since_best


@dataclass(frozen=True)
class Outcome:
    """How a command ended: its exit code, and the results of a finished run."""

    code: int
    results: dict[str, Any] | None = None


@freed_memory("kept")
def train(
    recipe: Recipe, folder: Path, *, name: str = "", say: Say | None = None, display: Opened = progress
) -> Outcome:
    """Train a recipe in a folder, or go on with it; a finished run is left as it is."""
    tell = say or Teller(name)
    run = Run(folder)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file, not a folder")
    if folder.is_dir() and any(folder.iterdir()) and not run.recipe_file.is_file() and not _hardly_begun(folder):
        raise UserError(f"{folder} is no run folder: it has other files and no recipe.toml")
    task, config = ready(recipe, tell)
    settings = recipe.training
    batches = plan(task, settings)
    updates = updates_of(task, settings)
    made_from = origin(task)
    if run.recipe_file.is_file():
        run.check(recipe, made_from)
        results = run.results()
        if results is not None and results["updates_asked"] >= updates:
            tell(f"{folder} is finished after {results['updates']:,} updates; nothing to do")
            return Outcome(0, results)
    model = build(recipe, config)
    if task.initial is not None:
        new = " and ".join(task.model().of_labels)
        tell(
            f"beginning with the {settings.init_weights} weights, the architecture and the vocabulary of {task.initial}"
            + (f"; new: {new}" if new else "")
        )
    with processes(settings), run.locked() if rank() == 0 else nullcontext():
        checkpoint = checkpoints.newest(run.checkpoints, tell, clear=rank() == 0)
        if checkpoint is None and rank() == 0:
            if run.results_file.is_file():
                tell(f"{folder} has no checkpoint to go on from: it begins anew")
            run.begin(recipe, made_from, threads=torch.get_num_threads(), processes=world(), updates=updates)
        together()
        return _train(recipe, run, task, model, batches, updates, checkpoint, partial(display, name=name), tell)


def _hardly_begun(folder: Path) -> bool:
    """Whether there is nothing but what a run writes before its recipe, which a crash can leave alone."""
    names = {path.name for path in folder.iterdir() if path.suffix != ".unfinished"}
    return names <= {".lock", "checkpoints", "environment.json"}


def _train(
    recipe: Recipe,
    run: Run,
    task: Task,
    model: Any,
    batches: Plan,
    updates: int,
    checkpoint: Path | None,
    display: Opened,
    tell: Say,
) -> Outcome:
    settings = recipe.training
    done = 0 if checkpoint is None else checkpoints.update_of(checkpoint)
    forget_peak_memory()
    counted = parameters(model)
    tell(f"{counted.total:,} parameters, {counted.body:,} of them in the layers; {updates:,} updates in {run.folder}")
    if settings.warmup >= updates:
        end = rate(settings, updates, total=updates, width=model.config.hidden_size) / settings.learning_rate
        tell(f"the warm-up of {settings.warmup:,} updates is not over when the run is: its rate ends at {end:.0%}")
    if checkpoint is not None:
        if rank() == 0:
            run.goes_on(done, updates=updates)
        _resumed(run, settings, done, updates, model.config.hidden_size, tell)
    if settings.sharding != "none" and world() == 1:
        tell("training.sharding: there is one process, so the model stays whole")
    with Signals(told=rank() == 0) as signals, (display if rank() == 0 else Lines)(updates) as shown:
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
            tell(f"every update is cut into {trainer.pieces} micro-batches for {world()} processes; its size stays")
        stopped = checkpoint is not None and _stopped_early(checkpoint, settings)
        if done < updates and not stopped:
            trainer.train_from(checkpoint)
            if signals.received is not None and trainer.state.global_step < updates:
                tell(f"stopped by a signal after update {trainer.state.global_step:,}; the same command goes on")
                return Outcome(signals.exit_code)
    return Outcome(0, _finish(recipe, run, task, trainer, updates, tell))


def _resumed(run: Run, settings: Training, done: int, updates: int, width: int, tell: Say) -> None:
    tell(f"going on from update {done:,}")
    environment = run.environment()
    if environment["threads"] != torch.get_num_threads():
        tell(
            f"begun with {environment['threads']} threads, going on with {torch.get_num_threads()}: sums of floats "
            "are taken in another order, so the last bits of the weights will differ"
        )
    before = run.recipe().training
    if before.micro_batches != settings.micro_batches:
        tell(
            f"begun with {before.micro_batches} micro-batches, going on with {settings.micro_batches}: where there is "
            "dropout, other masks are drawn"
        )
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
    history = json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]
    return settings.patience is not None and since_best(history, settings.select) >= settings.patience


def _finish(recipe: Recipe, run: Run, task: Task, trainer: SplitstepTrainer, updates: int, tell: Say) -> dict[str, Any]:
    """The final weights as a model folder, measured on every held-out split."""
    settings = recipe.training
    last = checkpoints.newest(run.checkpoints, tell, clear=False)
    assert last is not None
    state = json.loads((last / "trainer_state.json").read_text())
    # What is reported is measured in float32, however it was trained: a pipeline knows of no other precision.
    trained = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
    # A sharded model gives way to a whole one.
    model: Any = trained if settings.sharding == "none" else build(recipe, trained.config)
    model.to(trainer.args.device)
    model.load_state_dict(_final_weights(run, trainer, last, state), strict=False)
    model.tie_weights()
    if rank() == 0:
        _write_model(run, task, model)
    together()
    predictor = Predictor(model, rank=rank(), world=world())
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
    together()
    tell(f"finished after {clock(known['seconds'])} of training: {run.results_file}")
    return results


def _final_weights(run: Run, trainer: SplitstepTrainer, last: Path, state: dict[str, Any]) -> dict[str, Any]:
    from safetensors.torch import load_file

    settings = trainer.settings
    if settings.final == "ema":
        return load_file(last / EMA)
    if settings.final == "average":
        chosen = checkpoints.last(run.checkpoints, settings.average, trainer.regular)
        return checkpoints.averaged([checkpoints.sound(path, "to average") for path in chosen])
    if settings.final == "best" and state["best_global_step"]:
        best = run.checkpoints / f"{checkpoints.PREFIX}{state['best_global_step']}"
        return load_file(checkpoints.sound(best, "that was best") / "model.safetensors")
    return load_file(last / "model.safetensors")


def _write_model(run: Run, task: Task, model: Any) -> None:
    unfinished = run.folder / ".model.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished)
    task.save_processor(unfinished)
    shutil.rmtree(run.model, ignore_errors=True)
    unfinished.rename(run.model)


def evaluate(run: Run, recipe: Recipe, split: str | None = None, *, say: Say | None = None) -> dict[str, Any]:
    """The metrics of a finished run's model on a split; without a name on test, or on valid where there is none."""
    task, predictor = loaded(run, recipe, say=say)
    split = split or task.measured_split
    if split not in task.splits:
        raise UserError(f"unknown split {split!r}; choose from {', '.join(task.splits)}")
    return {"task": recipe.task, "split": split, "metrics": task.measure(predictor, split).metrics}


def loaded(run: Run, recipe: Recipe, *, say: Say | None = None, alone: bool = False) -> tuple[Task, Predictor]:
    """The task and the model of a finished run, held against its data, or alone where they are not needed."""
    if not run.model.is_dir():
        raise UserError(f"{run.folder} has no model yet; the same `splitstep train` command finishes it")
    task = task_of(recipe, say or Teller(), folder=run.model)
    try:
        model = task.model().from_pretrained(run.model)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{run.model} is no whole model: {str(error).splitlines()[0]}") from None
    told = {} if alone else task.settings()
    words, room = told.get("vocab_size", 0), model.config.vocab_size
    spare = "vocab_size" in recipe.model or recipe.training.init is not None
    if words > room or (0 < words < room and not spare):
        raise UserError(
            f"the vocabulary of {run.model} has {words} tokens and the model {room}: it belongs to another model"
        )
    for contradiction in contradictions(model.config, told):
        raise UserError(f"the model of {run.model} is not one for these data: {contradiction}")
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    return task, Predictor(model.to(device))
