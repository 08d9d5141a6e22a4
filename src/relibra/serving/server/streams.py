"""`EventStream`: a streamed answer that ends when its client leaves, or stops reading."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

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
