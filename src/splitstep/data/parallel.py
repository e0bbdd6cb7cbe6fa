"""Parallel text: a sentence a line in two files, the raw IWSLT talks, or pairs in one file with tabs."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any
from xml.sax.saxutils import unescape

from splitstep.data.files import STRICT, BadRowError, Reading, find, placed_lines
from splitstep.data.packaged import cldr_files, cldr_pairs
from splitstep.solver.errors import UserError

Pair = tuple[str, str]
Placed = tuple[str, str | BadRowError]  # where it stands, and the line or what is wrong with it


def _two_files(folder: Path, pattern: str, languages: Pair) -> tuple[Path, Path]:
    if "{language}" not in pattern:
        raise UserError(f"{pattern!r} names one file; write {{language}} where the two names differ")
    first, second = (find(folder, pattern.replace("{language}", language)) for language in languages)
    return first, second


def _aligned(sides: tuple[Iterable[Placed], Iterable[Placed]], files: tuple[Path, Path]) -> Iterator[tuple[str, Any]]:
    """Pairs of lines with their place; when one side ends first, the counts of both are the error."""
    counts = [0, 0]
    for pair in zip_longest(*sides):
        for side, line in enumerate(pair):
            counts[side] += line is not None
        if counts[0] == counts[1]:
            wrong = next((placed for placed in pair if isinstance(placed[1], BadRowError)), None)
            yield wrong or (pair[0][0], (pair[0][1], pair[1][1]))
    if counts[0] != counts[1]:
        raise UserError(f"{files[0]} has {counts[0]:,} lines and {files[1]} has {counts[1]:,}: they are not parallel")


def line_pairs(folder: Path, pattern: str, languages: Pair, reading: Reading = STRICT) -> Iterator[Pair]:
    """A sentence a line, `train.{language}`."""
    files = _two_files(folder, pattern, languages)
    return reading.good(_aligned((placed_lines(files[0]), placed_lines(files[1])), files), pattern)


_SEGMENT = re.compile(r"<seg[^>]*>(.*?)</seg>")
_ABOUT = re.compile(r"<(title|description)>(.*?)</\1>")


def iwslt_pairs(folder: Path, pattern: str, languages: Pair, reading: Reading = STRICT) -> Iterator[Pair]:
    """Talks as WIT3 publishes them: `train.tags.de-en.{language}` between lines of tags, or `....{language}.xml`.

    Of the tags of the former, titles and descriptions are sentences too, as in fairseq's preparation.
    """
    files = _two_files(folder, pattern, languages)
    return reading.good(_aligned((_spoken(files[0]), _spoken(files[1])), files), pattern)


def _spoken(path: Path) -> Iterator[Placed]:
    segments = ".xml" in path.suffixes
    for place, line in placed_lines(path):
        if isinstance(line, BadRowError):
            yield place, line
        elif segments:
            if (segment := _SEGMENT.search(line)) is not None:
                yield place, unescape(segment[1]).strip()
        elif (about := _ABOUT.search(line)) is not None:
            yield place, about[2].strip()
        elif not line.lstrip().startswith("<"):
            yield place, line.strip()


def tab_pairs(folder: Path, pattern: str, languages: Pair, reading: Reading = STRICT) -> Iterator[Pair]:
    """Two columns in one file, the languages in the order of the pattern's ending: `deu.txt:en-de`."""
    name, _, order = pattern.partition(":")
    path = find(folder, name)
    columns = order.split("-") if order else list(languages)
    if sorted(columns) != sorted(languages):
        raise UserError(f"the columns of {pattern!r} are not {languages[0]} and {languages[1]}")
    first, second = (columns.index(language) for language in languages)

    def pair(line: str | BadRowError) -> Pair | BadRowError:
        if isinstance(line, BadRowError):
            return line
        cells = line.split("\t")
        return (cells[first], cells[second]) if len(cells) > 1 else BadRowError("no tab between two sentences")

    return reading.good(((place, pair(line)) for place, line in placed_lines(path)), name)


def _tab_file(folder: Path, pattern: str, languages: Pair) -> tuple[Path, ...]:
    return (find(folder, pattern.partition(":")[0]),)


@dataclass(frozen=True)
class Format:
    """How parallel text is stored: the pairs that a name stands for, and the files they are read from."""

    pairs: Callable[[Path, str, Pair, Reading], Iterator[Pair]]
    files: Callable[[Path, str, Pair], tuple[Path, ...]] = _two_files
    packaged: bool = False  # comes with a Python package, so there is no folder


# A new format of parallel text is one entry.
FORMATS = {
    "lines": Format(line_pairs),
    "iwslt": Format(iwslt_pairs),
    "tsv": Format(tab_pairs, _tab_file),
    "cldr": Format(
        lambda folder, part, languages, reading: cldr_pairs(languages, part),
        lambda folder, part, languages: cldr_files(languages),
        packaged=True,
    ),
}
