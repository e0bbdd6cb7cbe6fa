"""The published files that slow tests read, where they are."""

import os
from pathlib import Path

import pytest

from splitstep.data.files import find, lines


def folder(name: str) -> Path:
    """A data set's folder, or a skipped test."""
    root = os.environ.get("SPLITSTEP_DATA")
    if not root or not Path(root, name).is_dir():
        pytest.skip(f"no data set {name} in SPLITSTEP_DATA")
    return Path(root, name)


def published(name: str, file: str) -> list[str]:
    """The lines of a published file."""
    return list(lines(find(folder(name), file)))
