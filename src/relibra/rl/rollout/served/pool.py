"""Several servers that hold the same weights: requests are spread over those that answer, and repeated elsewhere."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

import httpx

from relibra.errors import EngineError
from relibra.rl.rollout.served.client import ServerClient
from relibra.rl.rollout.served.requests import Attempts, ServerLost, pause_seconds

_log = logging.getLogger(__name__)

SETTLE_SECONDS = 5.0
"""Longest time that servers which answer wait for the others before the first request."""
SEEN_SECONDS = 5.0
"""After an answer a server is trusted to be the same for so long; to start one takes longer."""
TOGETHER = 4
"""Requests that a server may have beyond twice those of the least busy one, so that groups stay together."""

T = TypeVar("T")
R = TypeVar("R")


@dataclass(eq=False)
class PooledServer:
    """A server, and what is known of it during a rollout.

    under_way    how many requests it has
    is_up        it can be asked
    on_trial     it was lost, which was logged, and has not answered a request since
    failures     losses since it last answered
    losses       how often it was lost in all
    seen         when it last answered with the weights of the run
    why          it could not be asked the last time; empty: it always could, or was not tried yet
    is_given_up  it has not answered for `retry_seconds`; it is still tried
    """

    client: ServerClient
    connection: httpx.AsyncClient
    under_way: int = 0
    is_up: bool = False
    on_trial: bool = False
    failures: int = 0
    losses: int = 0
    seen: float = -math.inf
    why: str = ""
    is_given_up: bool = False
    down: asyncio.Event = field(default_factory=asyncio.Event)
    checking: asyncio.Lock = field(default_factory=asyncio.Lock)


class ServerPool:
    """Sends the requests of a group to one server, to others while it is busy, and lost ones again to others.

    A request counts when its whole answer is there; so nothing is lost, and nothing is taken twice.
    """

    def __init__(self, servers: Sequence[PooledServer], *, retry_seconds: float) -> None:
        """Take servers; each is tried before it gets a request.

        retry_seconds   during which a server that does not answer is waited for, and a request repeated
        """
        self.servers, self.retry_seconds = list(servers), retry_seconds
        self._changed = asyncio.Condition()
        for server in self.servers:
            server.down.set()

    async def settle(self) -> None:
        """Wait until every server was tried once, a few seconds at most; so the first does not get all requests."""
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_SECONDS), self._changed:
                await self._changed.wait_for(lambda: all(one.is_up or one.why for one in self.servers))

    async def keep(self, server: PooledServer) -> None:
        """Bring a server up, and again each time that it is lost, until cancelled; raises EngineError if it refuses."""
        while True:
            await server.down.wait()
            await self._bring_up(server)

    async def request(self, send: Callable[[PooledServer], Awaitable[R]], *, preferred: int) -> R:
        """Return the answer to a request that any of the servers may get.

        preferred   number, modulo servers, of the one that gets it unless it is much busier than others
        raises      EngineError where no server is left, or the request failed too often
        """
        attempts, lost_by = Attempts(self.retry_seconds), set[PooledServer]()
        while True:
            server = await self._choose(lost_by, preferred)
            losses = server.losses
            server.under_way += 1
            try:
                await self._check_again(server)
                answer = await send(server)
            except ServerLost as lost:
                lost_by.add(server)
                self._lose(server, losses, lost)
                if attempts.are_used_up(timed_out=lost.timed_out):
                    number = f" ({attempts.failed} attempts)" if attempts.failed > 1 else ""
                    raise EngineError(f"{lost}{number}") from lost.__cause__
            else:
                if server.losses == losses:  # not lost since: an answer on its way says nothing of what came after
                    server.on_trial, server.failures, server.seen = False, 0, time.monotonic()
                return answer
            finally:
                server.under_way -= 1

    async def _check_again(self, server: PooledServer) -> None:
        """Look at a server that has not answered lately: it may have been started again; raises ServerLost."""
        async with server.checking:
            if time.monotonic() - server.seen > SEEN_SECONDS:
                await server.client.bring_up(server.connection)
                server.seen = time.monotonic()

    async def _choose(self, lost_by: set[PooledServer], preferred: int) -> PooledServer:
        """Wait until a server is up; return the preferred one, or the next where it is busy or lost this request.

        raises    EngineError where none is left
        """
        async with self._changed:
            await self._changed.wait_for(
                lambda: any(one.is_up for one in self.servers) or all(one.is_given_up for one in self.servers)
            )
        up = [one for one in self.servers if one.is_up]
        if not up:
            raise EngineError(none_left([one.why for one in self.servers], self.retry_seconds))
        up = [one for one in up if not one.on_trial or one.under_way == 0] or up
        number, most = len(self.servers), TOGETHER + 2 * min(one.under_way for one in up)
        return min(
            up, key=lambda one: (one in lost_by, one.under_way >= most, (self.servers.index(one) - preferred) % number)
        )

    def _lose(self, server: PooledServer, losses: int, lost: ServerLost) -> None:
        """Note that a server lost a request that began after `losses` losses; of several such, the first one counts."""
        if server.losses != losses:
            return
        server.losses, server.failures = losses + 1, server.failures + 1
        self._put_on_trial(server, lost)
        server.is_up = False
        server.down.set()

    def _put_on_trial(self, server: PooledServer, lost: ServerLost) -> None:
        """Note that a server does not answer, and log once what becomes of its requests."""
        if not server.on_trial:
            waiting = f"waiting up to {self.retry_seconds:g} s for it"
            _log.warning("%s; %s", lost, "its requests go to the others" if len(self.servers) > 1 else waiting)
        server.on_trial, server.why = True, str(lost)

    async def _bring_up(self, server: PooledServer) -> None:
        attempts = Attempts(self.retry_seconds, failed=server.failures)
        while not server.is_up:
            await asyncio.sleep(pause_seconds(attempts.failed))
            try:
                await server.client.bring_up(server.connection)
            except ServerLost as lost:
                self._put_on_trial(server, lost)
                server.is_given_up |= attempts.are_used_up(timed_out=False)
            else:
                server.is_up, server.is_given_up, server.seen = True, False, time.monotonic()
                server.down.clear()
            async with self._changed:
                self._changed.notify_all()


def none_left(reasons: Sequence[str], retry_seconds: float) -> str:
    """Return the sentence that says why no server is left."""
    waited = f" within {retry_seconds:g} s (rollout.start_seconds)" if retry_seconds else ""
    if len(reasons) == 1:
        return f"the server did not answer{waited}: {reasons[0]}"
    listed = "; ".join(f"({number}) {why}" for number, why in enumerate(reasons, start=1))
    return f"none of the {len(reasons)} servers of rollout.url answered{waited}: {listed}"


async def on_every_server(
    servers: Sequence[T], work: Callable[[T], Awaitable[R]], *, retry_seconds: float
) -> list[R | ServerLost]:
    """Return the result of the same work on all servers, done concurrently; of those that do not answer, why.

    While none answers, the work is repeated, which a warning says once.

    raises    EngineError where one refuses, or none answered for `retry_seconds`
    """

    async def attempt(server: T) -> R | ServerLost:
        try:
            return await work(server)
        except ServerLost as lost:
            return lost

    attempts = Attempts(retry_seconds)
    while True:
        found = await asyncio.gather(*(attempt(server) for server in servers))
        lost = [one for one in found if isinstance(one, ServerLost)]
        if len(lost) < len(found):
            for one in lost:
                _log.warning("%s; the run goes on with the other servers", one)
            return found
        if attempts.are_used_up(timed_out=any(one.timed_out for one in lost)):
            raise EngineError(none_left([str(one) for one in lost], retry_seconds)) from lost[0].__cause__
        if attempts.failed == 1 and retry_seconds:
            _log.warning("%s; waiting up to %g s (rollout.start_seconds)", lost[0], retry_seconds)
        await asyncio.sleep(pause_seconds(attempts.failed))
