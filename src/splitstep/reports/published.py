"""The numbers that papers published, each beside what the same scheme reached here."""

from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from splitstep.tables import at

if TYPE_CHECKING:
    from splitstep.models.configuration import SplitstepConfig


def beside(
    published: Mapping[str, Any],
    schemes: Mapping[str, Mapping[str, Any]],
    reached: Callable[[str], list[float]],
    *,
    preset: str | None,
    changed: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> dict[str, Any]:
    """What a recipe quotes, each row with the schemes that it is of and what they reached.

    `schemes` has the settings of each by name, `reached` the values of its runs under the published metric. A number
    that stands alone, without settings of its own, is of the recipe's own `preset`, where it has one. What a scheme has
    `changed`, a row must name, or it is of another scheme.
    """
    rows = published.get("rows", [])
    if len(rows) == 1 and preset is not None and not settings_of(rows[0]):
        rows = [{"model.preset": preset, **rows[0]}]
    found = [
        row | {"here": [{"scheme": name, **spread(reached(name))} for name in _named(row, schemes, changed)]}
        for row in rows
    ]
    return {**published, **({"rows": found} if rows else {})}


def settings_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a published row is of, as settings of a recipe: its keys with a dot."""
    return {key: value for key, value in row.items() if "." in key}


def _named(
    row: Mapping[str, Any], schemes: Mapping[str, Mapping[str, Any]], changed: Mapping[str, Collection[str]]
) -> list[str]:
    wanted = settings_of(row)
    return [
        name
        for name, tables in schemes.items()
        if wanted and all(at(tables, k) == v for k, v in wanted.items()) and set(changed.get(name, ())) <= wanted.keys()
    ]


def whole_settings(tables: Mapping[str, Any], config: "SplitstepConfig") -> dict[str, Any]:
    """The settings of a recipe with what the configuration of its model has by default."""
    own = {"num_independent_layers": config.schedule(config.parts[0]).num_independent_layers}
    return {**tables, "model": config.to_dict() | own | tables["model"]}


# What a row has before it is held against another.
UNTESTED: dict[str, Any] = {"difference": None, "interval": None, "p_value": None}


def spread(values: list[float]) -> dict[str, Any]:
    """What the runs of a scheme reached, with mean and standard deviation where they are enough for them."""
    return {
        "values": values,
        "mean": mean(values),
        "std": float(np.std(values, ddof=1)) if len(values) > 1 else None,
    }


def mean(values: Iterable[float | None]) -> float | None:
    """The mean of what is known, where anything is."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None
