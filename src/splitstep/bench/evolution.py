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

TOKENS, LAYERS, SIZE, HEADS = 4096, 6, 256, 4
LENGTHS = (512, 1024, 2048, 4096)
FULL = {"full attention, sdpa": "sdpa", "full attention, eager": "eager"}
EVOLVED = {"evolved, literal": "eager", "evolved, fast": "auto"}


def cases(*, repeats: int) -> Iterator[Case]:
    """Forward and backward; the ratio is to the better kernel of full attention with a full feed-forward network."""
    for precision, dtype in precisions().items():
        for length in LENGTHS:
            alone = {name: _step("full", None, kernel, length, dtype) for name, kernel in FULL.items()}
            alone |= {name: _step("evolved", None, kernel, length, dtype) for name, kernel in EVOLVED.items()}
            reference = tuple(FULL)
            title = f"attention alone, {length} tokens"
            yield from race(title, alone, reference=reference, precision=precision, repeats=repeats)
            whole = {name: _step("full", "full", kernel, length, dtype) for name, kernel in FULL.items()}
            for network in ("full", "random", "rotated"):
                whole[f"evolved, fast, {network} feed-forward"] = _step("evolved", network, "auto", length, dtype)
            title = f"with feed-forward, {length} tokens"
            yield from race(title, whole, reference=reference, precision=precision, repeats=repeats)


def _step(attention: str, feed_forward: str | None, kernel: str, length: int, dtype: torch.dtype) -> Run:
    config = SplitstepConfig(
        hidden_size=SIZE,
        num_attention_heads=HEADS,
        intermediate_size=4 * SIZE,
        num_hidden_layers=LAYERS,
        attention=attention,
        feed_forward=feed_forward or "full",
        time_keys=False,
    )
    stack = Stack(config)
    with torch.no_grad():
        for tensor in (*stack.parameters(), *stack.buffers()):
            tensor.normal_(std=0.02)
    if feed_forward is None:
        _leave_attention_alone(stack)
    stack = stack.to(dtype).train()
    x = torch.randn(max(TOKENS // length, 1), length, SIZE, dtype=dtype, requires_grad=True)
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
