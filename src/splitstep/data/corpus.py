"""Documents as token sequences, and pairs of passages drawn from them for next-sentence prediction."""

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from splitstep.data.cache import Ragged, beside, mapped

Tokens = NDArray[np.int32]
Places = NDArray[np.int64]
Spans = NDArray[np.int64]  # rows of (first sentence, the one after the last)

TRIED = 256  # sentences of other documents to begin with, of which one nearly always has the length that is sought


@dataclass(frozen=True)
class Corpus:
    """Sentences as tokens, and after how many sentences each document ends. Memory-mapped like `Ragged`."""

    sentences: Ragged
    documents: NDArray[np.int64]

    @classmethod
    def write(cls, path: Path, documents: Iterable[list[Tokens]]) -> None:
        """Write the documents to files that `open` maps; one at a time is in memory."""
        counts = array("q")

        def sentences() -> Iterator[Tokens]:
            for document in documents:
                counts.append(len(document))
                yield from document

        Ragged.write(path, sentences())
        np.cumsum(np.asarray(counts, dtype=np.int64)).tofile(beside(path, "documents"))

    @classmethod
    def open(cls, path: Path) -> "Corpus":
        """The documents of a file, read when they are used."""
        return cls(Ragged.open(path), mapped(beside(path, "documents"), np.int64))

    def tokens(self, start: int, end: int) -> Tokens:
        """The tokens of consecutive sentences."""
        ends = self.sentences.ends
        return self.sentences.tokens[ends[start - 1] if start else 0 : ends[end - 1]]

    @property
    def documents_with_text(self) -> int:
        """How many documents have a sentence."""
        return int(np.count_nonzero(np.diff(self.documents, prepend=0)))

    def document_of(self, sentence: int) -> tuple[int, int]:
        """The first sentence of the document that a sentence is in, and the one after its last."""
        number = int(np.searchsorted(self.documents, sentence, side="right"))
        return int(self.documents[number - 1]) if number else 0, int(self.documents[number])

    def sizes(self, spans: Spans) -> NDArray[np.int64]:
        """How many tokens each span has."""
        ends = self.sentences.ends
        before = np.where(spans[:, 0] > 0, ends[spans[:, 0] - 1], 0)
        return ends[spans[:, 1] - 1] - before


class Gap(NamedTuple):
    """What a passage of another document takes the place of."""

    behind: int  # how many sentences the passage before it has
    sentences: int
    size: int  # tokens
    last: int  # those of its last sentence
    room: int  # tokens until the pair is full

    @property
    def just_filled(self) -> bool:
        """Whether it is the last sentence that fills the room."""
        return self.size - self.last < max(self.room, 1) <= self.size


def packed(lengths: NDArray[np.int64], room: int) -> Iterator[tuple[int, int]]:
    """Spans of sentences of one document that fill the room; each has two at least, and all but the last overflow."""
    cuts, filled = [0], 0
    for place, length in enumerate(lengths.tolist(), start=1):
        filled += length
        if filled >= room and place - cuts[-1] > 1:
            cuts.append(place)
            filled = 0
    rest = len(lengths) - cuts[-1]
    if rest > 1 or len(cuts) == 1:
        cuts.append(len(lengths))
    else:
        cuts[-1] = len(lengths)  # a lonely last sentence has nothing to be paired with
    return (span for span in pairwise(cuts) if span[1] - span[0] > 1)


def neighbours(lengths: NDArray[np.int64], room: int) -> Iterator[tuple[int, int]]:
    """Every sentence of a document with the next one."""
    return ((place, place + 2) for place in range(len(lengths) - 1))


def filling(corpus: Corpus, starts: Places, limits: Places, gap: Gap, rng: np.random.Generator) -> tuple[int, int]:
    """Sentences that fill the room as those of `packed` do; where the real ones do not, some that are like them."""
    before = np.where(starts > 0, corpus.sentences.ends[starts - 1], 0)
    ends = np.searchsorted(corpus.sentences.ends, before + max(gap.room, 1)) + 1
    # A span of n sentences is cut in two at one of n - 1 places: each of them is as likely as the span is short.
    chances = (ends <= limits) / (gap.behind + ends - starts - 1)
    if not gap.just_filled or not chances.any():
        return alike(corpus, starts, limits, gap, rng)
    chosen = int(rng.choice(len(starts), p=chances / chances.sum()))
    return int(starts[chosen]), int(ends[chosen])


