"""The tables of recipes as plain data: the files that come with the package, values by their path, TOML as text."""

import json
import tomllib
from collections.abc import Iterable, Mapping
from datetime import date, time
from pathlib import Path
from typing import Any

from splitstep.solver.errors import UserError, unknown

RECIPES = Path(__file__).parent / "recipes"

# Of each pair a recipe has one; the one that the command line names takes the place of the other.
_PAIRS = [("training.updates", "training.epochs"), ("training.tokens_per_update", "training.batch_size")]
EITHER = {key: other for pair in _PAIRS for key, other in (pair, pair[::-1])}


def packaged() -> dict[str, Path]:
    """The recipes that come with the package, by name."""
    return {
        str(path.relative_to(RECIPES).with_suffix("")).replace("\\", "/"): path
        for path in sorted(RECIPES.rglob("*.toml"))
    }


def read(name: str) -> dict[str, Any]:
    """The tables of a recipe file or of a packaged recipe."""
    recipes = packaged()
    path = recipes.get(name, Path(name))
    if not path.is_file():
        if path.suffix == ".toml" or ("/" in name and name.split("/")[0] not in {r.split("/")[0] for r in recipes}):
            raise UserError(f"no recipe file {name}")
        raise unknown("recipe", name, recipes)
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is no TOML: {error}") from None


def setting(text: str) -> tuple[str, Any]:
    """A KEY=VALUE of the command line; the value as TOML writes it, or as it stands."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UserError(f"a setting is KEY=VALUE, got {text!r}")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value


def with_setting(tables: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """The tables with one value exchanged, at a path such as `training.seed`."""
    first, _, rest = key.partition(".")
    if not rest:
        return {**tables, first: value}
    inner = tables.get(first, {})
    if not isinstance(inner, dict):
        raise UserError(f"{first} is no section, so there is no {key}")
    return {**tables, first: with_setting(inner, rest, value)}


def at(tables: Mapping[str, Any], key: str) -> Any:
    """The value at a path such as `training.seed`, or None."""
    first, _, rest = key.partition(".")
    inner = tables.get(first)
    return at(inner, rest) if rest and isinstance(inner, Mapping) else inner


def without(tables: Mapping[str, Any], key: str | None) -> dict[str, Any]:
    """The tables without a key such as `training.epochs`."""
    first, _, rest = (key or "").partition(".")
    if first not in tables or (rest and not isinstance(tables[first], Mapping)):
        return dict(tables)
    if not rest:
        return {name: value for name, value in tables.items() if name != first}
    return {**tables, first: without(tables[first], rest)}


def with_settings(tables: Mapping[str, Any], settings: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """The tables under settings, which stand over a grid too; of two keys that exclude each other the set one stays."""
    for key, value in settings:
        other = EITHER.get(key)
        tables = with_setting(without(tables, other), key, value)
        if isinstance(tables.get("grid"), Mapping):
            grid = {name: values for name, values in tables["grid"].items() if name not in (key, other)}
            tables = {**tables, "grid": grid}
    return dict(tables)


def read_json(path: Path) -> dict[str, Any]:
    """What a run, a comparison or a report wrote about itself."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is no JSON, or damaged ({error})") from None


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The entries of a file with one a line."""
    with path.open(encoding="utf-8") as lines:  # str.splitlines() would also cut where a text has a U+2028
        try:
            return [json.loads(line) for line in lines]
        except ValueError as error:
            raise UserError(f"{path} has a line that is no JSON, or damaged ({error})") from None


def differences(old: Mapping[str, Any], new: Mapping[str, Any], path: str = "") -> dict[str, tuple[Any, Any]]:
    """The keys at which two recipes differ, with both values."""
    found: dict[str, tuple[Any, Any]] = {}
    for key in [*old, *(key for key in new if key not in old)]:
        name, a, b = f"{path}{key}", old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found |= differences(a, b, f"{name}.")
        elif a != b:
            found[name] = (a, b)
    return found


def toml(tables: Mapping[str, Any], path: str = "") -> str:
    """Tables as TOML text."""
    simple = {key: value for key, value in tables.items() if not isinstance(value, dict)}
    lines = [f"{_key(key)} = {_value(value)}" for key, value in simple.items()]
    text = "".join(f"{line}\n" for line in lines)
    for key, value in tables.items():
        if isinstance(value, dict):
            name = f"{path}{_key(key)}"
            inner = toml(value, f"{name}.")
            header = f"[{name}]\n" if not value or any(not isinstance(v, dict) for v in value.values()) else ""
            text += f"\n{header}{inner}" if header else inner
    return text


def _key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else json.dumps(key)


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{_key(key)} = {_value(inner)}' for key, inner in value.items())} }}"
    if isinstance(value, str | bool):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # which TOML takes escaped only
    if isinstance(value, date | time):
        return value.isoformat()
    return repr(value)
