"""Errors of requests: an `HTTPException` with one sentence becomes what OpenAI's clients read."""

from __future__ import annotations

import json
import logging
from http import HTTPStatus
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from relibra.errors import in_a_line

_log = logging.getLogger(__name__)
LONGEST_VALUE = 80
"""Characters of a value in a message."""
_MISSING = object()
_logged = set[type[Exception]]()


def error_body(message: str, status: int) -> dict[str, Any]:
    """Return an error as OpenAI's clients read it."""
    kind = "invalid_request_error" if status < 429 else "overloaded_error" if status == 429 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


async def _answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status, path, headers = error.status_code, request.url.path[:200], dict(error.headers or {})
    message = error.detail
    if message == HTTPStatus.NOT_FOUND.phrase:
        message = f"{request.method} {path} is no path of this server"
    elif message == HTTPStatus.METHOD_NOT_ALLOWED.phrase:
        message = f"{path} does not answer {request.method}: send {headers.get('Allow', 'another method')}"
    return JSONResponse(error_body(message, status), status, headers)


async def _answer_nobody(_request: Request, _error: Exception) -> Response:
    return Response(status_code=499)  # as nginx counts it; nobody reads it


ERROR_HANDLERS: dict[int | type[Exception], Any] = {HTTPException: _answer_error, ClientDisconnect: _answer_nobody}
"""Of the application: each error is answered by one sentence."""


def answer_failure(error: Exception) -> Response:
    """Return the answer to a request that failed through a mistake of ours; the first of a kind is logged."""
    if (kind := type(error)) not in _logged:
        _logged.add(kind)
        _log.error("a request failed; others that fail with %s are only counted", kind.__name__, exc_info=error)
    return JSONResponse(error_body(f"the server failed: {in_a_line(error)}", 500), status_code=500)


def validation_message(error: ValidationError, data: bytes) -> str:
    """Return one error of a body; of a union the deepest one, whose kind was probably meant."""
    if not data.strip():
        return "the body is empty: send a JSON object"
    details = error.errors(include_url=False, include_input=False)
    first = details[0]
    if first["type"] == "json_invalid":
        return f"the body is no JSON ({first['ctx']['error']}): send a JSON object"
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])  # a rule of ours, in a sentence
    body = from_json(data)
    same_field = [one for one in details if one["loc"][:1] == first["loc"][:1]]
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
