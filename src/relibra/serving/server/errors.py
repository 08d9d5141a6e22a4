"""Errors of requests: each a status and one sentence, in the form that OpenAI's clients read."""

from __future__ import annotations

import json
import logging
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from pydantic_core import from_json
from starlette.exceptions import HTTPException

from relibra.errors import RelibraError, in_a_line

_log = logging.getLogger(__name__)
LONGEST_VALUE = 80
"""Characters of a value in a message."""
_MISSING = object()


class RequestError(RelibraError):
    """A request that gets no answer.

    status        of HTTP
    retry_after   seconds after which the client may try again; 0: no hint
    """

    status = 500

    def __init__(self, message: str, *, retry_after: int = 0) -> None:
        """Keep the sentence."""
        super().__init__(message)
        self.retry_after = retry_after


class BadRequest(RequestError, ValueError):
    """A request that cannot be answered: the client's to change."""

    status = 400


class WrongKey(RequestError):
    """A request without the key of this server."""

    status = 401


class UnknownPath(RequestError):
    """A path or a model that this server does not have."""

    status = 404


class TooLarge(RequestError):
    """A body that is not read."""

    status = 413


class NotJson(RequestError):
    """A body that does not say that it is JSON."""

    status = 415


class Overloaded(RequestError):
    """A queue that is full."""

    status = 429


class Unavailable(RequestError):
    """Workers that are gone, or did not answer in time."""

    status = 503


class Disconnected(Exception):
    """The client has gone; nobody reads an answer."""


def add_error_handlers(app: FastAPI) -> None:
    """Let an application answer each error by one sentence."""
    app.add_exception_handler(RelibraError, _answer_error)
    app.add_exception_handler(HTTPException, _answer_path)
    app.add_exception_handler(Disconnected, _answer_nobody)
    app.add_exception_handler(Exception, _log_failure)


def error_body(error: Exception) -> dict[str, Any]:
    """Return an error as OpenAI's clients read it."""
    return _body(str(error), error.status if isinstance(error, RequestError) else 500)


def _body(message: str, status: int) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 429 else "overloaded_error" if status == 429 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


async def _answer_error(_request: Request, error: Exception) -> Response:
    status = error.status if isinstance(error, RequestError) else 500
    after = error.retry_after if isinstance(error, RequestError) else 0
    headers = {"Retry-After": str(after)} if after else {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error_body(error), status_code=status, headers=headers)


async def _answer_path(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status, path, headers = error.status_code, request.url.path[:200], dict(error.headers or {})
    if status == 404:
        message = f"{request.method} {path} is no path of this server"
    elif status == 405:
        message = f"{path} does not answer {request.method}: send {headers.get('Allow', 'another method')}"
    else:
        message = str(error.detail)
    return JSONResponse(_body(message, status), status, headers)


async def _answer_nobody(_request: Request, _error: Exception) -> Response:
    return Response(status_code=499)  # as nginx counts it; nobody reads it


async def _log_failure(_request: Request, error: Exception) -> Response:
    _log.error("a request failed", exc_info=error)
    return JSONResponse(error_body(RelibraError(f"the server failed: {in_a_line(error)}")), status_code=500)


def validation_message(error: ValidationError, data: bytes) -> str:
    """Return one error of a body; of those of a union the one that lies deepest, as the kind that was meant.

    data   the body
    """
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
