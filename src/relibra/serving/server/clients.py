"""`WorkerClients`: the front's view of the attention workers: submit a request, read its progress, cancel it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy import ndarray

from relibra.errors import EngineError
from relibra.serving.control import read_frame, write_frame
from relibra.serving.engine.request import SamplingParameters
from relibra.serving.expert_placement import place_experts, worker_imbalance
from relibra.serving.launch import LOADING_SECONDS, RunningWorkers, Worker

WORTH_A_CHANGE = 1.05
"""Imbalance of workers over that after a change, from which on the change is made."""
LEAST_ROWS = 100
"""Rows per expert in a period below which nothing is changed."""
RESTARTS = 3
"""How often an expert worker that ends is started again."""
Step = dict[str, Any]
"""Progress of one request as a worker sends it: token, log_prob, top, finish, error, routes."""


@dataclass(eq=False)
class _Connection:
    """An attention worker; `lost` says why it is gone."""

    worker: Worker
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    queues: dict[int, asyncio.Queue[Step]] = field(default_factory=dict)
    loads: asyncio.Queue[list[int]] = field(default_factory=asyncio.Queue)
    lost: str = ""


class WorkerClients:
    """Requests of this front, shared over the attention workers."""

    def __init__(self, connections: Sequence[_Connection]) -> None:
        """Use `open`."""
        self._connections, self._numbers = connections, itertools.count()
        self.lost_experts: dict[int, str] = {}
        self.rebalanced = 0
        self._expert_writers: dict[int, asyncio.StreamWriter] = {}
        self._holds: defaultdict[int, asyncio.Queue[dict[str, Any]]] = defaultdict(asyncio.Queue)
        self._readers = [asyncio.create_task(self._read(one)) for one in connections]

    @classmethod
    async def open(cls, model: RunningWorkers, rebalance_seconds: float = 0.0) -> WorkerClients:
        """Take over the control sockets of a model's workers; expert workers that end are started again.

        rebalance_seconds   time after which copies of experts are placed anew; 0: never
        """
        connections = []
        for worker in model.attention_workers:
            reader, writer = await asyncio.open_connection(sock=worker.control)
            connections.append(_Connection(worker, reader, writer))
        clients = cls(connections)
        experts = range(len(model.expert_workers))
        clients._readers += [asyncio.create_task(clients._keep_running(model, number)) for number in experts]
        if rebalance_seconds:
            clients._readers.append(asyncio.create_task(clients.rebalance_forever(model, rebalance_seconds)))
        return clients

    @property
    def failure(self) -> str:
        """Why the deployment cannot answer any more; empty while one attention worker is left."""
        lost = [one.lost for one in self._connections if one.lost]
        return lost[0] if len(lost) == len(self._connections) else ""

    @property
    def running(self) -> int:
        """Requests that wait or run."""
        return sum(len(one.queues) for one in self._connections)

    async def generate(self, tokens: Sequence[int], sampling: SamplingParameters) -> AsyncGenerator[Step, None]:
        """Yield the steps of a request, the last with `finish`; leaving early cancels it.

        raises   EngineError when all attention workers are gone, or the request's own one fails
        """
        alive = [one for one in self._connections if not one.lost]
        if not alive:
            raise EngineError(self.failure)
        chosen = min(alive, key=lambda one: len(one.queues))
        number, queue = next(self._numbers), asyncio.Queue[Step]()
        chosen.queues[number] = queue
        body = {"number": number, "tokens": list(tokens), "sampling": asdict(sampling)}
        write_frame(chosen.writer, {"generate": body})
        ended = False
        try:
            while not ended:
                step = await queue.get()
                ended = "finish" in step
                if step.get("finish") == "error":
                    raise EngineError(step.get("error", "the request failed"))
                yield step
        finally:
            chosen.queues.pop(number, None)
            if not ended and not chosen.lost:
                write_frame(chosen.writer, {"cancel": number})

    async def close(self) -> None:
        """Stop reading, and close the sockets, which ends the workers."""
        for task in self._readers:
            task.cancel()
        for one in self._connections:
            one.writer.close()
            with contextlib.suppress(OSError):
                await one.writer.wait_closed()

    async def rebalance(self, model: RunningWorkers, load_E: ndarray) -> bool:
        """Give the copies of spare experts to those with the most rows, worker after worker, without a pause.

        load_E    rows of each expert in the period that decides
        returns   whether anything has changed: a placement that is hardly better is left alone
        """
        current = tuple(tuple(model.experts_of[number]) for number in sorted(model.experts_of))
        better = place_experts(len(load_E), len(current), model.layout.spare_experts, load_E)
        if worker_imbalance(current, load_E) <= WORTH_A_CHANGE * worker_imbalance(better, load_E):
            return False
        for number, experts in enumerate(better):
            if experts == current[number] or number in self.lost_experts:
                continue
            body = {"hold": experts, "address": model.new_address(number)}
            write_frame(self._expert_writers[number], body)
            answer = await asyncio.wait_for(self._holds[number].get(), LOADING_SECONDS)
            if "ready" not in answer:
                return False  # it has failed, and is started again with what it held
            address, model.experts_of[number] = answer["ready"]
            self._announce(number, address, experts)
        self.rebalanced += 1
        return True

    async def rebalance_forever(self, model: RunningWorkers, seconds: float) -> None:
        """Place copies anew every so many seconds, by the rows of each expert since the last time."""
        before = await self.load()
        while True:
            await asyncio.sleep(seconds)
            now = await self.load()
            if (now - before).sum() >= LEAST_ROWS * len(now):
                await self.rebalance(model, now - before)
            before = now

    async def load(self) -> ndarray:
        """Return the rows of each expert since the start, over all attention workers that are there."""
        alive = [one for one in self._connections if not one.lost]
        for one in alive:
            write_frame(one.writer, {"load": True})
        return np.sum([await one.loads.get() for one in alive], axis=0)

    def _announce(self, number: int, address: str, experts: Sequence[int]) -> None:
        """Tell the attention workers where an expert worker is, and what it holds."""
        for connection in self._connections:
            write_frame(connection.writer, {"rejoin": [number, address, list(experts)]})

    async def _keep_running(self, model: RunningWorkers, number: int) -> None:
        """Start an expert worker again when it ends, a few times, and tell the attention workers where it is."""
        for _ in range(RESTARTS + 1):
            reader, writer = await asyncio.open_connection(sock=model.expert_workers[number].control)
            self._expert_writers[number] = writer
            while (frame := await read_frame(reader)) is not None:
                self._holds[number].put_nowait(frame)
            writer.close()
            self.lost_experts[number] = f"expert worker {number} ended"
            try:
                address = await asyncio.to_thread(model.restart, number)
            except EngineError as error:
                self.lost_experts[number] = f"expert worker {number} ended, and does not start again: {error}"
                return
            self._announce(number, address, model.experts_of[number])
            del self.lost_experts[number]
        self.lost_experts[number] = f"expert worker {number} ended {RESTARTS + 1} times: look at what it printed"

    async def _read(self, connection: _Connection) -> None:
        """Hand each step to its request, until the worker is gone; then end its requests."""
        while (frame := await read_frame(connection.reader)) is not None:
            if "load" in frame:
                connection.loads.put_nowait(frame["load"])
            for step in frame.get("progress", ()):
                queue = connection.queues.get(step["number"])
                if queue is not None:
                    queue.put_nowait(step)
        connection.lost = f"{connection.worker.name} is gone: start the deployment again"
        for queue in connection.queues.values():
            queue.put_nowait({"finish": "error", "error": connection.lost})
