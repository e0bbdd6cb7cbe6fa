"""Which attention kernel trains faster on this machine: the measurement behind the choice in fields/attention.py.

    python benchmarks/attention.py [--json]

One process, kernels interleaved, medians of forward + backward, as ratios to SDPA (higher is faster).
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable

import torch

from splitstep.fields.attention import attend
from splitstep.fields.evaluation import Sight
from splitstep.fields.noise import Noise

BATCH_TOKENS, HEADS, HEAD_DIM = 2048, 8, 64
LENGTHS = (64, 128, 256, 512, 1024, 2048)
KERNELS = ("sdpa", "eager")


def training_step(kernel: str, length: int, dtype: torch.dtype) -> Callable[[], None]:
    shape = (max(BATCH_TOKENS // length, 1), HEADS, length, HEAD_DIM)
    query, key, value = (torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3))
    force = torch.randn(shape, dtype=dtype)
    noise = Noise(training=True)

    def run() -> None:
        out = attend(query, key, value, sight=Sight(kernel=kernel), noise=noise)
        torch.autograd.grad(out, (query, key, value), force)

    return run


def interleaved_medians(runs: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Median seconds of each, measured in turns so that a busy machine disturbs all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}  # the first is warm-up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    cases = []
    for dtype in (torch.float32, torch.bfloat16):
        for length in LENGTHS:
            runs = {kernel: training_step(kernel, length, dtype) for kernel in KERNELS}
            medians = interleaved_medians(runs, options.repeats)
            for kernel, median in medians.items():
                cases.append(
                    {
                        "case": f"{length} keys",
                        "contestant": kernel,
                        "median_seconds": median,
                        "ratio": medians["sdpa"] / median,
                        "precision": str(dtype).removeprefix("torch."),
                    }
                )
    machine = {"processor": platform.processor(), "threads": torch.get_num_threads(), "torch": torch.__version__}
    if options.json:
        print(json.dumps({"machine": machine, "cases": cases}, indent=2))
        return
    print(machine)
    for case in cases:
        print(f"{case['precision']:9} {case['case']:10} {case['contestant']:9} {case['ratio']:.2f}x sdpa")


if __name__ == "__main__":
    main()
