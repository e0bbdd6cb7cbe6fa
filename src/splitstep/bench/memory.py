"""The memory of depth: what a training step holds beside weights and gradients, by scheme, depth and way of saving."""

from collections.abc import Iterator
from typing import Any

import torch

from splitstep.bench import Case, Run, peak_bytes, race
from splitstep.models.presets import preset
from splitstep.models.trunk import Stack

SIZES: dict[str, Any] = {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024}
SHAPE = (8, 256)
REFERENCE = "12 layers, euler"
# name: (preset, layers, checkpointing by step, settings)
CONTESTANTS: dict[str, tuple[str, int, bool, dict[str, Any]]] = {
    REFERENCE: ("parallel", 12, False, {}),
    "12 layers, rk4": ("parallel-rk4", 12, False, {}),
    "12 layers, rk4, checkpointing": ("parallel-rk4", 12, True, {}),
    "48 layers, euler, checkpointing": ("parallel", 48, True, {}),
    "12 layers, euler, reversible": ("parallel", 12, False, {"reversible": True}),
    "48 layers, euler, reversible": ("parallel", 48, False, {"reversible": True}),
}


def cases(*, repeats: int) -> Iterator[Case]:
    """Forward and backward; gradients are taken out of the peak, weights were there before."""
    runs = {name: step(*contestant)[0] for name, contestant in CONTESTANTS.items()}
    gradients = {name: step(*contestant)[1] for name, contestant in CONTESTANTS.items()}
    for case in race("memory of depth", runs, reference=(REFERENCE,), precision="float32", repeats=repeats):
        row = case.row() | {"peak_bytes": peak_bytes(runs[case.contestant]) - gradients[case.contestant]}
        yield Case(**row)


def step(
    name: str,
    layers: int,
    checkpointing: bool,
    settings: dict[str, Any],
    *,
    sizes: dict[str, Any] = SIZES,
    shape: tuple[int, int] = SHAPE,
) -> tuple[Run, int]:
    """A training step, and the bytes of its gradients."""
    stack = Stack(preset(name, "encoder", vocab_size=2, num_hidden_layers=layers, **sizes, **settings)).train()
    stack.gradient_checkpointing = checkpointing
    x = torch.randn(*shape, sizes["hidden_size"], requires_grad=True)
    trained = [x, *stack.parameters()]

    def run() -> None:
        torch.autograd.grad(stack(x).square().mean(), trained)

    return run, sum(tensor.numel() * tensor.element_size() for tensor in trained)
