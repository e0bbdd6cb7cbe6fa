"""Labelled examples in the layouts they were published in, or as tables of one's own: one or two texts and a label.

An image is a text too: the grey values of its pixels, row by row, as words.
"""

import csv
import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from splitstep.data import images, imdb, listops
from splitstep.data.archives import npz_arrays
from splitstep.data.files import STRICT, BadRowError, Reading, find, fingerprint_of, lines, placed_lines
from splitstep.models.labels import IGNORED
from splitstep.solver.errors import UserError, unknown

Record = tuple[str, Any]  # where it stands, and what stands there or what is wrong with it
Row = Sequence[str] | Mapping[str, str]  # cells in the order of a format's columns, or by their names


class Example(NamedTuple):
    """What is read, what is to be said of it, and where it stands."""

    texts: tuple[str, ...]
    label: str
    place: str


@dataclass(frozen=True)
class Format:
    """A layout: records of a file, each a row of named columns."""

    columns: tuple[str, ...] | None  # None: the file names its own
    records: Callable[[Path, str], Iterator[Record]]  # of a file of a folder, by its name
    row: Callable[[Any], Row]  # a record as columns, or a BadRowError
    text: str  # the column that is read, unless the recipe names others
    label: str  # the column that is learnt, likewise
    files: Callable[[Path, str], list[Path]] = lambda folder, name: [find(folder, name)]
    names: Callable[[Path], dict[str, str]] = lambda folder: {}  # what the labels are called, in their order
    clue: Callable[[str], str] | None = None  # what a guesser would look at, where there is a known one
    pair: str | None = None  # the second column that is read


@dataclass(frozen=True)
class Choice:
    """Which columns of a format are read and learnt; `title+description` are two columns as one text."""

    format: Format
    texts: tuple[tuple[str, ...], ...]
    label: str
    numbers: tuple[float, float] | None = None  # between which labels lie that are no names

    @classmethod
    def of(cls, name: str, texts: list[str] | None, label: str | None) -> "Choice":
        """The columns by their names, or those that the format usually has."""
        if name not in FORMATS:
            raise unknown("data.format", name, FORMATS)
        format = FORMATS[name]  # noqa: A001
        usual = [format.text] if format.pair is None else [format.text, format.pair]
        chosen = cls(format, tuple(tuple(text.split("+")) for text in texts or usual), label or format.label)
        if format.columns is not None:
            chosen.check(format.columns, UserError)
        return chosen

    def check(self, columns: Iterable[str], error: type[Exception]) -> None:
        """Whether what was chosen is there."""
        named = [("texts", column) for text in self.texts for column in text] + [("label", self.label)]
        for key, column in named:
            if column not in columns:
                raise error(str(unknown(f"data.{key}", column, columns)))

    def example(self, row: Row, place: str) -> Example:
        """The chosen columns of a row."""
        cells = row if isinstance(row, Mapping) else named_cells(self.format.columns or (), row)
        self.check(cells, BadRowError)
        texts = tuple(" ".join(cells[column] for column in text) for text in self.texts)
        return Example(texts, cells[self.label], place)

    def names(self, folder: Path) -> dict[str, str]:
        """What each label is called, in the order of their numbers; nothing where only the examples tell."""
        return self.format.names(folder) if self.label == self.format.label else {}


def named_cells(columns: Sequence[str], row: Sequence[str]) -> dict[str, str]:
    """The cells of a row by the names of their columns."""
    if len(row) != len(columns):
        raise BadRowError(f"{len(row)} columns instead of {len(columns)}")
    return dict(zip(columns, row, strict=True))


def examples(choice: Choice, folder: Path, name: str, reading: Reading = STRICT) -> Iterator[Example]:
    """The examples of a file."""
    names = choice.names(folder) if choice.numbers is None else {}

    def example(place: str, record: Any) -> Example | BadRowError:
        if isinstance(record, BadRowError):
            return record
        try:
            found = choice.example(choice.format.row(record), place)
        except BadRowError as error:
            return error
        if names and found.label not in names:
            return BadRowError(f"label {found.label!r} is none of {', '.join(names)}")
        if choice.numbers is not None and (flaw := _flaw_of_number(found.label, *choice.numbers)):
            return BadRowError(flaw)
        return found._replace(label=names.get(found.label, found.label))

    records = choice.format.records(folder, name)
    return reading.good(((place, example(place, record)) for place, record in records), name)


def _flaw_of_number(label: str, low: float, high: float) -> str | None:
    try:
        value = float(label)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        return f"the label {label!r} is no number"
    if value == IGNORED:
        return f"the label {label} marks what no loss counts; shift or scale the labels"
    return None if low <= value <= high else f"the label {label} does not lie between {low:g} and {high:g}"


def checksums(choice: Choice, folder: Path, name: str) -> dict[str, str]:
    """The content of a file, or of all files of a folder together."""
    return fingerprint_of(name, choice.format.files(folder, name), under=folder)


