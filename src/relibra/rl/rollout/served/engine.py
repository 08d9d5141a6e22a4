"""Rollout engine of a run that samples from servers: windows of responses, in their order, from any of the servers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from relibra.engine.philox import uniform_numbers
from relibra.rl.rollout.response import Response, RolloutCost, Window
from relibra.rl.rollout.served.client import PublishedVersion, ServerClient
from relibra.rl.rollout.served.pool import PooledServer, ServerPool


@dataclass(frozen=True, kw_only=True)
class ServerEngine:
    """Samples from servers that hold the same weights; each response may come from any of them.

    servers         clients of one model; they share what was published
    seed            one seed per request follows from it; equal samples need servers in their deterministic mode
    max_batch       requests under way at once, at all servers together
    retry_seconds   during which a request that failed is repeated, so that servers may be started again
    weights         folder that servers read new weights from

    Servers do not report slots, so the cost is the least that `max_batch` of them could have taken.
    """

    servers: tuple[ServerClient, ...]
    seed: int
    max_batch: int = 256
    retry_seconds: float = 0.0
    weights: Path | None = None

    @property
    def published(self) -> PublishedVersion:
        """Weights that the servers were asked to load last."""
        return self.servers[0].published

    @property
    def names(self) -> str:
        """The addresses of the servers."""
        return ", ".join(server.url for server in self.servers)

    def generate(
        self, responses: Sequence[Response], *, window: int, max_response: int, spare: Iterator[Response] | None = None
    ) -> tuple[list[Window], RolloutCost]:
        """Add up to `window` tokens to each response, none beyond `max_response`; see `RolloutEngine`.

        raises    EngineError when no server can be reached, or one refuses, or answers in another form than requested
        """
        assert not self.published.asleep, "servers take no requests before the update that wakes them"
        assert spare is None, "the settings refuse rollout.refill with a server, which counts no decode steps"
        slots = min(self.max_batch, len(responses))
        limits = [min(window, max_response - response.length) for response in responses]
        windows = asyncio.run(self._windows(responses, limits, slots)) if responses else []
        lengths = [len(one.tokens_w) for one in windows]
        steps = max(max(lengths, default=0), -(-sum(lengths) // max(1, slots)))
        prefilled = sum(len(response.tokens_n) for response in responses)
        return windows, RolloutCost(
            decode_steps=steps,
            passes=None,
            slot_steps=steps * slots,
            busy_slot_steps=sum(lengths),
            prefilled_tokens=prefilled,
        )

    async def _windows(self, responses: Sequence[Response], limits: Sequence[int], slots: int) -> list[Window]:
        """Return a window of each response, at most `slots` requests under way; the first failure ends the others."""
        free = asyncio.Semaphore(slots)
        try:
            async with AsyncExitStack() as connections, asyncio.TaskGroup() as group:
                servers = [
                    PooledServer(client, await connections.enter_async_context(client.connections(slots + 1)))
                    for client in self.servers
                ]
                pool = ServerPool(servers, retry_seconds=self.retry_seconds)
                keepers = [group.create_task(pool.keep(server)) for server in servers]
                await pool.settle()
                tasks = [
                    group.create_task(self._window(pool, free, response, limit))
                    for response, limit in zip(responses, limits, strict=True)
                ]
                await asyncio.wait(tasks)
                for keeper in keepers:
                    keeper.cancel()
        except ExceptionGroup as failures:
            first = failures.exceptions[0]
        else:
            return [task.result() for task in tasks]
        raise first from first.__cause__

    async def _window(self, pool: ServerPool, free: asyncio.Semaphore, response: Response, limit: int) -> Window:
        """Return the window of a response; its seed is the same at whichever server, and whenever it is asked for."""
        share = uniform_numbers(self.seed, np.array([response.sample_id]), np.array([response.length]))[0]
        seed = int(share * (1 << 31))

        async def send(server: PooledServer) -> Window:
            return await server.client.window(server.connection, response, limit=limit, seed=seed)

        async with free:
            return await pool.request(send, preferred=response.group_id)
