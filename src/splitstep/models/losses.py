"""Losses as Hugging Face's Trainer expects them of a model."""

from torch import Tensor, nn

from splitstep.models.configuration import SplitstepConfig
from splitstep.solver.errors import UserError

IGNORED = -100  # the label that no loss counts


def token_loss(logits: Tensor, labels: Tensor, num_items: Tensor | int | None = None) -> Tensor:
    """Cross-entropy a token. `num_items` is the number of tokens of the whole update, under accumulation."""
    flat, targets = logits.flatten(0, -2).float(), labels.flatten().to(logits.device)
    if num_items is None:
        return nn.functional.cross_entropy(flat, targets, ignore_index=IGNORED)
    total = nn.functional.cross_entropy(flat, targets, ignore_index=IGNORED, reduction="sum")
    return total / num_items


def label_loss(logits: Tensor, labels: Tensor, config: SplitstepConfig) -> Tensor:
    """Squared error for one label or 'regression', cross-entropy for one of many, binary for several at once."""
    problem = config.problem_type
    if problem is None:
        if logits.shape[-1] == 1:
            problem = "regression"
        else:
            problem = "multi_label_classification" if labels.is_floating_point() else "single_label_classification"
    logits = logits.float()
    if problem == "regression":
        if logits.shape[-1] == 1:
            logits, labels = logits.squeeze(-1), labels.view(-1)
        return nn.functional.mse_loss(logits, labels.to(logits.dtype))
    if problem == "multi_label_classification":
        return nn.functional.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))
    if labels.numel() and int(labels.max()) >= logits.shape[-1]:
        raise UserError(
            f"label {int(labels.max())} is none of the {logits.shape[-1]} labels 0 to {logits.shape[-1] - 1}"
        )
    return nn.functional.cross_entropy(logits, labels.view(-1))
