"""One request to a server: JSON there and back, within a size, within a time, without redirects."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

_CHUNK_BYTES = 1 << 16
_SHOWN_BYTES = 300
"""Bytes of a refusal that are shown."""
BUSY = (429, 502, 503, 504)
"""Statuses of a server that may answer a later request."""


class RequestFailed(Exception):
    """A request without a usable answer: why, and whether a repetition may help."""

    def __init__(self, why: str, *, may_pass: bool, timed_out: bool = False) -> None:
        """Keep the reason."""
        super().__init__(why)
        self.may_pass, self.timed_out = may_pass, timed_out


def post_json(url: str, body: Mapping[str, Any], *, seconds: float, max_bytes: int) -> Any:
    """Send JSON and return the JSON of the answer.

    seconds     for the whole request: connecting, the server's work, and reading the answer
    max_bytes   largest answer that is read
    raises      RequestFailed
    """
    deadline = time.monotonic() + seconds
    try:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise RequestFailed("the address does not begin with http:// or https:// and a name", may_pass=False)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname, parts.port, timeout=seconds)  # no proxy: engines run beside the trainer
        try:
            connection.connect()
            with _ended_at(deadline, connection.sock):
                data = _exchange(connection, parts.path, json.dumps(body).encode(), max_bytes)
            if time.monotonic() >= deadline:  # cut off here, which an answer without a length does not show
                raise TimeoutError
        finally:
            connection.close()
    except (OSError, http.client.HTTPException, ValueError) as error:
        if time.monotonic() >= deadline or isinstance(error, TimeoutError):
            raise RequestFailed(f"timed out after {seconds:g} s", may_pass=True, timed_out=True) from error
        raise RequestFailed(f"{type(error).__name__}: {error}", may_pass=not isinstance(error, ValueError)) from error
    try:
        return json.loads(data or b"{}")
    except (ValueError, RecursionError) as error:
        raise RequestFailed(f"{type(error).__name__}: {error}", may_pass=False) from error


def _exchange(connection: http.client.HTTPConnection, path: str, body: bytes, max_bytes: int) -> bytes:
    """Send a body and return that of the answer."""
    connection.request("POST", path or "/", body, {"Content-Type": "application/json", "Connection": "close"})
    answer = connection.getresponse()
    if 300 <= answer.status < 400:
        target = answer.headers.get("Location", "nowhere")
        raise RequestFailed(
            f"status {answer.status} redirects to {target[:_SHOWN_BYTES]!r}, which is not followed: set rollout.url to "
            "the address of the engine itself",
            may_pass=False,
        )
    if answer.status != 200:
        said = answer.read(_SHOWN_BYTES).decode(errors="replace")
        raise RequestFailed(f"status {answer.status}, {said!r}", may_pass=answer.status in BUSY)
    data = bytearray()
    while piece := answer.read(min(_CHUNK_BYTES, max_bytes + 1 - len(data))):
        data += piece
        if max(len(data), answer.length or 0) > max_bytes:
            raise RequestFailed(f"its answer is longer than {max_bytes:,} bytes", may_pass=False)
    if answer.length:
        raise http.client.IncompleteRead(bytes(data), answer.length)
    return bytes(data)


@contextmanager
def _ended_at(deadline: float, connected: socket.socket) -> Iterator[None]:
    """Close a connection at a time: a limit of the socket alone begins anew with each byte that arrives."""

    def end() -> None:
        with suppress(OSError):
            connected.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(max(0.0, deadline - time.monotonic()), end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
