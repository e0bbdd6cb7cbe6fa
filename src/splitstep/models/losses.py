"""Losses as Hugging Face's Trainer expects them of a model.

Each is a sum over items divided by `num_items`, the labels of a whole update that are not -100, as the Trainer counts
them: so the micro-batches of an update add up to its mean. Without `num_items` it is the mean of the batch.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from splitstep.models.configuration import SplitstepConfig
from splitstep.models.labels import IGNORED
from splitstep.solver.errors import UserError

# How many logits the chunked loss holds at a time: 64 MB in float32. Against it, an eighth takes 1.15x to 1.6x the time
# with vocabularies from 33,000 to 100,000 words, a half up to 1.1x, and twice as many about the same.
CHUNK = 2**24


def token_loss(
    logits: Tensor, labels: Tensor, num_items: Tensor | int | None = None, label_smoothing: float = 0.0
) -> Tensor:
    """Cross-entropy a token: (1 - eps) * -log p_y + eps / V * sum_v -log p_v, with eps the label smoothing."""
    flat, targets = precise(logits.flatten(0, -2)), labels.flatten().to(logits.device)
    total = nn.functional.cross_entropy(
        flat, targets, ignore_index=IGNORED, reduction="sum", label_smoothing=label_smoothing
    )
    return total / items(targets != IGNORED, num_items)


def chunked_token_loss(
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    num_items: Tensor | int | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """The `token_loss` of a linear layer's logits, of which only a chunk exists at a time.

    Its gradient is made on the way forward, chunk by chunk; places whose label is ignored cost nothing.
    """
    labels = labels.to(states.device)
    counted = labels != IGNORED
    rows = (states[counted], weight, bias, labels[counted])
    return _ChunkedCrossEntropy.apply(*rows, label_smoothing, torch.is_grad_enabled()) / items(counted, num_items)


@torch.no_grad()
def token_losses(logits: Callable[[Tensor], Tensor], states: Tensor, labels: Tensor, *, width: int) -> Tensor:
    """The loss of each row of states, of whose `width` logits only a chunk of the rows has its own at a time."""
    rows = max(CHUNK // 4 // width, 1)  # chunks that malloc takes from its heap: larger ones cost a page fault a page
    pairs = zip(states.split(rows), labels.split(rows), strict=True)
    return torch.cat([nn.functional.cross_entropy(precise(logits(x)), y, reduction="none") for x, y in pairs])


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The sum of the cross-entropies of all rows; `splitstep bench losses` holds it against all logits at once."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        smoothing: float,
        trained: bool,
    ) -> Tensor:
        dtype, exact = _product_dtype(states), precise(states[:0]).dtype
        x, w = states.to(dtype), weight.to(dtype)
        for_states, for_weight, for_bias = (trained and needed for needed in ctx.needs_input_grad[:3])
        by_states = torch.empty_like(x) if for_states else None
        by_weight = torch.zeros_like(w, dtype=exact) if for_weight else None
        by_bias = torch.zeros_like(bias, dtype=exact) if bias is not None and for_bias else None
        total = torch.zeros((), dtype=exact, device=x.device)
        rows = max(CHUNK // len(w), 1)
        room = torch.empty(min(rows, len(x)), len(w), dtype=dtype, device=x.device)
        with torch.autocast(x.device.type, enabled=False):
            for start in range(0, len(x), rows):
                here = slice(start, start + rows)
                z = precise(torch.mm(x[here], w.T, out=room[: len(x[here])]))
                if bias is not None:
                    z += bias
                total += _consumed(z, labels[here], smoothing)
                force = z.to(dtype)
                if by_states is not None:
                    torch.mm(force, w, out=by_states[here])
                if by_weight is not None:
                    _add_product(by_weight, force.T, x[here])
                if by_bias is not None:
                    by_bias += z.sum(0)
        pairs = ((states, by_states), (weight, by_weight), (bias, by_bias))
        ctx.save_for_backward(*(None if g is None or t is None else g.to(t.dtype) for t, g in pairs))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradients = (None if gradient is None else gradient * upstream for gradient in ctx.saved_tensors)
        return (*gradients, None, None, None)


def _consumed(z: Tensor, labels: Tensor, eps: float) -> Tensor:
    """The summed loss of a chunk of logits, which become the gradient in place."""
    # loss = log sum_v exp z_v - (1 - eps) z_y - eps / V sum_v z_v
    # d loss / d z_v = p_v - (1 - eps) [v = y] - eps / V
    y = labels.unsqueeze(-1)
    top = z.amax(-1)
    losses = top - (1 - eps) * z.gather(-1, y).squeeze(-1)
    if eps:
        losses -= eps * z.mean(-1)
    torch.softmax(z, -1, out=z)
    losses -= z.amax(-1).log()  # log sum_v exp z_v is the highest logit less the log of its probability
    z.scatter_add_(-1, y, torch.full_like(y, eps - 1, dtype=z.dtype))
    if eps:
        z -= eps / z.shape[-1]
    return losses.sum()


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:  # a product in low precision joins a sum in float32
        total += left @ right


def _product_dtype(x: Tensor) -> torch.dtype:
    """The precision in which autocast would multiply."""
    device = x.device.type
    mixed = torch.is_autocast_enabled(device) and x.dtype != torch.float64
    return torch.get_autocast_dtype(device) if mixed else x.dtype


def precise(x: Tensor) -> Tensor:
    """In float32, or float64 if it came so: the precision of a softmax."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def items(counted: Tensor, num_items: Tensor | int | None) -> Tensor | int:
    """The items of the update, or of this batch where they are not given."""
    return counted.sum() if num_items is None else num_items


