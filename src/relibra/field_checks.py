"""Checks of fields against their annotated types and ranges, by pydantic; failures become errors of relibra."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any, TypeVar, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from relibra.errors import RelibraError
from relibra.printable import excerpt

Kind = TypeVar("Kind")


def check_fields(kind: Any, values: Any, where: str, error: type[RelibraError]) -> None:
    """Check that `values` has exactly the fields of `kind`, with valid types and ranges (`Annotated` hints).

    kind     a dataclass or NamedTuple; fields with a default may be missing
    values   a mapping; scalars of numpy count as numbers
    where    begins the message
    raises   `error` with the first wrong field, what it holds, and the name that may have been meant
    """
    if isinstance(values, Mapping):
        values = {name: value.item() if _is_numpy_scalar(value) else value for name, value in values.items()}
    try:
        _model(kind).model_validate(values)
    except ValidationError as failure:
        problems = failure.errors(include_url=False)
        # A misspelt name first: it also leaves the right name missing.
        first = next((one for one in problems if one["type"] == "extra_forbidden"), problems[0])
        location, names = first["loc"], list(_model(kind).model_fields)
        name = str(location[0]) if location else "it"
        name += "".join(f"[{part}]" for part in location[1:] if isinstance(part, int))
        if first["type"] == "extra_forbidden":
            near = get_close_matches(name[:64], names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"allowed are {', '.join(names)}"
            raise error(f"{where} has unknown entry {name!r}: {hint}") from failure
        if first["type"] == "missing":
            raise error(f"{where} has no entry {name!r}: its entries are {', '.join(names)}") from failure
        message = first["msg"][0].lower() + first["msg"][1:]
        raise error(f"{where}: {name} is {excerpt(first['input'])}: {message}") from failure


def build(kind: type[Kind], values: Any, where: str, error: type[RelibraError]) -> Kind:
    """Build a dataclass from parsed TOML or JSON; nested dataclasses are built too, lists become tuples.

    raises   as `check_fields`; `error` also where the kind itself refuses its values
    """
    if isinstance(values, Mapping):
        kinds = get_type_hints(kind)
        values = {name: _part(kinds.get(name), value, f"{where}: {name}", error) for name, value in values.items()}
    check_fields(kind, values, where, error)
    try:
        return kind(**values)
    except RelibraError as failure:
        raise error(f"{where}: {failure}") from failure


def _is_numpy_scalar(value: Any) -> bool:
    """Return whether a value is a number of numpy, whose import, a tenth of a second, is spared here."""
    return type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0


def _part(kind: Any, value: Any, where: str, error: type[RelibraError]) -> Any:
    kind = next((one for one in get_args(kind) if is_dataclass(one)), kind)  # K of `K | None`
    if isinstance(kind, type) and is_dataclass(kind) and value is not None:
        return build(kind, value, where, error)
    if isinstance(value, list):
        return tuple(_part(None, row, where, error) for row in value)
    return value


@cache
def _model(kind: type[Any]) -> type[BaseModel]:
    if is_dataclass(kind):
        optional = {one.name: (one.default, one.default_factory) != (MISSING, MISSING) for one in fields(kind)}
    else:
        optional = {name: name in kind._field_defaults for name in kind._fields}
    hints = get_type_hints(kind, include_extras=True)
    entries: dict[str, Any] = {name: (hints[name], None if may_lack else ...) for name, may_lack in optional.items()}
    config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True)
    return create_model(kind.__name__, __config__=config, **entries)
