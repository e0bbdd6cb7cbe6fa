"""Attention evolved in time against attention computed in every layer: a training step of six layers."""

from collections.abc import Iterator

import torch

from splitstep.bench import Case, Run, precisions, race
from splitstep.fields.evaluation import Sight
from splitstep.models.configuration import SplitstepConfig
from splitstep.models.trunk import Layer, Stack
from splitstep.solver.schemes import Scheme
from splitstep.solver.splittings import splitting
from splitstep.solver.tableaus import TABLEAUS

TOKENS, LAYERS, HEAD = 4096, 6, 64
LENGTHS = {256: (512, 1024, 2048, 4096), 512: (512, 1024)}  # by width
FULL = {"full attention, sdpa": "sdpa", "full attention, eager": "eager"}
EVOLVED = {"evolved, literal": "eager", "evolved, fast": "auto"}


def cases(*, repeats: int) -> Iterator[Case]:
    """Forward and backward; the ratio is to the better kernel of full attention with a full feed-forward network."""
    for precision, dtype in precisions().items():
        for size, lengths in LENGTHS.items():
            for length in lengths:
                for title, runs in _works(size, length, dtype):
                    yield from race(
                        title, runs, reference=tuple(FULL), precision=precision, repeats=repeats, memory=True
                    )


def _works(size: int, length: int, dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Run]]]:
    def step(attention: str, feed_forward: str | None, kernel: str) -> Run:
        return _step(attention, feed_forward, kernel, size, length, dtype)

    alone = {name: step("full", None, kernel) for name, kernel in FULL.items()}
    alone |= {name: step("evolved", None, kernel) for name, kernel in EVOLVED.items()}
    yield f"attention alone, d {size}, n {length}", alone
    whole = {name: step("full", "full", kernel) for name, kernel in FULL.items()}
    for network in ("full", "random", "rotated"):
        whole[f"evolved, fast, {network} feed-forward"] = step("evolved", network, "auto")
    yield f"with feed-forward, d {size}, n {length}", whole


def _step(attention: str, feed_forward: str | None, kernel: str, size: int, length: int, dtype: torch.dtype) -> Run:
    config = SplitstepConfig(
        hidden_size=size,
        num_attention_heads=size // HEAD,
        intermediate_size=4 * size,
        num_hidden_layers=LAYERS,
        attention=attention,
        feed_forward=feed_forward or "full",
        time_keys=attention != "evolved",
    )
    stack = Stack(config)
    with torch.no_grad():
        for tensor in (*stack.parameters(), *stack.buffers()):
            tensor.normal_(std=0.02)
    if feed_forward is None:
        _leave_attention_alone(stack)
    stack = stack.to(dtype).train()
    x = torch.randn(max(TOKENS // length, 1), length, size, dtype=dtype, requires_grad=True)
    force = torch.randn_like(x)
    trained = [x, *(p for name, p in stack.named_parameters() if feed_forward or "convection" not in name)]

    def run() -> None:
        torch.autograd.grad(stack(x, interaction=Sight(kernel=kernel)), trained, force)

    return run


def _leave_attention_alone(stack: Stack) -> None:
    alone = splitting("1 interaction")
    stack.scheme = Scheme(alone, TABLEAUS["euler"])
    for layer in stack.layers:
        assert isinstance(layer, Layer)
        layer.splitting = alone
