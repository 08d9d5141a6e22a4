"""What a body that is refused says: the field, what it holds, and what it may hold."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

LONGEST_VALUE = 80
"""Characters of a value in a sentence."""
Schema = Mapping[str, Any]
_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")


def first_mistake(error: ValidationError, data: bytes, kind: type[BaseModel]) -> str:
    """Return the first thing that is wrong with a body, in a sentence.

    data   the body
    kind   what it was read as
    """
    if not data.strip():
        return "the body is empty: send a JSON object"
    mistakes = error.errors(include_url=False, include_input=False)
    first = mistakes[0]
    if first["type"] == "json_invalid":
        return f"the body is no JSON ({first['ctx']['error']}): send a JSON object"
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])  # a rule of ours, in a sentence
    top = _schema_of(kind)
    names, value, schema = _follow(first["loc"], from_json(data), top)
    field = "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in names)[1:] or "the body"
    allowed = f"it must be {_in_words(schema, top)}"
    if value is _MISSING:
        return f"{field[:200]} is missing: {allowed}"
    return f"{field[:200]} is {_short(value)}{_entry(mistakes, names, value)}: {allowed}"


_MISSING = object()


@cache
def _schema_of(kind: type[BaseModel]) -> Schema:
    return kind.model_json_schema()


def _follow(path: Sequence[int | str], value: Any, top: Schema) -> tuple[list[int | str], Any, Schema]:
    """Return names, value and schema of the field in which a mistake is: a union is one field."""
    names: list[int | str] = []
    schema = top
    for part in path:
        choices = _choices(schema, top)
        inner = choices[0] if len(choices) == 1 else {}
        if isinstance(part, int) and "items" in inner:
            schema = inner["items"]
        elif part in inner.get("properties", ()):
            schema = inner["properties"][part]
        else:
            break
        names.append(part)
        value = value.get(part, _MISSING) if isinstance(value, dict) else value[part]
    return names, value, schema


def _entry(mistakes: Sequence[Any], names: list[int | str], value: Any) -> str:
    """Return which entry of a list is wrong, where the union that was tried allows several kinds of lists."""
    here = len(names)
    tried: dict[Any, int] = {}  # of each kind of list, its first wrong entry
    for one in mistakes:
        rest = one["loc"][here:]
        if list(one["loc"][:here]) == names and len(rest) > 1 and isinstance(rest[1], int):
            tried.setdefault(rest[0], rest[1])
    number = max(tried.values(), default=0)
    return f", with {_short(value[number])} as entry {number}" if number and isinstance(value, list) else ""


def _short(value: Any) -> str:
    """Return a value as JSON, cut."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except ValueError:  # a number of thousands of digits
        return "a value that is too long to show"
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 3]}..."


def _choices(schema: Schema, top: Schema) -> list[Schema]:
    """Return what a schema may be, references followed, null left out."""
    if "$ref" in schema:
        return _choices(top["$defs"][schema["$ref"].rpartition("/")[2]], top)
    if "anyOf" in schema:
        return [found for one in schema["anyOf"] for found in _choices(one, top)]
    return [] if schema.get("type") == "null" else [schema]


def _in_words(schema: Schema, top: Schema, *, many: bool = False) -> str:
    """Return what a field may be.

    many   as the entries of a list
    """
    found = list(dict.fromkeys(_one_in_words(one, top, many) for one in _choices(schema, top)))
    return f"{', '.join(found[:-1])} or {found[-1]}" if len(found) > 1 else found[0]


def _one_in_words(schema: Schema, top: Schema, many: bool) -> str:
    kind = schema.get("type")
    if "const" in schema:
        return json.dumps(schema["const"])
    if kind == "string":
        return ("texts" if many else "a text") + _length(schema, "minLength", "maxLength", " of {} characters")
    if kind in ("integer", "number"):
        noun = "whole number" if kind == "integer" else "number"
        return (f"{noun}s" if many else f"a {noun}") + _range(schema, whole=kind == "integer")
    if kind == "boolean":
        return "true or false"
    if kind == "array":
        number = _length(schema, "minItems", "maxItems", " {}")
        return f"{'lists' if many else 'a list'} of{number} {_in_words(schema['items'], top, many=True)}"
    fields = schema.get("required", ())
    named = f" with {' and '.join(fields)}" if fields else ""
    return ("JSON objects" if many else "a JSON object") + named


def _length(schema: Schema, least: str, most: str, words: str) -> str:
    low, high = schema.get(least), schema.get(most)
    if high is None:
        return words.format(f"at least {low}") if low else ""
    return words.format(f"{low} to {high}" if low else f"at most {high}")


def _range(schema: Schema, *, whole: bool) -> str:
    low, above, high, below = (schema.get(one) for one in _BOUNDS)
    if whole:
        low = above + 1 if above is not None else low
        high, below = (below - 1 if below is not None else high), None
        above = None
    if low is not None and high is not None:
        return f" from {low} to {high}"
    said = [
        f"{word} {bound}"
        for word, bound in (("at least", low), ("above", above), ("at most", high), ("below", below))
        if bound is not None
    ]
    return f" {' and '.join(said)}" if said else ""
