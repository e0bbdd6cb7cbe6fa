"""Where data sets lie: in the folder that the user names, or fetched from the Hugging Face hub."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path, PurePath

from splitstep.data import hub
from splitstep.solver.errors import UserError

_fetching = ContextVar("fetching", default=True)


@contextmanager
def nothing_fetched() -> Iterator[None]:
    """Look at data that are here; what would come from the hub is refused."""
    before = _fetching.set(False)
    try:
        yield
    finally:
        _fetching.reset(before)


def data_folder(root: str | None, name: str, say: Callable[[str], None] = lambda line: None) -> Path:
    """The folder of a data set: below the root, or below SPLITSTEP_DATA, or else made of what the hub has."""
    below = root or os.environ.get("SPLITSTEP_DATA")
    if below:
        return _existing(Path(below).expanduser(), name)
    first, *rest = PurePath(name).parts or ("",)
    if first in hub.SOURCES and not _fetching.get():
        raise UserError(f"neither data.root nor SPLITSTEP_DATA names a folder that has {name}")
    if first in hub.SOURCES:
        return _existing(hub.fetched(first, say), str(PurePath(*rest)))
    raise UserError(
        f"where are the data? data.root in the recipe, or SPLITSTEP_DATA, names the folder that has {name or 'them'}; "
        f"without it, the Hugging Face hub has {', '.join(hub.SOURCES)}"
    )


def _existing(root: Path, name: str) -> Path:
    if not root.is_dir():
        raise UserError(f"{root}, which data.root or SPLITSTEP_DATA names, is no folder")
    folder = root / name
    if not folder.is_dir():
        raise UserError(f"the folder {folder} (data.folder) does not exist")
    return folder
