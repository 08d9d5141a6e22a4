"""Answers that are errors: each a status and one sentence, in the form that OpenAI's clients read."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from relibra.errors import RelibraError, in_a_line

_log = logging.getLogger(__name__)


class Refusal(RelibraError):
    """A request that gets no answer.

    status        of HTTP
    retry_after   seconds after which the client may try again; 0: no hint
    """

    status = 500

    def __init__(self, message: str, *, retry_after: int = 0) -> None:
        """Keep the sentence."""
        super().__init__(message)
        self.retry_after = retry_after


class BadRequest(Refusal, ValueError):
    """A request that cannot be answered: the client's to change."""

    status = 400


class WrongKey(Refusal):
    """A request without the key of this server."""

    status = 401


class UnknownPath(Refusal):
    """A path or a model that this server does not have."""

    status = 404


class TooLarge(Refusal):
    """A body that is not read."""

    status = 413


class NotJson(Refusal):
    """A body that does not say that it is JSON."""

    status = 415


class Overloaded(Refusal):
    """A queue that is full."""

    status = 429


class Unavailable(Refusal):
    """Workers that are gone, or did not answer in time."""

    status = 503


class Disconnected(Exception):
    """The client has gone; nobody reads an answer."""


def refuse_with_sentences(app: FastAPI) -> None:
    """Let an application answer each error by one sentence."""
    app.add_exception_handler(Refusal, _refuse)
    app.add_exception_handler(RelibraError, _refuse)
    app.add_exception_handler(HTTPException, _refuse_path)
    app.add_exception_handler(Disconnected, _end)
    app.add_exception_handler(Exception, _report)


def error_body(error: Exception) -> dict[str, Any]:
    """Return an error as OpenAI's clients read it."""
    return _body(str(error), error.status if isinstance(error, Refusal) else 500)


def _body(message: str, status: int) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 429 else "overloaded_error" if status == 429 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


async def _refuse(_request: Request, error: Exception) -> Response:
    status = error.status if isinstance(error, Refusal) else 500
    after = error.retry_after if isinstance(error, Refusal) else 0
    headers = {"Retry-After": str(after)} if after else {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error_body(error), status_code=status, headers=headers)


async def _refuse_path(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status, path, headers = error.status_code, request.url.path[:200], dict(error.headers or {})
    if status == 404:
        message = f"{request.method} {path} is no path of this server"
    elif status == 405:
        message = f"{path} does not answer {request.method}: send {headers.get('Allow', 'another method')}"
    else:
        message = str(error.detail)
    return JSONResponse(_body(message, status), status, headers)


async def _end(_request: Request, _error: Exception) -> Response:
    return Response(status_code=499)  # as nginx counts it; nobody reads it


async def _report(_request: Request, error: Exception) -> Response:
    _log.error("a request failed", exc_info=error)
    return JSONResponse(error_body(RelibraError(f"the server failed: {in_a_line(error)}")), status_code=500)