# Records


def _lines(folder: Path, name: str, encoding: str = "utf-8") -> Iterator[Record]:
    return placed_lines(find(folder, name), encoding=encoding)


def _latin_lines(folder: Path, name: str) -> Iterator[Record]:
    return _lines(folder, name, "latin-1")


def _listops_lines(folder: Path, name: str) -> Iterator[Record]:
    rows = _lines(folder, name)
    place, header = next(rows)
    if isinstance(header, BadRowError):
        raise UserError(f"{place}: {header}")
    if header != listops.HEADER:
        raise UserError(f"{place}: the header is {header[:40]!r}, not {listops.HEADER!r}")
    return rows


# Tables of one's own: columns named by the header, or by each record


def _table_records(folder: Path, name: str, *, dialect: type[csv.Dialect]) -> Iterator[Record]:
    """Header and cells of each row. One that is quoted may go over several lines; empty lines are passed over.

    Where a row is none, as after a quotation mark that is never closed, the next begins in its second line.
    """
    source = placed_lines(find(folder, name))
    taken: list[Record] = []  # the lines of a row
    again: deque[Record] = deque()

    def physical() -> Iterator[str]:
        while (placed := again.popleft() if again else next(source, None)) is not None:
            taken.append(placed)
            yield "\n" if isinstance(placed[1], BadRowError) else f"{placed[1]}\n"

    reader = csv.reader(physical(), dialect)
    header: list[str] | None = None
    while True:
        taken.clear()
        try:
            cells = next(reader, None)
            flaws = [line for _, line in taken if isinstance(line, BadRowError)]
        except csv.Error as error:
            cells, flaws = [], [BadRowError(f"no row of a table ({error})")]
            again.extendleft(reversed(taken[1:]))
            reader = csv.reader(physical(), dialect)
        if cells is None:
            return
        place = taken[0][0]
        if header is None and (flaws or cells):
            header = _header(cells, place, flaws)
        elif flaws or cells:
            yield place, flaws[-1] if flaws else (header, cells)


def _header(cells: list[str], place: str, wrong: list[BadRowError]) -> list[str]:
    if wrong:
        raise UserError(f"{place}: {wrong[0]}")
    names = [cell.strip() for cell in cells]
    if len(set(names)) < len(names) or not all(names):
        raise UserError(f"{place}: the header has to name each column once, got {', '.join(map(repr, cells))}")
    return names


def _table_row(record: tuple[list[str], list[str]]) -> Mapping[str, str]:
    return named_cells(*record)


class _Commas(csv.excel):
    strict = True


class _Tabs(csv.excel_tab):
    quoting = csv.QUOTE_NONE  # a quotation mark is one; a cell has no tab and no line end
    quotechar = None


def _json_row(line: str) -> Mapping[str, str]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadRowError(f"no JSON ({error})") from None
    if not isinstance(found, dict):
        raise BadRowError(f"no JSON object, but {line[:40]!r}")
    scalars = {key: value for key, value in found.items() if isinstance(value, str | int | float)}
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in scalars.items()}


# AG News (Zhang et al. 2015)


def _ag_news_row(line: str) -> Sequence[str]:
    try:
        (cells,) = csv.reader([line], strict=True)
    except (csv.Error, ValueError) as error:
        raise BadRowError(f"no row of comma-separated values ({error})") from None
    # The published file writes \$ for $ and a lone backslash for the end of a line, though its readme says \n.
    return [cell.replace("\\$", "$").replace("\\", " ").strip() for cell in cells]


def _ag_news_names(folder: Path) -> dict[str, str]:
    listed = [line.strip() for line in lines(find(folder, "classes.txt")) if line.strip()]
    return {str(number): name for number, name in enumerate(listed, start=1)}


# The Large Movie Review Dataset


def _imdb_row(record: tuple[str, bytes]) -> Sequence[str]:
    name, content = record
    found = imdb.LABELLED.search(name)
    assert found is not None
    return imdb.text(content), found["label"], found["rating"]


# TREC (Li & Roth 2002): COARSE:fine question


def _trec_row(line: str) -> Sequence[str]:
    label, space, question = line.partition(" ")
    coarse, colon, _ = label.partition(":")
    if not (space and coarse and colon and question.strip()):
        raise BadRowError(f"no COARSE:fine label and question in {line[:40]!r}")
    return question, coarse, label


# ListOps: the arena's files, and those of Nangia & Bowman 2018 with the label in front


def _listops_row(line: str) -> Sequence[str]:
    expression, _, value = line.rpartition("\t")
    return _listops_checked(expression, value)


def _listops_nyu_row(line: str) -> Sequence[str]:
    value, _, expression = line.partition("\t")
    return _listops_checked(expression, value)


_LISTOPS_SYMBOLS = frozenset([*listops.SYMBOLS, *listops.PARENTHESES])


