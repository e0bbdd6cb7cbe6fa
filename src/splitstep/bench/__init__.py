"""Speed and memory side by side: one process, contestants in turns, medians, as ratios."""

import platform
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

Run = Callable[[], None]


@dataclass(frozen=True)
class Case:
    """One contestant on one piece of work; its ratio is how many times faster than the reference it is."""

    case: str
    contestant: str
    median_seconds: float
    ratio: float
    precision: str

    def row(self) -> dict[str, Any]:
        """The case as a row of the JSON report."""
        return asdict(self)


def race(
    case: str, runs: Mapping[str, Run], *, reference: tuple[str, ...], precision: str, repeats: int
) -> Iterator[Case]:
    """Each run's median, measured in turns so that a busy machine disturbs all alike.

    The ratio is to the fastest of the reference contestants.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}  # the first is warm-up
    best = min(medians[name] for name in reference)
    for name, median in medians.items():
        yield Case(case, name, median, best / median, precision)


def precisions() -> dict[str, torch.dtype]:
    """The precisions that this machine multiplies natively."""
    able = torch.cpu.get_capabilities()
    native = torch.cuda.is_available() or able.get("avx512_bf16") or able.get("amx_bf16")
    return {"float32": torch.float32} | ({"bfloat16": torch.bfloat16} if native else {})


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "processor": torch.cpu.get_capabilities().get("cpu_name") or platform.processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "precisions": list(precisions()),
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
