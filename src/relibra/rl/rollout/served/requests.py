"""Requests to a server: JSON there and back over pooled connections, within a size, within a time, no redirects."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import httpx
import msgspec

from relibra.errors import EngineError

ATTEMPTS = 4
"""Attempts per request; a server that restarts or is full may answer a later one."""
TIMED_OUT_ATTEMPTS = 2
"""Attempts where the time ran out, which may take long each."""
PAUSE_SECONDS = 0.5
"""Before the second attempt; each later pause is about twice as long."""
LONGEST_PAUSE_SECONDS = 15.0
BUSY = (429, 502, 503, 504)
"""Statuses of a server that may answer a later request."""
POOL_SIZE = 8
"""Most requests under way in a pool of connections."""
_SHOWN_BYTES = 300
"""Bytes of a refusal, and of an error, that are shown."""


class RequestFailed(Exception):
    """A request without a usable answer: why, and whether a repetition may help."""

    def __init__(self, why: str, *, may_pass: bool, timed_out: bool = False, status: int | None = None) -> None:
        super().__init__(why)
        self.may_pass, self.timed_out, self.status = may_pass, timed_out, status


def open_connections(url: str, key: str, most: int) -> httpx.AsyncClient:
    """Return connections to a server for at most so many requests at once; proxies of the environment are not used.

    url       as in http://127.0.0.1:8000
    key       sent as a bearer token; empty: none
    raises    EngineError for what is no address
    """
    try:
        base = httpx.URL(url)
    except (httpx.InvalidURL, ValueError) as error:
        raise EngineError(f"rollout.url {url!r} is no address: {error}") from error
    if base.scheme not in ("http", "https") or not base.host:
        raise EngineError(f"rollout.url {url!r} does not begin with http:// or https:// and a name")
    return httpx.AsyncClient(
        base_url=base,
        headers={"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {key}"} if key else {}),
        transport=_SmallPools(most, verify=_certificates() if base.scheme == "https" else False),
        follow_redirects=False,
        trust_env=False,
    )


class _SmallPools(httpx.AsyncBaseTransport):
    """Pools of connections, as many as are needed; one large pool looks at all its connections at each request."""

    def __init__(self, most: int, *, verify: ssl.SSLContext | bool) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=POOL_SIZE)
        self._open = partial(httpx.AsyncHTTPTransport, verify=verify, trust_env=False, limits=limits)
        self._asked: dict[httpx.AsyncHTTPTransport, int] = {}
        self._free = asyncio.Semaphore(most)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        async with self._free:
            pool = next((one for one, asked in self._asked.items() if asked < POOL_SIZE), None) or self._open()
            self._asked[pool] = self._asked.get(pool, 0) + 1
            try:
                return await pool.handle_async_request(request)
            finally:
                self._asked[pool] -= 1

    async def aclose(self) -> None:
        for pool in self._asked:
            await pool.aclose()


@cache
def _certificates() -> ssl.SSLContext:
    return ssl.create_default_context()


async def request_json(
    client: httpx.AsyncClient,
    path: str,
    body: Mapping[str, Any] | None = None,
    *,
    seconds: float,
    max_bytes: int,
    kind: Any = Any,
) -> Any:
    """Send JSON (None: GET) and return the JSON of the answer.

    seconds     for the whole request: connecting, the server's work, and reading the answer
    max_bytes   largest answer that is read
    kind        type that the answer is decoded into
    raises      RequestFailed; with status 200 where the answer is no JSON, or of another type
    """
    try:
        async with asyncio.timeout(seconds):
            data = await _exchange(client, path, body, max_bytes)
    except TimeoutError as error:
        raise RequestFailed(f"timed out after {seconds:g} s", may_pass=True, timed_out=True) from error
    except (OSError, httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        why = f"{type(error).__name__}: {_reason(error)}"
        raise RequestFailed(why, may_pass=isinstance(error, OSError | httpx.TransportError)) from error
    try:
        return msgspec.json.decode(data or b"{}", type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise RequestFailed(f"its answer cannot be read: {error}", may_pass=False, status=200) from error


async def _exchange(client: httpx.AsyncClient, path: str, body: Mapping[str, Any] | None, max_bytes: int) -> bytearray:
    """Send a body and return that of the answer."""
    request = client.build_request(
        "GET" if body is None else "POST",
        path,
        content=None if body is None else json.dumps(body).encode(),
        headers={} if body is None else {"Content-Type": "application/json"},
        timeout=None,  # the caller's holds for all of it
    )
    answer = await client.send(request, stream=True)
    try:
        if 300 <= answer.status_code < 400:
            target = answer.headers.get("Location", "nowhere")
            raise RequestFailed(
                f"status {answer.status_code} redirects to {target[:_SHOWN_BYTES]!r}, which is not followed: set "
                "rollout.url to the address of the engine itself",
                may_pass=False,
            )
        if answer.status_code != 200:
            text = (await _read(answer, _SHOWN_BYTES))[:_SHOWN_BYTES].decode(errors="replace")
            why = f"status {answer.status_code}, {text!r}"
            raise RequestFailed(why, may_pass=answer.status_code in BUSY, status=answer.status_code)
        declared = answer.headers.get("Content-Length", "0")
        data = bytearray() if int(declared) > max_bytes else await _read(answer, max_bytes)
        if max(len(data), int(declared)) > max_bytes:
            raise RequestFailed(f"its answer is longer than {max_bytes:,} bytes", may_pass=False)
        return data
    finally:
        await answer.aclose()


async def _read(answer: httpx.Response, max_bytes: int) -> bytearray:
    """Return the bytes of an answer as sent; of a longer one, some more than `max_bytes`."""
    data = bytearray()
    async for piece in answer.aiter_raw():
        data += piece
        if len(data) > max_bytes:
            break
    return data


def _reason(error: BaseException) -> str:
    """Return what an error says; of a connection that failed, what the system said."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno:
            return os.strerror(cause.errno) if cause.errno > 0 else str(cause)
        cause = cause.__cause__ or cause.__context__
    return str(error)[:_SHOWN_BYTES]  # it may repeat what the server sent


class ServerLost(EngineError):
    """A server that does not answer, and may later.

    timed_out   it took longer than a request may
    """

    def __init__(self, message: str, *, timed_out: bool) -> None:
        super().__init__(message)
        self.timed_out = timed_out


@dataclass
class Attempts:
    """Attempts at one thing, and when there have been enough.

    retry_seconds   attempts go on for so long, also after ATTEMPTS; TIMED_OUT_ATTEMPTS end them all the same
    """

    retry_seconds: float = 0.0
    failed: int = 0
    timed_out: int = 0
    began: float = field(default_factory=time.monotonic)

    def are_used_up(self, *, timed_out: bool) -> bool:
        """Count an attempt that failed, and return whether it was the last."""
        self.failed += 1
        self.timed_out += timed_out
        if timed_out:
            return self.timed_out >= min(ATTEMPTS, TIMED_OUT_ATTEMPTS)
        return self.failed >= ATTEMPTS and time.monotonic() - self.began >= self.retry_seconds


def pause_seconds(failed: int) -> float:
    """Return the seconds to wait after so many attempts that failed."""
    return min(PAUSE_SECONDS * (2 ** min(failed, 16) - 1), LONGEST_PAUSE_SECONDS)


def refused_with(error: EngineError) -> int | None:
    """Return the status that a server refused a request with; None: it failed otherwise."""
    return error.__cause__.status if isinstance(error.__cause__, RequestFailed) else None
