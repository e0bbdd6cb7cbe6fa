"""The loss of an output layer chunk by chunk against all logits at once: the measurement behind models/losses.py."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from splitstep.bench import Case, Run, precisions, race
from splitstep.models.losses import chunked_token_loss, token_loss

TOKENS = (4, 512)
SIZES = ((8000, 256), (33000, 128), (33000, 512), (100000, 256))


def cases(*, repeats: int) -> Iterator[Case]:
    """Forward and backward of the output layer and its loss."""
    for precision, dtype in precisions().items():
        for vocabulary, size in SIZES:
            runs = {name: _step(loss, vocabulary, size, dtype) for name, loss in LOSSES.items()}
            title = f"{vocabulary} words, width {size}"
            yield from race(title, runs, reference=("all logits",), precision=precision, repeats=repeats)


def _plain(layer: nn.Linear, states: Tensor, labels: Tensor) -> Tensor:
    return token_loss(layer(states), labels)


def _chunked(layer: nn.Linear, states: Tensor, labels: Tensor) -> Tensor:
    return chunked_token_loss(states, layer.weight, layer.bias, labels)


LOSSES: dict[str, Callable[[nn.Linear, Tensor, Tensor], Tensor]] = {"all logits": _plain, "in chunks": _chunked}


def _step(loss: Callable[[nn.Linear, Tensor, Tensor], Tensor], vocabulary: int, size: int, dtype: torch.dtype) -> Run:
    layer = nn.Linear(size, vocabulary, bias=False, dtype=dtype)
    states = torch.randn(*TOKENS, size, dtype=dtype, requires_grad=True)
    labels = torch.randint(vocabulary, TOKENS)

    def run() -> None:
        torch.autograd.grad(loss(layer, states, labels), (states, layer.weight))

    return run
