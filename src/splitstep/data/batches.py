"""Which examples make each update: a pure function of the seed, the epoch and the lengths.

So a run that continues sees the batches it would have seen, whatever the number of workers or processes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice

import numpy as np
from numpy.typing import NDArray

from splitstep.solver.errors import UserError

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Plan:
    """Updates of about `tokens` padded tokens, of sentences of like length, or of `examples` examples.

    `lengths` are the tokens of each example. `repeats` shows every example that often in a row of batches, each time
    with other augmentation (Hoffer et al. 2020), and an epoch then covers a part of the examples.
    """

    lengths: Indices
    seed: int
    tokens: int | None = None
    examples: int | None = None
    repeats: int = 1

    def __post_init__(self) -> None:
        if not len(self.lengths):
            raise UserError("there is not one training example")
        if (self.tokens is None) == (self.examples is None):
            raise UserError("give one of training.tokens_per_update and training.batch_size")
        if self.tokens is not None and self.tokens < self.lengths.max():
            raise UserError(
                f"training.tokens_per_update = {self.tokens} is less than the longest example, {self.lengths.max()}"
            )

    def epoch(self, number: int) -> list[Indices]:
        """The updates of one pass over the examples."""
        rng = np.random.default_rng((self.seed, number))
        order = rng.permutation(len(self.lengths))
        if self.examples is not None:
            order = np.repeat(order, self.repeats)[: len(order)]
            # An update smaller than the others would weigh its examples more: leave the rest to other epochs.
            whole = max(len(order) // self.examples, 1)
            return [order[i * self.examples : (i + 1) * self.examples] for i in range(whole)]
        order = order[np.argsort(self.lengths[order], kind="stable")]
        batches = list(self._filled(order))
        return [batches[i] for i in rng.permutation(len(batches))]

    def _filled(self, order: Indices) -> Iterator[Indices]:
        """Consecutive examples, as many as fit: the longest, which is the last, pads the others."""
        assert self.tokens is not None
        lengths, start = self.lengths[order], 0
        while start < len(order):
            most = self.tokens // max(int(lengths[start]), 1)
            sizes = np.arange(1, min(most, len(order) - start) + 1)
            fits = sizes * lengths[start : start + len(sizes)] <= self.tokens
            end = start + int(fits.sum())
            yield order[start:end]
            start = end

    def updates(self) -> Iterator[tuple[int, Indices]]:
        """(epoch, examples) of update after update, for ever."""
        for number in count():
            for indices in self.epoch(number):
                yield number, indices

    def updates_in(self, epochs: int) -> int:
        """How many updates that many epochs take."""
        return sum(len(self.epoch(number)) for number in range(epochs))


@dataclass(frozen=True)
class Piece:
    """What one process takes through the model at once.

    A process that gets no example of an update still goes through the motions, with one that is not `counted`.
    """

    epoch: int
    indices: Indices
    counted: bool = True


@dataclass(frozen=True)
class Stream:
    """The pieces of one process: every update cut into `pieces`, of which each of `world` processes takes its share.

    The examples of an update do not depend on how it is cut.
    """

    plan: Plan
    updates: int
    pieces: int = 1
    rank: int = 0
    world: int = 1

    def __len__(self) -> int:
        return self.updates * (self.pieces // self.world)

    def __iter__(self) -> Iterator[Piece]:
        mine = range(self.rank, self.pieces, self.world)
        for epoch, indices in islice(self.plan.updates(), self.updates):
            parts = np.array_split(indices, self.pieces)
            for part in mine:
                yield Piece(epoch, parts[part]) if len(parts[part]) else Piece(epoch, indices[:1], counted=False)