def share(counted: Tensor, num_items: Tensor | int | None) -> Tensor | float:
    """What part of its update a batch with these items is."""
    return 1.0 if num_items is None else counted.sum() / num_items


def label_loss(
    logits: Tensor,
    labels: Tensor,
    config: SplitstepConfig,
    num_items: Tensor | int | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Squared error for one label or 'regression', cross-entropy for one of many, binary for several at once.

    Where the problem is 'single_label_classification', rows of probabilities as labels are soft targets; each of their
    entries is an item, as in the Trainer's count.
    """
    problem = config.problem_type or _problem(logits, labels)
    if label_smoothing and problem != "single_label_classification":
        raise UserError(f"label smoothing is for one label of many, not for problem_type {problem!r}")
    losses = LABEL_LOSSES[problem](precise(logits), labels, label_smoothing)
    counted = labels != IGNORED
    return losses[counted.view_as(losses)].sum() / items(counted, num_items)


def _problem(logits: Tensor, labels: Tensor) -> str:
    if logits.shape[-1] == 1:
        return "regression"
    return "multi_label_classification" if labels.is_floating_point() else "single_label_classification"


def _squared_errors(logits: Tensor, labels: Tensor, _: float) -> Tensor:
    return (logits.view_as(labels) - labels) ** 2


def _binary_cross_entropies(logits: Tensor, labels: Tensor, _: float) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="none")


def _cross_entropies(logits: Tensor, labels: Tensor, eps: float) -> Tensor:
    if labels.is_floating_point():
        return _soft_cross_entropies(logits, labels, eps)
    count = logits.shape[-1]
    wrong = labels[(labels != IGNORED) & ((labels < 0) | (labels >= count))]
    if wrong.numel():
        raise UserError(f"label {int(wrong[0])} is none of the {count} labels 0 to {count - 1}")
    return nn.functional.cross_entropy(
        logits, labels.view(-1), ignore_index=IGNORED, reduction="none", label_smoothing=eps
    )


def _soft_cross_entropies(logits: Tensor, labels: Tensor, eps: float) -> Tensor:
    """Shares of each entry in the cross-entropy of its row, such that the mean over entries is that over rows."""
    if labels.shape != logits.shape:
        raise UserError(
            f"soft targets have a probability for each label, {tuple(logits.shape)}; got {tuple(labels.shape)}"
        )
    count = logits.shape[-1]
    return -count * ((1 - eps) * labels + eps / count) * logits.log_softmax(-1)


# The loss of each item by Hugging Face's problem_type.
LABEL_LOSSES: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "regression": _squared_errors,
    "multi_label_classification": _binary_cross_entropies,
    "single_label_classification": _cross_entropies,
}
