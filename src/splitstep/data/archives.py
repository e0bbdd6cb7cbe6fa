"""Archives read in memory, never unpacked to a disk; what could do harm is refused before it is read."""

import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splitstep.data.files import opened
from splitstep.solver.errors import UserError

LARGEST_RATIO = 100  # of what is unpacked to the archive; text packs 3 to 10 times
SMALLEST_LIMIT = 1 << 20  # bytes that any archive may unpack to, since a tiny one has large headers


def tar_files(path: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    """The files of a tar archive that are wanted, packed or not, by name and content."""
    total = 0
    try:
        with opened(path) as file, tarfile.open(fileobj=file, mode="r|") as archive:
            for member in archive:
                _refuse_harm(path, member)
                total += member.size
                _refuse_bomb(path, total)
                name = PurePosixPath(member.name).as_posix()  # without a leading ./
                content = archive.extractfile(member) if member.isfile() and wanted(name) else None
                if content is not None:
                    yield name, content.read()
    except tarfile.TarError as error:
        raise UserError(f"{path} is no tar archive, or damaged ({error})") from None


def _refuse_harm(path: Path, member: tarfile.TarInfo) -> None:
    name = PurePosixPath(member.name)
    if name.is_absolute() or ".." in name.parts or "\\" in member.name:
        raise UserError(f"{path}: {member.name!r} leads out of the archive's own folder; it is not read")
    if not (member.isfile() or member.isdir()):
        raise UserError(f"{path}: {member.name!r} is neither file nor folder but a link or a device; it is not read")


def _refuse_bomb(path: Path, unpacked: int) -> None:
    limit = max(LARGEST_RATIO * path.stat().st_size, SMALLEST_LIMIT)
    if unpacked > limit:
        raise UserError(f"{path} unpacks to more than {limit:,} bytes, {LARGEST_RATIO} times its size; it is not read")


def npz_arrays(path: Path, *names: str) -> list[NDArray[Any]]:
    """The arrays of those names in an npz file; one that would need unpickling is refused."""
    try:
        with zipfile.ZipFile(path) as archive:
            _refuse_bomb(path, sum(entry.file_size for entry in archive.infolist()))
        with np.load(path, allow_pickle=False) as stored:
            missing = [name for name in names if name not in stored]
            if missing:
                raise UserError(f"{path} has no array {', '.join(missing)}, only {', '.join(stored)}")
            return [stored[name] for name in names]
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError) as error:
        raise UserError(f"{path} is no npz file, or damaged ({error})") from None
    except UserError:
        raise
    except ValueError as error:  # an array of objects
        raise UserError(f"{path} is not read: {error}") from None
