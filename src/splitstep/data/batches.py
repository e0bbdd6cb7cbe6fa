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
class Update:
    """The examples of one update. `turns` counts how often each was shown before in its epoch."""

    epoch: int
    number: int  # in its epoch
    indices: Indices
    turns: Indices

    def __len__(self) -> int:
        return len(self.indices)


@dataclass(frozen=True)
class Plan:
    """Updates of about `tokens` padded tokens, of sentences of like length, or of `examples` examples.

    `lengths` are the tokens of each example, of its longer side where it has two; `tilts` are how much longer the first
    side is, so that sentences with alike second sides come together too. `repeats` shows every example that often in a
    row of batches, each time with other augmentation (Hoffer et al. 2020), and an epoch then covers a part of the
    examples. The examples of `window` updates that would follow each other are dealt out to them from short to long.
    """

    lengths: Indices
    seed: int
    tokens: int | None = None
    examples: int | None = None
    repeats: int = 1
    window: int = 1
    tilts: Indices | None = None

    def __post_init__(self) -> None:
        if not len(self.lengths):
            raise UserError("there is not one training example")
        if (self.tokens is None) == (self.examples is None):
            raise UserError("give one of training.tokens_per_update and training.batch_size")
        if self.tokens is not None and self.tokens < self.lengths.max():
            raise UserError(
                f"training.tokens_per_update = {self.tokens} is less than the longest example, {self.lengths.max()}"
            )

    def epoch(self, number: int) -> list[Update]:
        """The updates of one pass over the examples."""
        rng = np.random.default_rng((self.seed, number))
        # Billions of words are some hundred million examples: four bytes are enough for the place of one.
        small = np.int32 if len(self.lengths) < 2**31 else np.int64
        order = rng.permutation(np.arange(len(self.lengths), dtype=small))
        if self.examples is not None:
            order, turns = _repeated(order, self.repeats)
            cuts = list(self._dealt(order, self.examples))
            if self.window > 1:
                cuts = [cuts[i] for i in rng.permutation(len(cuts))]
            return [Update(number, i, order[cut], turns[cut]) for i, cut in enumerate(cuts)]
        order = order[self._by_size(order)]
        batches = list(self._filled(order))
        shuffled = [batches[i] for i in rng.permutation(len(batches))]
        once = np.zeros_like(order[: max(map(len, batches))])
        return [Update(number, i, batch, once[: len(batch)]) for i, batch in enumerate(shuffled)]

    def _dealt(self, order: Indices, size: int) -> Iterator[Indices]:
        """The places in an order that make each update of `size` examples."""
        # An update smaller than the others would weigh its examples more: leave the rest to other epochs.
        used = max(len(order) // size, 1) * size
        for places in _cut(np.arange(len(order))[:used], self.window * size):
            yield from _cut(places[self._by_size(order[places])] if self.window > 1 else places, size)

    def _by_size(self, order: Indices) -> Indices:
        """The places of the examples from short to long; with two sides the tilt goes to and fro, without a leap."""
        lengths = self.lengths[order]
        if self.tilts is None:
            return np.argsort(lengths, kind="stable")
        tilts = self.tilts[order]
        return np.lexsort((np.where(lengths % 2, tilts, -tilts), lengths))

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

    def padding(self) -> float:
        """The share of padding among the places of an epoch, of both sides where there are two."""
        tilts = np.zeros_like(self.lengths) if self.tilts is None else self.tilts
        sides = np.stack((self.lengths + np.minimum(tilts, 0), self.lengths - np.maximum(tilts, 0)))
        updates = [sides[:, update.indices] for update in self.epoch(0)]
        places = sum(int(update.max(1).sum()) * update.shape[1] for update in updates)
        return 1 - sum(int(update.sum()) for update in updates) / places

    def updates(self) -> Iterator[Update]:
        """Update after update, for ever."""
        for number in count():
            yield from self.epoch(number)

    def updates_in(self, epochs: int) -> int:
        """How many updates that many epochs take."""
        return sum(len(self.epoch(number)) for number in range(epochs))


def _cut(places: Indices, size: int) -> Iterator[Indices]:
    for start in range(0, len(places), size):
        yield places[start : start + size]


def _repeated(order: Indices, repeats: int) -> tuple[Indices, Indices]:
    """Each example that often in a row, and which of its turns each is; as many in all as there were."""
    turns = np.arange(len(order), dtype=order.dtype) % repeats
    return np.repeat(order, repeats)[: len(order)], turns


@dataclass(frozen=True)
class Piece:
    """What one process takes through the model at once: the examples at these places of an update.

    A process that gets no example of an update still goes through the motions, with one that is not `counted`.
    """

    update: Update
    places: Indices
    counted: bool = True

    @property
    def epoch(self) -> int:
        """The pass over the examples that this is a part of."""
        return self.update.epoch

    @property
    def indices(self) -> Indices:
        """The numbers of the examples."""
        return self.update.indices[self.places]


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
        for update in islice(self.plan.updates(), self.updates):
            parts = np.array_split(np.arange(len(update)), self.pieces)
            for part in mine:
                counted = len(parts[part]) > 0
                yield Piece(update, parts[part] if counted else np.zeros(1, np.int64), counted)
