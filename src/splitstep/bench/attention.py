"""Which attention kernel trains faster on this machine: the measurement behind the choice in fields/attention.py."""

from collections.abc import Iterator

import torch

from splitstep.bench import Case, Run, precisions, race
from splitstep.fields.attention import attend
from splitstep.fields.evaluation import Sight
from splitstep.fields.noise import Noise

TOKENS, HEADS, HEAD_DIM = 2048, 8, 64
LENGTHS = (64, 128, 256, 512, 1024, 2048)


def cases(*, repeats: int) -> Iterator[Case]:
    """Forward and backward of explicit attention against torch's fused kernel."""
    for precision, dtype in precisions().items():
        for length in LENGTHS:
            runs = {kernel: _training_step(kernel, length, dtype) for kernel in ("sdpa", "eager")}
            yield from race(f"{length} keys", runs, reference=("sdpa",), precision=precision, repeats=repeats)


def _training_step(kernel: str, length: int, dtype: torch.dtype) -> Run:
    shape = (max(TOKENS // length, 1), HEADS, length, HEAD_DIM)
    query, key, value = (torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3))
    force = torch.randn(shape, dtype=dtype)
    noise = Noise(training=True)

    def run() -> None:
        out = attend(query, key, value, sight=Sight(kernel=kernel), noise=noise)
        torch.autograd.grad(out, (query, key, value), force)

    return run