def _listops_checked(expression: str, value: str) -> Sequence[str]:
    if value not in listops.DIGITS or not expression:
        raise BadRowError(f"no expression and digit with a tab between them, but {value[:20]!r}")
    if strange := [symbol for symbol in expression.split() if symbol not in _LISTOPS_SYMBOLS]:
        raise BadRowError(f"{strange[0][:20]!r} is no symbol of ListOps")
    return expression, value


def _root_operator(expression: str) -> str:
    return next((symbol for symbol in expression.split() if symbol != "("), "")


def _digit_names(folder: Path) -> dict[str, str]:
    return dict(zip(listops.DIGITS, listops.DIGITS, strict=True))


# Images as sequences of pixels

_WORDS = [str(value) for value in range(256)]
_LUMINANCE = np.asarray([0.2989, 0.5870, 0.1140])  # of red, green and blue, as TensorFlow makes an image grey


def _grey_row(record: tuple[NDArray[np.uint8], str]) -> Sequence[str]:
    pixels, label = record
    return " ".join([_WORDS[value] for value in pixels.ravel().tolist()]), label


def _pathfinder_records(folder: Path, name: str) -> Iterator[Record]:
    path = find(folder, name)
    pixels, labels = npz_arrays(path, "x", "y")
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or labels.shape != pixels.shape[:1]:
        raise UserError(f"{path}: x is {pixels.dtype} {pixels.shape} and y {labels.shape}, not uint8 [N, H, W] and [N]")
    pairs = zip(pixels, labels.tolist(), strict=True)
    yield from ((f"{path}, image {number}", (image, str(label))) for number, (image, label) in enumerate(pairs, 1))


def _pathfinder_names(folder: Path) -> dict[str, str]:
    return {"0": "apart", "1": "connected"}


def _cifar10_records(folder: Path, name: str) -> Iterator[Record]:
    format, place = images.FORMATS["cifar10"], images.Place(folder)  # noqa: A001
    names = format.names(place, [name])
    pictures = format.read(place, name, names)
    for number, (image, label) in enumerate(zip(pictures.pixels, pictures.labels, strict=True), start=1):
        grey = np.tensordot(_LUMINANCE, image, 1).round().astype(np.uint8)
        yield f"{folder / name}, image {number}", (grey, names[label])


def _cifar10_names(folder: Path) -> dict[str, str]:
    names = images.FORMATS["cifar10"].names(images.Place(folder), [])
    return dict(zip(names, names, strict=True))


# Pairs of papers of the ACL Anthology Network (Radev et al. 2013), as the arena splits them: label, ids, texts


def _aan_row(line: str) -> Sequence[str]:
    label, *rest = line.split("\t")
    if label not in _AAN_LABELS:
        raise BadRowError(f"label {label[:20]!r} is none of {', '.join(_AAN_LABELS)}")
    return _AAN_LABELS[label], *rest


_AAN_LABELS = {"0": "unrelated", "1": "cites", "0.0": "unrelated", "1.0": "cites"}


def _own(records: Callable[[Path, str], Iterator[Record]], row: Callable[[Any], Row]) -> Format:
    return Format(columns=None, records=records, row=row, text="text", label="label")


# A new layout is one entry.
FORMATS: dict[str, Format] = {
    "csv": _own(partial(_table_records, dialect=_Commas), _table_row),
    "tsv": _own(partial(_table_records, dialect=_Tabs), _table_row),
    "jsonl": _own(_lines, _json_row),
    "ag-news": Format(
        columns=("class", "title", "description"),
        records=_lines,
        row=_ag_news_row,
        text="description",
        label="class",
        names=_ag_news_names,
    ),
    "imdb": Format(
        columns=("review", "label", "rating"),
        records=imdb.records,
        row=_imdb_row,
        text="review",
        label="label",
        files=imdb.files,
    ),
    "trec": Format(
        columns=("question", "coarse", "fine"), records=_latin_lines, row=_trec_row, text="question", label="coarse"
    ),
    "listops": Format(
        columns=("expression", "value"),
        records=_listops_lines,
        row=_listops_row,
        text="expression",
        label="value",
        names=_digit_names,
        clue=_root_operator,
    ),
    "listops-nyu": Format(
        columns=("expression", "value"),
        records=_lines,
        row=_listops_nyu_row,
        text="expression",
        label="value",
        names=_digit_names,
        clue=_root_operator,
    ),
    "pathfinder": Format(
        columns=("pixels", "label"),
        records=_pathfinder_records,
        row=_grey_row,
        text="pixels",
        label="label",
        names=_pathfinder_names,
    ),
    "cifar10-grey": Format(
        columns=("pixels", "label"),
        records=_cifar10_records,
        row=_grey_row,
        text="pixels",
        label="label",
        names=_cifar10_names,
    ),
    "aan": Format(
        columns=("label", "id1", "id2", "text1", "text2"),
        records=_lines,
        row=_aan_row,
        text="text1",
        pair="text2",
        label="label",
    ),
}
