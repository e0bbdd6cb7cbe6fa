"""Files as they were published: found with or without a packer's ending, read line by line, errors with their place."""

import gzip
import hashlib
import lzma
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from splitstep.solver.errors import UserError

PACKERS: dict[str, Callable[..., Any]] = {"": open, ".gz": gzip.open, ".xz": lzma.open}
LONGEST_LINE = 1_000_000  # characters; a longer line is a file of another kind


def data_root(root: str | None) -> Path:
    """The folder of data sets: the one named, or SPLITSTEP_DATA."""
    name = root or os.environ.get("SPLITSTEP_DATA")
    if not name:
        raise UserError("where are the data? set data.root in the recipe, or the environment variable SPLITSTEP_DATA")
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise UserError(f"the data folder {folder} does not exist")
    return folder


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


def lines(path: Path, *, encoding: str = "utf-8") -> Iterator[str]:
    """The lines of a text without their ends. A byte-order mark, CRLF and a missing last newline are read rightly."""
    number = 0
    with opened(path) as file:
        for number, raw in enumerate(file, start=1):
            yield _decoded(raw, encoding, path, number)
    if number == 0:
        raise UserError(f"{path} is empty")


def _decoded(raw: bytes, encoding: str, path: Path, number: int) -> str:
    if number == 1:
        raw = raw.removeprefix(b"\xef\xbb\xbf")
    if len(raw) > LONGEST_LINE:
        raise UserError(f"{path}, line {number}: {len(raw):,} bytes in one line, more than {LONGEST_LINE:,}")
    try:
        line = raw.decode(encoding)
    except UnicodeDecodeError as error:
        raise UserError(f"{path}, line {number}: not {encoding} at byte {error.start + 1}") from None
    if "\0" in line:
        raise UserError(f"{path}, line {number}: a NUL byte in a text")
    return line.removesuffix("\n").removesuffix("\r")


def fingerprint(paths: Iterable[Path], *, under: Path | None = None) -> dict[str, str]:
    """The content of each file as a checksum, by which a run knows its data again; files are named below a folder."""
    sums = {}
    for path in paths:
        with path.open("rb") as file:
            name = path.name if under is None else path.relative_to(under).as_posix()
            sums[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return sums
