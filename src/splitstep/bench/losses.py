"""The loss of a vocabulary: all logits at once, in chunks, or in bands. The measurement behind models/losses.py.

Labels follow Zipf's law, as words do; the first band of an adaptive vocabulary is 7.5 % of it and the second 15 %, the
shares that Baevski & Auli (2019) chose for WikiText-103.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from splitstep.bench import Case, Run, precisions, race
from splitstep.models.adaptive import AdaptiveSoftmax
from splitstep.models.configuration import SplitstepConfig
from splitstep.models.losses import chunked_token_loss, token_loss

TOKENS = (4, 512)
SIZES = ((8000, 256), (33000, 128), (33000, 512), (100000, 256))
REFERENCE = "all logits"


def cases(*, repeats: int) -> Iterator[Case]:
    """Forward and backward of the output layer and its loss."""
    for precision, dtype in precisions().items():
        for vocabulary, size in SIZES:
            runs = {name: _step(loss, vocabulary, size, dtype) for name, loss in LOSSES.items()}
            title = f"{vocabulary} words, width {size}"
            yield from race(title, runs, reference=(REFERENCE,), precision=precision, repeats=repeats)


Loss = Callable[[Tensor, Tensor], Tensor]


def _all_logits(vocabulary: int, size: int) -> tuple[nn.Module, Loss]:
    layer = nn.Linear(size, vocabulary, bias=False)
    return layer, lambda states, labels: token_loss(layer(states), labels)


def _in_chunks(vocabulary: int, size: int) -> tuple[nn.Module, Loss]:
    layer = nn.Linear(size, vocabulary, bias=False)
    return layer, lambda states, labels: chunked_token_loss(states, layer.weight, None, labels)


def _in_bands(vocabulary: int, size: int) -> tuple[nn.Module, Loss]:
    cutoffs = [vocabulary * 3 // 40, vocabulary * 9 // 40]
    config = SplitstepConfig(kind="causal", vocab_size=vocabulary, hidden_size=size, adaptive_cutoffs=cutoffs)
    layer = AdaptiveSoftmax(config)
    return layer, layer.loss


LOSSES: dict[str, Callable[[int, int], tuple[nn.Module, Loss]]] = {
    REFERENCE: _all_logits,
    "in chunks": _in_chunks,
    "adaptive": _in_bands,
}


def _step(make: Callable[[int, int], tuple[nn.Module, Loss]], vocabulary: int, size: int, dtype: torch.dtype) -> Run:
    layer, loss = make(vocabulary, size)
    layer.to(dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=size**-0.5)
    states = torch.randn(*TOKENS, size, dtype=dtype, requires_grad=True)
    frequencies = 1 / torch.arange(1, vocabulary + 1)
    labels = frequencies.multinomial(TOKENS[0] * TOKENS[1], replacement=True).view(TOKENS)

    def run() -> None:
        torch.autograd.grad(loss(states, labels), (states, *layer.parameters()))

    return run
