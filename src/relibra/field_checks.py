"""Checks of fields against their annotated types and ranges, by pydantic; mistakes are errors of relibra."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from relibra.errors import RelibraError
from relibra.printable import excerpt


def check_fields(kind: Any, values: Mapping[str, Any], where: str, error: type[RelibraError]) -> None:
    """Check that values are exactly the fields of a kind, of their types and in their ranges (`Annotated` hints).

    kind     a dataclass or NamedTuple; fields with a default may be missing
    where    begins the message
    raises   `error` with the first wrong field and what it holds
    """
    try:
        _model(kind).model_validate(values)
    except ValidationError as failure:
        first = failure.errors(include_url=False)[0]
        name = str(first["loc"][0]) if first["loc"] else "it"
        got = "missing" if first["type"] == "missing" else excerpt(first["input"])
        allowed = ", ".join(_model(kind).model_fields)
        hint = f"; fields are {allowed}" if first["type"] in ("missing", "extra_forbidden", "model_type") else ""
        raise error(f"{where}: {name} is {got}: {first['msg'][0].lower()}{first['msg'][1:]}{hint}") from failure


@cache
def _model(kind: type[Any]) -> type[BaseModel]:
    defaults = getattr(kind, "_field_defaults", None)
    if defaults is None:
        defaults = vars(kind)
    fields: dict[str, Any] = {
        name: (hint, defaults.get(name, ...)) for name, hint in get_type_hints(kind, include_extras=True).items()
    }
    config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True)
    return create_model(kind.__name__, __config__=config, **fields)
