"""A model at work on a split: batches of like length, shared among processes, results in the examples' order."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from splitstep.models.labels import IGNORED
from splitstep.solver.errors import UserError
from splitstep.tasks.base import Task
from splitstep.tasks.memory import freed_memory

Result = TypeVar("Result")


def tensors(batch: dict[str, NDArray[Any]]) -> dict[str, Tensor]:
    """A batch of arrays as torch takes it."""
    return {name: torch.as_tensor(array) for name, array in batch.items()}


class Predictor:
    """A model and the share of the work that this process has.

    `autocast` is the precision of its products while it is trained, None for float32.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        tokens: int = 8192,
        rank: int = 0,
        world: int = 1,
        autocast: torch.dtype | None = None,
    ) -> None:
        self.model, self.tokens, self.rank, self.world = model, tokens, rank, world
        self.device = next(model.parameters()).device
        self.autocast = autocast

    def shares(self, lengths: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        """The batches of this process: examples of like length, the longest first, at most so many tokens at a time."""
        order = np.argsort(-lengths, kind="stable")
        start, number = 0, 0
        while start < len(order):
            size = max(self.tokens // max(int(lengths[order[start]]), 1), 1)
            if number % self.world == self.rank:
                yield order[start : start + size]
            start, number = start + size, number + 1

    def to_device(self, batch: dict[str, NDArray[Any]]) -> dict[str, Tensor]:
        """The batch as tensors where the model is."""
        return {name: tensor.to(self.device) for name, tensor in tensors(batch).items()}

    def __enter__(self) -> "Predictor":
        self._was_training = self.model.training
        self.model.eval()
        self._contexts: list[AbstractContextManager[Any]] = [torch.no_grad(), freed_memory("returned")]
        if self.autocast is not None:
            self._contexts.append(torch.autocast(self.device.type, self.autocast))
        for context in self._contexts:
            context.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        for context in reversed(self._contexts):
            context.__exit__(None, None, None)
        self.model.train(self._was_training)

    @contextmanager
    def in_precision(self, name: str) -> Iterator[nn.Module]:
        """The model as it is, under autocast to bfloat16, or with linear layers in eight bits."""
        if name == "int8":
            yield self._int8
        elif name == "bfloat16":
            with torch.autocast(self.device.type, torch.bfloat16):
                yield self.model
        else:
            yield self.model

    @cached_property
    def _int8(self) -> nn.Module:
        from splitstep.models.quantized import quantized

        if self.device.type != "cpu":
            raise UserError("int8 linear layers run on CPU; choose evaluation.precision = 'bfloat16' here")
        return quantized(self.model)

    def mean_loss(self, task: Task, split: str) -> float:
        """The loss an item over the whole split, every example once."""
        total = torch.zeros(2, dtype=torch.float64)
        with self:
            for indices in self.shares(task.lengths(split)):
                batch = self.to_device(task.batch(split, indices))
                items = int(batch.pop("num_items"))
                loss = self.model(**batch, num_items_in_batch=1, **task.loss_options).loss
                total += torch.tensor([float(loss), items], dtype=torch.float64)
        loss, items = self.summed(total).tolist()
        return loss / items

    def logits(self, inputs: dict[str, NDArray[Any]]) -> NDArray[np.float64]:
        """What a classifier says of each example, a row each."""
        return self.model(**self.to_device(inputs)).logits.cpu().double().numpy()

    def token_losses(self, batch: dict[str, NDArray[Any]]) -> list[NDArray[np.float64]]:
        """The losses of the labelled tokens of a causal model, an array a sequence."""
        inputs = self.to_device({name: batch[name] for name in ("input_ids", "labels")})
        losses = self.model.token_losses(**inputs).cpu().double().numpy()  # type: ignore[operator]
        return np.split(losses, (batch["labels"][:, 1:] != IGNORED).sum(1).cumsum()[:-1])

    def summed(self, values: Tensor) -> Tensor:
        """The values added over all processes."""
        if self.world > 1:
            values = values.to(self.device)
            torch.distributed.all_reduce(values)
        return values.cpu()

    def gathered(self, results: dict[int, Result]) -> list[Result]:
        """The results of all processes in the order of the examples."""
        if self.world > 1:
            parts: list[Any] = [None] * self.world
            torch.distributed.all_gather_object(parts, results)
            results = {index: value for part in parts for index, value in part.items()}
        return [results[index] for index in sorted(results)]
