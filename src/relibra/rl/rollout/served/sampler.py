"""Sampling from servers: a thread that only talks to them, and takes part in no collective.

While a step trains (`rollout.ahead`) an update of the weights cuts answers: no request is sent (`hold`), the servers
end those under way and send what they have, all of it is taken in (`drain`), the weights change, and the rest is asked
for again (`release`). So each part of a window has one version, and the last part has the routes of all earlier tokens.
With `rollout.on_update="keep"` servers keep those under way instead, and go on with them (`ServerClient.keeps`).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np

from relibra.engine.philox import uniform_numbers
from relibra.rl.rollout.response import Response, RolloutCost, Window
from relibra.rl.rollout.served.client import ServerClient
from relibra.rl.rollout.served.pool import PooledServer, ServerPool

DRAIN_SECONDS = 10.0
"""How long answers that were cut may take to come; what comes later is sampled again."""
_POLL_SECONDS = 0.01
Sampled = Future[tuple[list[Window], RolloutCost]]


def request_seed(seed: int, response: Response) -> int:
    """Return the seed of a request: it follows from `seed`, the sample and the place to go on from."""
    share = uniform_numbers(seed, np.array([response.sample_id]), np.array([response.length]))[0]
    return int(share * (1 << 31))


def least_cost(windows: Sequence[Window], slots: int, *, prefilled: int) -> RolloutCost:
    """Return a lower bound of the cost of sampling windows in `slots`: servers report none."""
    lengths = [len(one.tokens_w) for one in windows]
    steps = max(max(lengths, default=0), -(-sum(lengths) // max(1, slots)))
    return RolloutCost(
        decode_steps=steps,
        passes=None,
        slot_steps=steps * slots,
        busy_slot_steps=sum(lengths),
        prefilled_tokens=prefilled,
    )


class _Held(Exception):
    """A request is not sent, because the weights are about to change."""


@dataclass(eq=False)
class _Batch:
    """Windows that were asked for together; their result, once all are whole."""

    parts: list[_Part]
    slots: int
    sampled: Sampled = field(default_factory=Future)
    prefilled: int = 0

    def end_if_whole(self) -> None:
        windows = [part.window for part in self.parts if part.window is not None and not part.window.cut]
        if len(windows) == len(self.parts):
            self.sampled.set_result((windows, least_cost(windows, self.slots, prefilled=self.prefilled)))


@dataclass(eq=False)
class _Part:
    """A response whose window is sampled; those that began first are asked for first, also after a cut.

    window   what has been sampled so far; where that was cut, the rest is asked for again
    asked    a server works on it
    """

    number: int
    response: Response
    limit: int
    window: Window | None = None
    asked: bool = False

    @property
    def begun(self) -> Response:
        """The response with what has been sampled of the window so far."""
        if self.window is None:
            return self.response
        return self.response.extended(self.window, weight_version=0, max_response=self.response.length + self.limit)

    def add(self, window: Window) -> None:
        if self.window is not None:
            self.window = self.window.followed_by(window)
        elif len(window.tokens_w):
            self.window = window


def _cancel_unsent(running: dict[asyncio.Task[Window], _Part]) -> bool:
    """Cancel requests that no server has; return whether there were none."""
    unsent = [task for task, part in running.items() if not part.asked]
    for task in unsent:
        task.cancel()
    return not unsent


class Sampler:
    """Samples windows in a thread of its own. Any thread may call `begin`; the rest is for the thread that trains."""

    def __init__(
        self,
        servers: Sequence[ServerClient],
        *,
        seed: int,
        max_batch: int,
        retry_seconds: float,
        rescores: bool = False,
    ) -> None:
        """Begin held, without work; the arguments are those of `ServerEngine`."""
        self._servers, self._seed, self._max_batch, self._retry_seconds = servers, seed, max_batch, retry_seconds
        self._rescores, self._keeps = rescores, servers[0].keeps
        self._loop, self._wake, self._lock = asyncio.new_event_loop(), asyncio.Event(), threading.Lock()
        self._held, self._given_up, self._closed = True, False, False
        self._numbers, self._waiting, self._batches = count(), list[_Part](), dict[_Part, _Batch]()
        self._error: BaseException | None = None
        self._idle = threading.Event()
        self._idle.set()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self._thread.start()

    def begin(self, responses: Sequence[Response], limits: Sequence[int]) -> Sampled:
        """Begin to sample a window of each response, of at most so many tokens; the result is in their order.

        The future raises EngineError when no server can be reached, or one refuses, or answers in another form than
        requested; and whatever else ended the thread.
        """
        pairs = zip(responses, limits, strict=True)
        parts = [_Part(next(self._numbers), response, limit) for response, limit in pairs]
        batch = _Batch(parts, slots=min(self._max_batch, len(parts)))
        with self._lock:
            if self._error is not None:
                batch.sampled.set_exception(self._error)
                return batch.sampled
            self._batches |= dict.fromkeys(parts, batch)
            self._waiting += parts
        if not parts:
            batch.end_if_whole()
        self._tell()
        return batch.sampled

    def hold(self) -> None:
        """Send no request from now on."""
        with self._lock:
            self._held = True
        self._tell()

    def drain(self, seconds: float = DRAIN_SECONDS) -> None:
        """Wait for the answers that servers were told to cut; those that do not come are asked for anew.

        Where servers keep them, wait only until no request is about to be sent.
        """
        assert self._held, "requests are held before answers are cut"
        if not self._idle.wait(seconds):
            self._given_up = True
            self._idle.wait()
        self._given_up = False

    def release(self) -> None:
        """Ask for what is left, under the weights that were published last."""
        self._held = False
        self._tell()

    def close(self) -> None:
        """End the thread, and what it waits for."""
        self._closed = self._held = self._given_up = True
        self._tell()
        self._thread.join()
        self._loop.close()

    def _wake_up(self, _: asyncio.Task[Any]) -> None:
        self._wake.set()

    def _tell(self) -> None:
        self._loop.call_soon_threadsafe(self._wake.set)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._rounds())
        except BaseException as error:  # noqa: BLE001 - raised by the futures
            with self._lock:
                self._error = error
            for batch in {*self._batches.values()}:
                batch.sampled.set_exception(error)
        self._idle.set()

    async def _rounds(self) -> None:
        while not self._closed:
            self._wake.clear()
            with self._lock:
                begins = bool(self._waiting) and not self._held
                if begins:
                    self._idle.clear()
            if begins:
                await self._round()
                self._idle.set()
            else:
                await self._wake.wait()

    async def _round(self) -> None:
        """Ask until nothing is left, or requests are held; then take in what was under way."""
        running = dict[asyncio.Task[Window], _Part]()
        async with AsyncExitStack() as connections:
            servers = [
                PooledServer(client, await connections.enter_async_context(client.connections(self._max_batch + 1)))
                for client in self._servers
            ]
            pool = ServerPool(servers, retry_seconds=self._retry_seconds)
            keepers = self._keep(pool)
            try:
                await pool.settle()
                while not self._closed:
                    self._wake.clear()
                    self._take(running)
                    with self._lock:
                        held = self._held
                        if not held:
                            self._idle.clear()
                    if held and not self._keeps:
                        break
                    if held:
                        keepers = self._stop(keepers)
                        if _cancel_unsent(running):
                            self._idle.set()
                    else:
                        keepers = keepers or self._keep(pool)
                        for keeper in keepers:
                            if keeper.done():  # a server refuses
                                keeper.result()
                        self._ask_more(pool, running)
                    if not running:
                        break
                    await self._wake.wait()
                self._stop(keepers)
                while running:
                    for task, part in running.items():
                        if self._given_up or not part.asked:
                            task.cancel()
                    await asyncio.wait(running, timeout=_POLL_SECONDS)
                    self._take(running)
            finally:
                for left in (*keepers, *running):
                    left.cancel()
                await asyncio.gather(*keepers, *running, return_exceptions=True)

    def _keep(self, pool: ServerPool) -> list[asyncio.Task[None]]:
        keepers = [asyncio.create_task(pool.keep(server)) for server in pool.servers]
        for keeper in keepers:
            keeper.add_done_callback(self._wake_up)
        return keepers

    def _stop(self, keepers: Sequence[asyncio.Task[None]]) -> list[asyncio.Task[None]]:
        """Stop bringing servers up: one that comes back would be given old weights while new ones are written."""
        for keeper in keepers:
            keeper.cancel()
        return []

    def _ask_more(self, pool: ServerPool, running: dict[asyncio.Task[Window], _Part]) -> None:
        with self._lock:
            self._waiting.sort(key=lambda part: part.number)
            free = self._max_batch - len(running)
            chosen, self._waiting = self._waiting[:free], self._waiting[free:]
        for part in chosen:
            self._batches[part].prefilled += len(part.begun.tokens_n)
            task = asyncio.create_task(self._ask(pool, part))
            task.add_done_callback(self._wake_up)  # `asyncio.wait` would look at all requests after each
            running[task] = part

    async def _ask(self, pool: ServerPool, part: _Part) -> Window:
        begun = part.begun
        added = begun.length - part.response.length
        limit, seed, rescored = part.limit - added, request_seed(self._seed, begun), added * self._rescores

        async def send(server: PooledServer) -> Window:
            if self._held:
                raise _Held
            part.asked = True
            try:
                return await server.client.window(
                    server.connection, begun, limit=limit, seed=seed, may_be_cut=lambda: self._held, rescored=rescored
                )
            finally:
                part.asked = False

        return await pool.request(send, preferred=begun.group_id)

    def _take(self, running: dict[asyncio.Task[Window], _Part]) -> None:
        """Take in answers that came; what was cut, or not sent, waits again."""
        for task in [task for task in running if task.done()]:
            part = running.pop(task)
            with suppress(_Held, asyncio.CancelledError):
                part.add(task.result())
            if part.window is None or part.window.cut:
                with self._lock:
                    self._waiting.append(part)
            else:
                self._batches.pop(part).end_if_whole()
