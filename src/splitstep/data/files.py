"""Files as they were published: found with or without a packer's ending, read line by line, errors with their place."""

import gzip
import hashlib
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, TypeVar

from splitstep.solver.errors import UserError

PACKERS: dict[str, Callable[..., Any]] = {"": open, ".gz": gzip.open, ".xz": lzma.open}
BOM = b"\xef\xbb\xbf"
LONGEST_LINE = 1_000_000  # characters; a longer line is a file of another kind

TOLD = 100  # places of bad records that are named, beside the first

Item = TypeVar("Item")
OnBad = Literal["stop", "skip"]


class BadRowError(ValueError):
    """A record that is not what its format says; who reads it adds the place."""


@dataclass(frozen=True)
class Reading:
    """What becomes of a bad record: it stops the reading, or is left out and counted."""

    on_bad: OnBad = "stop"
    say: Callable[[str], None] = lambda line: None

    def good(self, records: Iterable[tuple[str, Item | BadRowError]], of: str) -> Iterator[Item]:
        """The records that are what they should be, each given with its place."""
        count, bad = 0, list[str]()
        for count, (place, record) in enumerate(records, start=1):  # noqa: B007
            if not isinstance(record, BadRowError):
                yield record
                continue
            if self.on_bad == "stop":
                raise UserError(f"{place}: {record}")
            bad.append(place.rpartition(", ")[2] if bad else f"{place}: {record}")
        if bad:
            first, *others = bad
            told = f"; then {', '.join(others[:TOLD])}" if others else ""
            more = f" and {len(others) - TOLD:,} more" if len(others) > TOLD else ""
            self.say(
                f"{len(bad):,} of {count:,} rows of {of} are malformed and left out; the first: {first}{told}{more}"
            )


STRICT = Reading()


def find(folder: Path, name: str) -> Path:
    """The file of that name in the folder, as it is or packed."""
    for ending in PACKERS:
        path = folder / f"{name}{ending}"
        if path.is_file():
            return path
    raise UserError(f"no file {folder / name}, nor with {' or '.join(filter(None, PACKERS))}")


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """The unpacked bytes of a file; a damaged archive is the user's to mend, said in one line."""
    opener = PACKERS.get(path.suffix, open)
    try:
        with opener(path, "rb") as file:
            yield file
    except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path} is damaged or cut short ({error})") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None


def read_bytes(path: Path) -> bytes:
    """All bytes of a file, unpacked."""
    with opened(path) as file:
        content = file.read()
    if not content:
        raise UserError(f"{path} is empty")
    return content


def lines(path: Path, *, encoding: str = "utf-8", reading: Reading = STRICT) -> Iterator[str]:
    """The lines of a text without their ends. A byte-order mark, CRLF and a missing last newline are read rightly."""
    return reading.good(placed_lines(path, encoding=encoding), path.name)


def placed_lines(path: Path, *, encoding: str = "utf-8") -> Iterator[tuple[str, str | BadRowError]]:
    """Each line, or what is wrong with it, with its place."""
    number = 0
    with opened(path) as file:
        for number, raw in enumerate(file, start=1):
            yield f"{path}, line {number}", _decoded(raw if number > 1 else raw.removeprefix(BOM), encoding)
    if number == 0:
        raise UserError(f"{path} is empty")


def _decoded(raw: bytes, encoding: str) -> str | BadRowError:
    if len(raw) > LONGEST_LINE:
        return BadRowError(f"{len(raw):,} bytes in one line, more than {LONGEST_LINE:,}")
    try:
        line = raw.decode(encoding)
    except UnicodeDecodeError as error:
        return BadRowError(f"not {encoding} at byte {error.start + 1}")
    if "\0" in line:
        return BadRowError("a NUL byte in a text")
    return line.removesuffix("\n").removesuffix("\r")


def fingerprint(paths: Iterable[Path], *, under: Path) -> dict[str, str]:
    """The content of each file as a checksum, by which a run knows its data again.

    Files are named by where they lie below a folder, since two may have one name; one that lies elsewhere by its name.
    """
    sums = {}
    for path in paths:
        name = path.relative_to(under).as_posix() if path.is_relative_to(under) else path.name
        sums[name] = checksum(path)
    return sums


def fingerprint_of(name: str, paths: list[Path], *, under: Path) -> dict[str, str]:
    """The content of what a recipe names: of a file by itself, of the files of a folder together."""
    if len(paths) == 1:
        return fingerprint(paths, under=under)
    whole = hashlib.sha256()
    for path in paths:
        whole.update(f"{path.relative_to(under)} {checksum(path)}\n".encode())
    return {name: whole.hexdigest()}


def checksum(path: Path) -> str:
    """The content of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
