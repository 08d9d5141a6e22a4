"""Clients that leave, keep silent, or send or take without end: `BoundedConnection`, `EventStream`, `unless_left`."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar, cast

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 20.0
"""Seconds for the headers of a request to arrive, from the connection's start or from their first byte."""
READING_SECONDS = 60.0
"""Seconds for a client to read what waits for it, such as an event; then its connection is closed."""
MOST_CONNECTIONS = 4096
"""Fewer where the limit of open files is low: 256 are left for workers and forks."""
READ_BYTES = 16 << 10
"""Most bytes taken from a connection at once: a body of tiny chunks takes long to parse per byte."""


def allow_open_files() -> None:
    """Let this process open the files of MOST_CONNECTIONS, where the system lets it: shells set low limits."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(now, 2 * MOST_CONNECTIONS), most), most))


class BoundedConnection(H11Protocol):
    """HTTP/1.1 as uvicorn speaks it; of too many connections the one that has waited longest for a request closes."""

    _headers_until: float | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the headers of a first request."""
        super().connection_made(transport)
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]
        self._since = self.loop.time()
        self._await_headers()
        if len(self.connections) > min(MOST_CONNECTIONS, max(64, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 256)):
            waiting = [one for one in cast("set[BoundedConnection]", self.connections) if one.waits()]
            min(waiting, key=lambda one: one._since).transport.abort()

    def waits(self) -> bool:
        """Return whether no request is under way."""
        return self.cycle is None or self.cycle.response_complete

    def data_received(self, data: bytes) -> None:
        """Take what has come."""
        super().data_received(data)
        if self.waits() and not self.transport.is_closing():
            self._await_headers()

    def on_response_complete(self) -> None:
        """Let the next request begin."""
        self._headers_until, self._since = None, self.loop.time()
        super().on_response_complete()

    def _await_headers(self) -> None:
        """Close the connection unless headers are complete in time; uvicorn drops this timer when bytes come."""
        self._headers_until = self._headers_until or self.loop.time() + HEADER_SECONDS
        self.timeout_keep_alive_task = self.loop.call_at(self._headers_until, self.transport.abort)

    def pause_writing(self) -> None:
        """Give the client up where it does not read in time what waits."""
        super().pause_writing()
        self._reading = self.loop.call_later(READING_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """Go on."""
        super().resume_writing()
        self._reading.cancel()


Result = TypeVar("Result")


class EventStream(Response):
    """Events as they come, or pieces of one answer."""

    def __init__(self, first: str, events: AsyncGenerator[str, None], media_type: str = "text/event-stream") -> None:
        """Keep the first event, which has come, and those to come."""
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(headers=headers, media_type=media_type)
        del self.headers["content-length"]
        self._first, self._events = first, events

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the end of the events, or until the client has gone."""
        with contextlib.suppress(ClientDisconnect, OSError):
            await unless_left(self._send(send), receive)

    async def _send(self, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self._first.encode(), "more_body": True})
            async for one in self._events:
                await send({"type": "http.response.body", "body": one.encode(), "more_body": True})
                await asyncio.sleep(0)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._events.aclose()


async def unless_left(work: Coroutine[Any, Any, Result], receive: Receive) -> Result:
    """Return what `work` returns; cancel it and raise ClientDisconnect if the client leaves first."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
