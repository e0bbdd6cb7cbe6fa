"""Documents as sentences: what of each format is prose, and where its sentences end."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from splitstep.data import imdb, text
from splitstep.data.files import BadRowError, Reading, find
from splitstep.data.wikipedia import pages, prose

_HEADING = re.compile(r" = .* = $")
_JOINED = re.compile(r" @(.)@ ")  # WikiText's mark inside numbers and compounds: 1 @,@ 000


def _paragraphs(path: Path, reading: Reading) -> Iterator[list[str]]:
    for document in text.paragraphs(path, reading):
        yield [line for line in document.splitlines() if line.strip()]


def _wikitext(path: Path, reading: Reading) -> Iterator[list[str]]:
    for article in text.wikitext(path, reading):
        prose = (line for line in article.splitlines() if line.strip() and not _HEADING.match(line))
        yield [_JOINED.sub(r"\1", line.strip()) for line in prose]


def _enwik8(path: Path, reading: Reading) -> Iterator[list[str]]:
    yield from map(prose, pages(path, reading))


def _imdb(folder: Path, name: str, reading: Reading) -> Iterator[list[str]]:
    reviews = ((place, _review(content)) for place, (_, content) in imdb.records(folder, name, imdb.ALL))
    return reading.good(reviews, name)


def _review(content: bytes) -> list[str] | BadRowError:
    try:
        return imdb.paragraphs(imdb.text(content))
    except BadRowError as error:
        return error


@dataclass(frozen=True)
class Format:
    """How documents are stored: the paragraphs of each, without headings, and the files they are read from."""

    documents: Callable[[Path, str, Reading], Iterator[list[str]]]
    files: Callable[[Path, str], list[Path]] = lambda folder, name: [find(folder, name)]


def _of_file(read: Callable[[Path, Reading], Iterator[list[str]]]) -> Format:
    return Format(lambda folder, name, reading: read(find(folder, name), reading))


# A new format of documents is one entry, and its name in `Texts` of tasks/pretraining.py.
DOCUMENTS = {
    "paragraphs": _of_file(_paragraphs),
    "wikitext": _of_file(_wikitext),
    "enwik8": _of_file(_enwik8),
    "imdb": Format(_imdb, partial(imdb.files, wanted=imdb.ALL)),
}

# A mark, with the brackets and quotes that it closes, before something that can begin a sentence.
_CLOSING, _OPENING = "\"')\\]\u201d\u2019", "\"'(\\[\u201c\u2018"
_END = re.compile(rf"[.!?\u2026](?:\s?[{_CLOSING}])*\s+(?=[{_OPENING}]*(\w))")
_INITIALS = re.compile(r"(?:[A-Za-z]\.)*[A-Za-z]")  # J, U.S, e.g
_ABBREVIATED = """
mr mrs ms dr prof st sr jr gen col lt sgt capt maj adm rev hon gov sen rep pres jan feb mar apr jun jul aug sep sept oct
nov dec no nos vol vols ed eds fig figs pp ca cf al vs viz approx est inc ltd co corp dept univ mt ft
"""
ABBREVIATIONS = frozenset(_ABBREVIATED.split())


def by_rule(paragraph: str) -> Iterator[str]:
    """The sentences of a paragraph: they end at a mark before a capital or a digit, but not at an abbreviation."""
    start = 0
    for end in _END.finditer(paragraph):
        if not (end[1].isupper() or end[1].isdecimal()):
            continue
        word = paragraph[start : end.start()].rpartition(" ")[2].lstrip(_OPENING)
        if end[0][0] == "." and (word.lower() in ABBREVIATIONS or _INITIALS.fullmatch(word)):
            continue
        yield paragraph[start : end.end()].strip()
        start = end.end()
    if rest := paragraph[start:].strip():
        yield rest


def by_line(paragraph: str) -> Iterator[str]:
    """The line as it is: text that has a sentence a line."""
    yield paragraph.strip()


# A new way to find sentences is one entry, and its name in `PreTrainingData.sentences`.
SPLITTERS: dict[str, Callable[[str], Iterator[str]]] = {"rule": by_rule, "lines": by_line}


def joined(sentences: Iterable[str], *, words: int) -> Iterator[str]:
    """The sentences, those of fewer words together with what follows."""
    waiting = ""
    for sentence in sentences:
        waiting = f"{waiting} {sentence}" if waiting else sentence
        if len(waiting.split()) >= words:
            yield waiting
            waiting = ""
    if waiting:
        yield waiting
