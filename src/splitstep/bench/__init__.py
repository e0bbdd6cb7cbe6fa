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
class Missing:
    """A contestant that cannot take part: its package is not installed."""

    package: str


@dataclass(frozen=True)
class Case:
    """One contestant on one piece of work; its ratio is how many times faster than the reference it is.

    `spread` is the interquartile range of the measurements, as a share of their median; `share_of_peak` how near the
    contestant comes to the machine's own matrix product, measured in the same turns. A contestant whose package is not
    installed is `missing`, with nothing measured.
    """

    case: str
    contestant: str
    median_seconds: float | None
    ratio: float | None
    precision: str
    spread: float | None = None
    share_of_peak: float | None = None
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
    flops: float | None = None,
) -> Iterator[Case]:
    """Each run's median, measured in turns so that a busy machine disturbs all alike.

    The ratio is to the fastest of the reference contestants. With the `flops` of the work, a matrix product takes part
    too, and the share of its speed is reported.
    """
    able = {name: run for name, run in runs.items() if not isinstance(run, Missing)}
    seconds: dict[str, list[float]] = {name: [] for name in able}
    peaks = []
    product = _product(precision) if flops is not None else None
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
            share_of_peak=flops / median / peak if flops is not None and peak is not None else None,
        )


def _timed(run: Run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


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
