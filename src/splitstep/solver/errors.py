"""What a user did wrong, said in one line: what came, what is allowed, what is near."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import TypeVar

Entry = TypeVar("Entry")
MANY = 12  # names, more of which are not listed where one is near


class UserError(ValueError):
    """A wrong name, value or combination; the command line prints it and leaves with exit code 2."""


class RunError(RuntimeError):
    """What failed while running, through no wrong use; the command line prints it and leaves with exit code 1."""


def unknown(kind: str, name: object, allowed: Iterable[str]) -> UserError:
    """The error for a name that is in no table, with the names that are."""
    names = list(allowed)
    near = [known for known in names if known.endswith(f"/{name}")] or get_close_matches(str(name), names, n=1)
    if near and len(names) > MANY:
        return UserError(f"unknown {kind} {name!r}; did you mean {near[0]!r}?")
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return UserError(f"unknown {kind} {name!r}; choose from {', '.join(names)}{hint}")


def lookup(kind: str, name: str, table: Mapping[str, Entry]) -> Entry:
    """The entry of that name, or the error that lists what there is."""
    if name not in table:
        raise unknown(kind, name, table)
    return table[name]
