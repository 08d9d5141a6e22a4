"""What a body that is refused says: the field, what it holds, and pydantic's reason."""

from __future__ import annotations

import json
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json

LONGEST_VALUE = 80
"""Characters of a value in a message."""
_MISSING = object()


def first_mistake(error: ValidationError, data: bytes) -> str:
    """Return one mistake of a body; of those of a union the one that lies deepest, as the kind that was meant.

    data   the body
    """
    if not data.strip():
        return "the body is empty: send a JSON object"
    mistakes = error.errors(include_url=False, include_input=False)
    first = mistakes[0]
    if first["type"] == "json_invalid":
        return f"the body is no JSON ({first['ctx']['error']}): send a JSON object"
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])  # a rule of ours, in a sentence
    body = from_json(data)
    same_field = [one for one in mistakes if one["loc"][:1] == first["loc"][:1]]
    found = [(*_follow(one["loc"], body, missing=one["type"] == "missing"), one["msg"]) for one in same_field]
    path, value, _ = max(found, key=lambda one: (len(one[0]), [part for part in one[0] if isinstance(part, int)]))
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)[1:] or "the body"
    got = "missing" if value is _MISSING else _short(value)
    reasons = dict.fromkeys(message[0].lower() + message[1:] for own, _, message in found if own == path)
    return f"{field[:200]} is {got}: {' or '.join(reasons)}"


def _follow(location: tuple[int | str, ...], value: Any, *, missing: bool) -> tuple[list[int | str], Any]:
    """Return the keys of a location without the kinds of unions, and what the body holds there."""
    path: list[int | str] = []
    for part in location:
        if (isinstance(value, dict) and part in value) or (isinstance(value, list) and isinstance(part, int)):
            value = value[part]  # type: ignore[index]  # a key of the one, or a place in the other
            path.append(part)
    return ([*path, location[-1]], _MISSING) if missing else (path, value)


def _short(value: Any) -> str:
    """Return a value as JSON, cut."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except ValueError:  # a number of thousands of digits
        return "a value that is too long to show"
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 3]}..."