def alike(corpus: Corpus, starts: Places, limits: Places, gap: Gap, rng: np.random.Generator) -> tuple[int, int]:
    """As many sentences, and as nearly as many tokens as can be found."""
    ends = starts + gap.sentences
    spans = np.stack([starts, np.minimum(ends, limits)], axis=1)
    sizes = corpus.sizes(spans)
    # Where the pair fits, a longer one would have to be cut, which the real one is not.
    most = gap.size if gap.size <= gap.room else sizes.max()
    order = np.lexsort((np.abs(sizes - gap.size), sizes > most, ends > limits))
    return int(spans[order[0], 0]), int(spans[order[0], 1])


@dataclass(frozen=True)
class Pairing:
    """Which sentences of a document make a pair, and which of other documents' takes the place of the second part.

    The latter are chosen among starts, before the ends of their documents. Neither length nor number nor a cut may
    tell them from the real ones: a model that could see it by these would learn nothing of what they say.
    """

    spans: Callable[[NDArray[np.int64], int], Iterator[tuple[int, int]]]
    elsewhere: Callable[[Corpus, Places, Places, Gap, np.random.Generator], tuple[int, int]]


# A new way to make pairs of a document is one entry, and its name in `PreTrainingData.pairs`.
PAIRINGS = {
    "packed": Pairing(packed, filling),
    "sentences": Pairing(neighbours, alike),
}


def write_spans(path: Path, corpus: Corpus, pairing: str, room: int) -> None:
    """Write the spans of all documents that pairs are made from, to be mapped by `open_spans`."""
    with path.open("wb") as file:
        spans = _spans(corpus, pairing, room)
        while block := list(islice(spans, 1 << 16)):
            np.asarray(block, dtype=np.int64).tofile(file)


def _spans(corpus: Corpus, pairing: str, room: int) -> Iterator[tuple[int, int]]:
    start, tokens, ends = 0, 0, corpus.sentences.ends
    for end in map(int, corpus.documents):
        if end > start:
            for first, last in PAIRINGS[pairing].spans(np.diff(ends[start:end], prepend=tokens), room):
                yield start + first, start + last
            start, tokens = end, int(ends[end - 1])


def open_spans(path: Path) -> Spans:
    """The spans of a file, read when they are used."""
    return mapped(path, np.int64).reshape(-1, 2)


@dataclass(frozen=True)
class Pair:
    """Two passages, and whether the second follows the first in its document."""

    first: Tokens
    second: Tokens
    follows: bool


def drawn(corpus: Corpus, span: tuple[int, int], rng: np.random.Generator, *, pairing: str, room: int) -> Pair:
    """The sentences of a span cut in two somewhere; in half of all draws the second part is from another document."""
    start, end = span
    cut = int(rng.integers(start + 1, end))
    follows = bool(rng.random() < 0.5)
    first, second = corpus.tokens(start, cut), corpus.tokens(cut, end)
    size = min(len(first) + len(second), room)
    if not follows:
        gap = Gap(cut - start, end - cut, len(second), len(corpus.tokens(end - 1, end)), room - len(first))
        starts, limits = others(corpus, start, rng)
        second = corpus.tokens(*PAIRINGS[pairing].elsewhere(corpus, starts, limits, gap, rng))
    first, second = truncated(first, second, rng, room=size)
    return Pair(first, second, follows)


def others(corpus: Corpus, sentence: int, rng: np.random.Generator) -> tuple[Places, Places]:
    """Random sentences of other documents than a sentence's, and where their documents end."""
    first, last = corpus.document_of(sentence)
    starts = rng.integers(len(corpus.sentences) - (last - first), size=TRIED)
    starts += (last - first) * (starts >= first)
    return starts, corpus.documents[np.searchsorted(corpus.documents, starts, side="right")]


def truncated(first: Tokens, second: Tokens, rng: np.random.Generator, *, room: int) -> tuple[Tokens, Tokens]:
    """Both passages, the longer cut first until they fit the room; what goes is taken from either end by chance."""
    a, b = len(first), len(second)
    cut = max(a + b - room, 0)
    if abs(a - b) >= cut:
        a, b = (a - cut, b) if a > b else (a, b - cut)
    else:
        a, b = room - room // 2, room // 2
    return _kept(first, a, rng), _kept(second, b, rng)


def _kept(passage: Tokens, size: int, rng: np.random.Generator) -> Tokens:
    head = int(rng.binomial(len(passage) - size, 0.5))
    return passage[head : head + size]
