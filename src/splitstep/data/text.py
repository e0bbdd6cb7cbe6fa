"""Running text as documents: WikiText's articles, texts with blank lines between them, or a file as it is."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, groupby, pairwise
from pathlib import Path

from splitstep.data.files import STRICT, Reading, find, lines, opened
from splitstep.data.packaged import python_reference, python_reference_files
from splitstep.solver.errors import UserError

_TITLE = re.compile(r"^ = [^=].* = $")
CHUNK = 1 << 16  # bytes of a file without documents that are taken at a time


def wikitext(path: Path, reading: Reading = STRICT) -> Iterator[str]:
    """Articles of a `.tokens` file, each from its title ` = Title = `; blank lines before the first belong to it.

    A title has a blank line on either side. Lines of tables and formulas look like one and have not.
    """
    article: list[str] = []
    before = ""
    for line, after in pairwise(chain(lines(path, reading=reading), [""])):
        title = _TITLE.match(line) and not before.strip() and not after.strip()
        if title and any(map(str.strip, article)):
            yield "".join(article)
            article = []
        article.append(f"{line}\n")
        before = line
    yield "".join(article)


def paragraphs(path: Path, reading: Reading = STRICT) -> Iterator[str]:
    """Documents with blank lines between them; the blank lines belong to the document before."""
    document: list[str] = []
    for blank, group in groupby(lines(path, reading=reading), key=lambda line: not line.strip()):
        if blank:
            document += [f"{line}\n" for line in group]
        else:
            if document:
                yield "".join(document)
            document = [f"{line}\n" for line in group]
    yield "".join(document)


def whole(path: Path, reading: Reading = STRICT) -> Iterator[str]:
    """A file as it is, in chunks of some kilobytes; it has no lines that could be left out.

    A chunk begins with a space where there is one, so that no word is cut, and a vocabulary that puts a space before
    every text adds none.
    """
    rest, place = b"", 0
    with opened(path) as file:
        block = file.read(CHUNK)
        while block:
            following = file.read(CHUNK)
            raw, rest = _cut(rest + block) if following else (rest + block, b"")
            try:
                yield raw.decode("utf-8")
            except UnicodeDecodeError as error:
                raise UserError(f"{path}: not utf-8 at byte {place + error.start + 1}") from None
            place, block = place + len(raw), following
    if not place:
        raise UserError(f"{path} is empty")


def _cut(block: bytes) -> tuple[bytes, bytes]:
    """The block up to its last space, or its last whole character, and the rest."""
    space = block.rfind(b" ", 1)
    return (block[:space], block[space:]) if space > 0 else _whole_characters(block)


def _whole_characters(block: bytes) -> tuple[bytes, bytes]:
    """The block up to its last whole character, and the rest."""
    for back in range(1, min(4, len(block)) + 1):
        byte = block[-back]
        if byte >> 6 != 0b10:  # the first byte of a character
            length = 1 if byte < 0x80 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return (block, b"") if length <= back else (block[:-back], block[-back:])
    return block, b""


@dataclass(frozen=True)
class Format:
    """How running text is stored: its documents, and the files they are read from."""

    documents: Callable[[Path, str, Reading], Iterator[str]]
    files: Callable[[Path, str], list[Path]] = lambda folder, name: [find(folder, name)]
    packaged: bool = False  # comes with a Python package, so there is no folder


def _of_file(read: Callable[[Path, Reading], Iterator[str]]) -> Format:
    return Format(lambda folder, name, reading: read(find(folder, name), reading))


# A new format of running text is one entry.
FORMATS = {
    "wikitext": _of_file(wikitext),
    "paragraphs": _of_file(paragraphs),
    "whole": _of_file(whole),
    "python-reference": Format(
        lambda folder, part, reading: python_reference(part),
        lambda folder, part: python_reference_files(),
        packaged=True,
    ),
}
