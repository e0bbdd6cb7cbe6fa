"""Parallel text: a sentence a line in two files, the raw IWSLT talks, or pairs in one file with tabs."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from xml.sax.saxutils import unescape

from splitstep.data.files import find, lines
from splitstep.data.packaged import cldr_files, cldr_pairs
from splitstep.solver.errors import UserError

Pair = tuple[str, str]


def _two_files(folder: Path, pattern: str, languages: Pair) -> tuple[Path, Path]:
    if "{language}" not in pattern:
        raise UserError(f"{pattern!r} names one file; write {{language}} where the two names differ")
    first, second = (find(folder, pattern.format(language=language)) for language in languages)
    return first, second


def _aligned(first: Path, second: Path, texts: Pair | tuple[Iterator[str], Iterator[str]]) -> Iterator[Pair]:
    """Pairs of lines; when one side ends first, the counts of both are the error."""
    counts = [0, 0]
    for pair in zip_longest(*texts):
        for side, line in enumerate(pair):
            counts[side] += line is not None
        if counts[0] == counts[1]:
            yield pair
    if counts[0] != counts[1]:
        raise UserError(f"{first} has {counts[0]:,} lines and {second} has {counts[1]:,}: they are not parallel")


def line_pairs(folder: Path, pattern: str, languages: Pair) -> Iterator[Pair]:
    """A sentence a line, `train.{language}`."""
    files = _two_files(folder, pattern, languages)
    return _aligned(*files, (lines(files[0]), lines(files[1])))


_SEGMENT = re.compile(r"<seg[^>]*>(.*?)</seg>")


def iwslt_pairs(folder: Path, pattern: str, languages: Pair) -> Iterator[Pair]:
    """Talks as WIT3 publishes them: `train.tags.de-en.{language}` between lines of tags, or `....{language}.xml`."""
    files = _two_files(folder, pattern, languages)
    return _aligned(*files, (_spoken(files[0]), _spoken(files[1])))


def _spoken(path: Path) -> Iterator[str]:
    for line in lines(path):
        segment = _SEGMENT.search(line)
        if segment is not None:
            yield unescape(segment[1]).strip()
        elif not line.lstrip().startswith("<"):
            yield line.strip()


def tab_pairs(folder: Path, pattern: str, languages: Pair) -> Iterator[Pair]:
    """Two columns in one file, the languages in the order of the pattern's ending: `deu.txt:en-de`."""
    name, _, order = pattern.partition(":")
    path = find(folder, name)
    columns = order.split("-") if order else list(languages)
    if sorted(columns) != sorted(languages):
        raise UserError(f"the columns of {pattern!r} are not {languages[0]} and {languages[1]}")
    first, second = (columns.index(language) for language in languages)
    for number, line in enumerate(lines(path), start=1):
        cells = line.split("\t")
        if len(cells) < 2:
            raise UserError(f"{path}, line {number}: no tab between two sentences")
        yield cells[first], cells[second]


def _tab_file(folder: Path, pattern: str, languages: Pair) -> tuple[Path, ...]:
    return (find(folder, pattern.partition(":")[0]),)


@dataclass(frozen=True)
class Format:
    """How parallel text is stored: the pairs that a name stands for, and the files they are read from."""

    pairs: Callable[[Path, str, Pair], Iterator[Pair]]
    files: Callable[[Path, str, Pair], tuple[Path, ...]] = _two_files
    packaged: bool = False  # comes with a Python package, so there is no folder


# A new format of parallel text is one entry.
FORMATS = {
    "lines": Format(line_pairs),
    "iwslt": Format(iwslt_pairs),
    "tsv": Format(tab_pairs, _tab_file),
    "cldr": Format(
        lambda folder, part, languages: cldr_pairs(languages, part),
        lambda folder, part, languages: tuple(cldr_files()),
        packaged=True,
    ),
}
