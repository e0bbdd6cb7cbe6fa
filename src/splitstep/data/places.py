"""Where data sets lie: in the folder that the user names, or fetched from the Hugging Face hub."""

import os
from collections.abc import Callable
from pathlib import Path, PurePath

from splitstep.data import hub
from splitstep.solver.errors import UserError


def data_folder(root: str | None, name: str, say: Callable[[str], None] = lambda line: None) -> Path:
    """The folder of a data set: below the root, or below SPLITSTEP_DATA, or else made of what the hub has."""
    below = root or os.environ.get("SPLITSTEP_DATA")
    if below:
        return _existing(Path(below).expanduser(), name)
    first, *rest = PurePath(name).parts or ("",)
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
