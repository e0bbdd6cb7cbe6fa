"""Speed and memory side by side: one process, contestants in turns, medians, as ratios."""

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate
from typing import Any

import torch

from splitstep.tasks.memory import freed_memory

Run = Callable[[], None]


@dataclass(frozen=True)
class Missing:
    """A contestant that cannot take part: its package is not installed."""

    package: str


@dataclass(frozen=True)
class Case:
    """One contestant on one piece of work; its ratio is how many times faster than the reference it is.

    `spread` is the interquartile range of the measurements, as a share of their median; `share_of_peak` how near the
    contestant comes to the machine's own matrix product, measured in the same turns; `peak_bytes` the most that tensors
    made during the work held at a time. A contestant whose package is not installed is `missing`, and not measured.
    """

    case: str
    contestant: str
    median_seconds: float | None
    ratio: float | None
    precision: str
    spread: float | None = None
    share_of_peak: float | None = None
    peak_bytes: int | None = None
    missing: str | None = None

    def row(self) -> dict[str, Any]:
        """The case as a row of the JSON report."""
        return asdict(self)


def race(
    case: str,
    runs: Mapping[str, Run | Missing],
    *,
    reference: tuple[str, ...],
    precision: str,
    repeats: int,
    flops: Mapping[str, float] | None = None,
    memory: bool = False,
) -> Iterator[Case]:
    """Each run's median, measured in turns so that a busy machine disturbs all alike.

    The ratio is to the fastest of the reference contestants. With the `flops` of each, a matrix product takes
    part too, and the share of its speed is reported. Freed memory is kept for all alike, as our training does it.
    """
    able = {name: run for name, run in runs.items() if not isinstance(run, Missing)}
    seconds: dict[str, list[float]] = {name: [] for name in able}
    peaks = []
    product = _product(precision) if flops is not None else None
    with freed_memory("kept"):
        for _ in range(repeats + 1):
            if product is not None:
                peaks.append(PRODUCT_FLOPS / _timed(product))
            for name, run in able.items():
                seconds[name].append(_timed(run))
    measured = {name: values[1:] for name, values in seconds.items()}  # the first is warm-up
    medians = {name: statistics.median(values) for name, values in measured.items()}
    best = min((medians[name] for name in reference if name in medians), default=None)
    peak = statistics.median(peaks[1:]) if peaks else None
    for name, contestant in runs.items():
        if isinstance(contestant, Missing):
            yield Case(case, name, None, None, precision, missing=contestant.package)
            continue
        median = medians[name]
        yield Case(
            case,
            name,
            median,
            best / median if best else None,
            precision,
            spread=_spread(measured[name]),
            share_of_peak=flops[name] / median / peak if flops and peak and name in flops else None,
            peak_bytes=peak_bytes(contestant) if memory else None,
        )


def _timed(run: Run) -> float:
    """Seconds; with one thread those of the processor, which others at work on the machine disturb less."""
    clock = _processor_seconds if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    run()
    return clock() - start


def _processor_seconds() -> float:
    """Of this process and of those it has waited for."""
    used = os.times()
    return time.process_time() + used.children_user + used.children_system


def peak_bytes(run: Run) -> int:
    """The most bytes that tensors made in the run held at a time, by the allocator's own record; on CPU."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # two lines on stderr otherwise
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    assert profile.profiler is not None
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(accumulate(changes), default=0)


def _spread(values: list[float]) -> float:
    if len(values) < 4:
        return (max(values) - min(values)) / statistics.median(values)
    low, _, high = statistics.quantiles(values, n=4)
    return (high - low) / statistics.median(values)


SIDE = 1024
PRODUCT_FLOPS = 8 * 2.0 * SIDE**3


def _product(precision: str) -> Run:
    a, b = (torch.randn(SIDE, SIDE, dtype=getattr(torch, precision)) for _ in range(2))

    def run() -> None:
        for _ in range(8):
            torch.mm(a, b)

    return run


def precisions() -> dict[str, torch.dtype]:
    """The precisions that this machine's processor multiplies natively."""
    able = torch.cpu.get_capabilities()
    native = able.get("avx512_bf16") or able.get("amx_bf16")
    return {"float32": torch.float32} | ({"bfloat16": torch.bfloat16} if native else {})


PEERS = ("transformers", "x-transformers", "ctranslate2")


def _installed(name: str) -> bool:
    try:
        return bool(version(name))
    except PackageNotFoundError:
        return False


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "date": date.today().isoformat(),
        "processor": torch.cpu.get_capabilities().get("cpu_name") or platform.processor(),
        "threads": torch.get_num_threads(),
        "seconds": "of the processor" if torch.get_num_threads() == 1 else "of the clock",
        "torch": torch.__version__,
        **{name: version(name) for name in PEERS if _installed(name)},
        "precisions": list(precisions()),
    }
