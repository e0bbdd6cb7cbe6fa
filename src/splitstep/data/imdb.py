"""The Large Movie Review Dataset (Maas et al. 2011): aclImdb/train/pos/0_9.txt, unpacked or in its archive."""

import re
from collections.abc import Iterator
from pathlib import Path

from splitstep.data.archives import tar_files
from splitstep.data.files import PACKERS, BadRowError
from splitstep.solver.errors import UserError

LABELLED = re.compile(r"(?:^|/)(?P<label>pos|neg)/\d+_(?P<rating>\d+)\.txt$")
ALL = re.compile(r"(?:^|/)(?:pos|neg|unsup)/\d+_\d+\.txt$")

_ARCHIVES = [f"{version}.tar{ending}" for version in ("", "_v1") for ending in PACKERS]
_BREAK = re.compile(r"(?:\s*<br\s*/?>\s*)+")


def files(folder: Path, name: str, wanted: re.Pattern[str] = LABELLED) -> list[Path]:
    """The archive, or the reviews of a folder, in the order of their names."""
    if (folder / name).is_dir():
        found = sorted(path for path in (folder / name).glob("*/*.txt") if wanted.search(path.as_posix()))
        if not found:
            raise UserError(f"{folder / name} has no reviews pos/ID_RATING.txt and neg/ID_RATING.txt")
        return found
    return [_archive(folder, name)[0]]


def _archive(folder: Path, name: str) -> tuple[Path, str]:
    """The archive that has a folder, and the name of the folder in it: sets/aclImdb/train is in sets/aclImdb.tar."""
    parts = name.split("/")
    for place, part in enumerate(parts):
        for ending in _ARCHIVES:
            path = folder.joinpath(*parts[:place], f"{part}{ending}")
            if path.is_file():
                return path, "/".join(parts[place:])
    raise UserError(f"no file {folder / parts[0]}.tar, nor with .gz or .xz, nor a folder {folder / name}")


def records(folder: Path, name: str, wanted: re.Pattern[str] = LABELLED) -> Iterator[tuple[str, tuple[str, bytes]]]:
    """The reviews of a folder, each with its place: the name of its file, and what is in it."""
    if (folder / name).is_dir():
        yield from ((str(path), (path.as_posix(), path.read_bytes())) for path in files(folder, name, wanted))
        return
    archive, inner = _archive(folder, name)
    inside = tar_files(archive, lambda member: member.startswith(f"{inner}/") and bool(wanted.search(member)))
    reviews = sorted(inside)
    if not reviews:
        raise UserError(f"{archive} has no reviews {inner}/pos/ID_RATING.txt and {inner}/neg/ID_RATING.txt")
    yield from ((f"{archive}, {member}", (member, content)) for member, content in reviews)


def text(content: bytes) -> str:
    """A review as it stands in its file."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRowError(f"not utf-8 at byte {error.start + 1}") from None


def paragraphs(review: str) -> list[str]:
    """The paragraphs of a review, which HTML divides."""
    return [part for part in _BREAK.split(review.strip()) if part]
