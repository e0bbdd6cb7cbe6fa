"""Checkpoints that count only when complete, and the mean of several.

A checkpoint is a folder that the Trainer writes. Its last file is a list of all others with their sizes and checksums,
so that a folder cut short by a crash, a full disk or a damaged file is known as such, and the one before it is taken.
"""

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from splitstep.data.files import checksum
from splitstep.solver.errors import RunError, UserError

SEAL = "complete.json"
PREFIX = "checkpoint-"


def seal(folder: Path) -> None:
    """Declare a checkpoint complete; what is sealed is on the disk."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            _sync(path)
            files[str(path.relative_to(folder))] = {"bytes": path.stat().st_size, "sha256": checksum(path)}
    write_atomically(folder / SEAL, json.dumps(files, indent=2))
    _sync(folder.parent)


@contextmanager
def or_nothing(folder: Path, needs: int) -> Iterator[None]:
    """Remove a checkpoint that could not be written whole, and say what room it needs."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        free = shutil.disk_usage(folder.parent).free
        reason = os.strerror(errno.ENOSPC) if free < needs else error  # torch's own words are no help
        raise RunError(
            f"cannot save {folder}: {reason}. It needs about {needs:,} bytes and {free:,} are free; the checkpoints "
            "before it are intact, and the same command goes on from them"
        ) from None


def flaw(folder: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        files: dict[str, dict[str, Any]] = json.loads((folder / SEAL).read_text())
    except FileNotFoundError:
        return "it was not finished"
    except (OSError, ValueError):
        return f"{SEAL} cannot be read"
    for name, stated in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != stated["bytes"]:
            return f"{name} has {path.stat().st_size:,} bytes instead of {stated['bytes']:,}"
        if checksum(path) != stated["sha256"]:
            return f"{name} was altered"
    return None


def sound(folder: Path, which: str) -> Path:
    """A checkpoint that is to be used and is as it was written."""
    if (wrong := flaw(folder)) is not None:
        raise UserError(f"the checkpoint {which}, {folder}, cannot be used: {wrong}")
    return folder


def update_of(folder: Path) -> int:
    """The number of updates behind a checkpoint."""
    return int(folder.name.removeprefix(PREFIX))


def checkpoints(folder: Path) -> list[Path]:
    """All checkpoints, the oldest first, whether complete or not."""
    found = [path for path in folder.glob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdigit()]
    return sorted(found, key=update_of)


def newest(folder: Path, say: Callable[[str], None], *, clear: bool = True) -> Path | None:
    """The newest complete checkpoint.

    Damaged ones are named and, where there is a complete one before them, removed by the process that writes: they
    would pass for newer than what comes next.
    """
    found = checkpoints(folder)
    flaws: dict[Path, str] = {}
    for path in reversed(found):
        wrong = flaw(path)
        if wrong is None:
            for damaged in flaws if clear else ():
                shutil.rmtree(damaged, ignore_errors=True)
            return path
        flaws[path] = f"{path.name}: {wrong}"
        say(f"leaving out {flaws[path]}")
        if clear and wrong == "it was not finished":
            shutil.rmtree(path)
    listed = "; ".join(flaws.values())
    if any("it was not finished" not in wrong for wrong in flaws.values()):
        raise UserError(
            f"no complete checkpoint is left in {folder} ({listed}); to start anew use --fresh or remove it"
        )
    return None


def rotate(folder: Path, *, keep: int, best: int | None, regular: Callable[[int], bool]) -> None:
    """Remove all but the newest checkpoint, the best, and the last `keep` of those that an undisturbed run makes."""
    found = checkpoints(folder)
    kept = {path for path in found if update_of(path) == best} | set(found[-1:]) | set(last(folder, keep, regular))
    for path in found:
        if path not in kept:
            # Without its seal a half-removed folder is no checkpoint.
            (path / SEAL).unlink(missing_ok=True)
            shutil.rmtree(path)


def last(folder: Path, number: int, regular: Callable[[int], bool]) -> list[Path]:
    """The last complete checkpoints that an undisturbed run makes too."""
    return [path for path in checkpoints(folder) if (path / SEAL).is_file() and regular(update_of(path))][-number:]


def averaged(folders: list[Path], name: str = "model.safetensors") -> dict[str, Any]:
    """The mean of the weights of several checkpoints, summed in float64."""
    import torch
    from safetensors.torch import load_file

    total: dict[str, torch.Tensor] = {}
    kinds: dict[str, torch.dtype] = {}
    for folder in folders:
        for key, tensor in load_file(folder / name).items():
            kinds[key] = tensor.dtype
            total[key] = total[key] + tensor.double() if key in total else tensor.double()
    # Buffers of whole numbers are the same in all checkpoints.
    return {key: (tensor / len(folders)).to(kinds[key]) for key, tensor in total.items()}


def write_atomically(path: Path, text: str) -> None:
    """The text in the file, or what was there before: never a part of it."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_text(text, encoding="utf-8")
    _sync(unfinished)
    unfinished.replace(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
