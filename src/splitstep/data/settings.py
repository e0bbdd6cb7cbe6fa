"""Settings that check themselves: sections of a recipe, with errors a user can act on."""

from collections.abc import Mapping
from textwrap import shorten
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from splitstep.solver.errors import UserError, unknown

Model = TypeVar("Model", bound=BaseModel)


class Section(BaseModel):
    """A table of a recipe: frozen, its types taken literally, an unknown key an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def one_held_out(valid: object, valid_every: int | None) -> None:
    """Refuse a split for validation that is named twice."""
    if valid and valid_every:
        raise ValueError("data.valid names files, so data.valid_every holds nothing out; give one of them")


def validated(schema: type[Model], values: Mapping[str, Any], *, path: str = "") -> Model:
    """The values as that section, or one line that names the key, what came and what is allowed."""
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        raise _explained(schema, error, path) from None


def _explained(schema: type[BaseModel], error: ValidationError, path: str) -> UserError:
    first = error.errors()[0]
    keys = [key for key in first["loc"] if isinstance(key, str) and key.isidentifier()]  # others name one of two types
    name = ".".join([*([path] if path else []), *keys])
    if first["type"] == "extra_forbidden":
        return unknown("key", name, _names(schema, keys[:-1], path))
    if first["type"] == "missing":
        return UserError(f"the recipe lacks {name}")
    message = first["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    if first["type"] == "value_error" and isinstance(first["input"], dict):  # keys that do not fit together
        return UserError(message)
    return UserError(f"{name}: {message}, got {shorten(repr(first['input']), 80)}")


def _names(schema: type[BaseModel], parents: list[str], path: str) -> list[str]:
    for key in parents:
        inner = schema.model_fields[key].annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            schema = inner
    prefix = ".".join([*([path] if path else []), *parents])
    return [f"{prefix}.{name}" if prefix else name for name in schema.model_fields]
