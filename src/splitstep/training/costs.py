"""What a run costs: operations, memory, time of an answer."""

import sys
import time
from pathlib import Path
from statistics import median

import torch

from splitstep.models.configuration import SplitstepConfig
from splitstep.recipe import Recipe
from splitstep.tasks.base import Task
from splitstep.tasks.memory import freed_memory
from splitstep.tasks.prediction import Predictor
from splitstep.training.ready import plan


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

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def forget_peak_memory() -> None:
    """Begin to count anew, so that a run in a process that made others before reports its own."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    elif Path("/proc/self/clear_refs").is_file():
        Path("/proc/self/clear_refs").write_text("5")


def latency(predictor: Predictor, task: Task, *, repeats: int = 7) -> float:
    """Seconds until the task answers one example, the median of several."""
    times = []
    with freed_memory("returned"):  # as it is when a model is used, and changed by no answer
        for _ in range(repeats + 1):
            begun = time.perf_counter()
            task.answer(predictor)
            if predictor.device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begun)
    return median(times[1:])  # the first is warm-up
