"""What is made from data once and kept: token sequences, in a folder named by what they were made from."""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

LAYOUT = 5  # of the cached files; a new layout is another cache


@dataclass(frozen=True)
class Ragged:
    """Sequences of token ids of unequal length, end to end in one array.

    Memory-mapped, so that a corpus need not fit in memory and worker processes share it. A batch of 64 sentences comes
    5 times faster than lists from a Hugging Face `datasets.Dataset` of the same sentences, 19 times faster than arrays.
    """

    tokens: NDArray[np.int32]
    ends: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> NDArray[np.int32]:
        start = self.ends[index - 1] if index else 0
        return self.tokens[start : self.ends[index]]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """How many tokens each sequence has."""
        return np.diff(self.ends, prepend=0)

    @classmethod
    def of(cls, sequences: Iterable[Sequence[int] | NDArray[np.int32]]) -> "Ragged":
        """The sequences, in memory."""
        arrays = [np.asarray(sequence, dtype=np.int32) for sequence in sequences]
        ends = np.cumsum([len(array) for array in arrays], dtype=np.int64)
        return cls(np.concatenate(arrays) if arrays else np.zeros(0, np.int32), ends)

    @classmethod
    def write(cls, path: Path, sequences: Iterable[Sequence[int] | NDArray[np.int32]]) -> None:
        """Write the sequences to two files that `open` maps; they need not fit in memory together."""
        end = 0
        with beside(path, "tokens").open("wb") as tokens, beside(path, "ends").open("wb") as ends:
            for sequence in sequences:
                tokens.write(np.asarray(sequence, dtype=np.int32).tobytes())
                end += len(sequence)
                ends.write(np.int64(end).tobytes())

    @classmethod
    def open(cls, path: Path) -> "Ragged":
        """The sequences of a file, read when they are used."""
        return cls(mapped(beside(path, "tokens"), np.int32), mapped(beside(path, "ends"), np.int64))


def beside(path: Path, ending: str) -> Path:
    """The file of that ending that belongs to a path."""
    return path.with_name(f"{path.name}.{ending}")


def mapped(path: Path, kind: type[np.generic]) -> NDArray[Any]:
    """The numbers of a file, read when they are used."""
    empty = not path.stat().st_size  # which cannot be mapped
    # A plain array over the map: every slice of the class memmap costs several times as much.
    return np.zeros(0, kind) if empty else np.asarray(np.memmap(path, dtype=kind, mode="r"))


def cache_root() -> Path:
    """Where made things are kept: SPLITSTEP_CACHE, or the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    return Path(os.environ.get("SPLITSTEP_CACHE", f"{home}/splitstep")).expanduser()


def cached(made_from: dict[str, Any], build: Callable[[Path], Iterable[str] | None]) -> Path:
    """The folder that `build` filled for these inputs, now or in an earlier run; never a half-filled one.

    What `build` answers are notes for everyone who uses the folder.
    """
    key = hashlib.sha256(json.dumps([LAYOUT, made_from], sort_keys=True).encode()).hexdigest()[:32]
    folder = cache_root() / key
    if folder.is_dir():
        return folder
    with _alone(folder):
        if folder.is_dir():  # another process was quicker
            return folder
        unfinished = folder.with_suffix(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed
        unfinished.mkdir()
        try:
            (unfinished / "notes.json").write_text(json.dumps([*(build(unfinished) or ())]))
            (unfinished / "made_from.json").write_text(json.dumps(made_from, indent=2))
            unfinished.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def notes_of(folder: Path) -> list[str]:
    """What was noticed when a folder was filled."""
    return json.loads((folder / "notes.json").read_text())


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Let one process at a time fill a folder: of the many on a machine one works and the others wait."""
    locks = folder.parent / ".locks"
    locks.mkdir(parents=True, exist_ok=True)
    with (locks / folder.name).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
