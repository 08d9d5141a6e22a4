"""`WorkerClients`: the front's view of the workers: send them samples, hand their progress back, notice their end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy import ndarray

from relibra.errors import EngineError
from relibra.serving.control import write_frame
from relibra.serving.expert_placement import place_experts, worker_imbalance
from relibra.serving.launch import LOADING_SECONDS, RunningWorkers
from relibra.serving.server.metrics import WorkerCounters
from relibra.serving.server.refusals import Unavailable
from relibra.serving.server.workers.connection import (
    LEAST_PATIENCE,
    PULSE_SECONDS,
    Connection,
    LostRecord,
    SampleGroup,
    Step,
    WorkerState,
    connection_to,
    tell_weights,
)

_log = logging.getLogger(__name__)
WORTH_A_CHANGE = 1.05
"""Imbalance of workers over that after a change, from which on the change is made."""
LEAST_ROWS = 100
"""Rows per expert in a period below which nothing is changed."""
RESTARTS = 3
"""How often a worker that ends is started again."""
_POLL_SECONDS = 0.1
COUNTING_SECONDS = 2.0
"""How long workers may take to say what they have counted."""
TELLING_SECONDS = 20.0
"""How long workers may take to say what they have recorded."""


class WorkerClients:
    """Samples of this front at the attention workers, and commands to all workers."""

    def __init__(self, model: RunningWorkers, attention: list[Connection], experts: list[Connection]) -> None:
        """Use `open`."""
        self.rebalanced = 0
        """Times that copies of experts were placed anew."""
        self.changing, self._counting = asyncio.Lock(), asyncio.Lock()
        """The right to change what workers hold, and to ask them for their counters."""
        self._attention, self._experts, self._numbers = attention, experts, itertools.count()
        self.on_free: Callable[[], None] = lambda: None
        """Is called when a sample has ended."""
        self._starting = len(attention)
        """Attention workers that are there, or will be again."""
        self._readers = [asyncio.create_task(self._keep_attention(model, number)) for number in range(len(attention))]
        self._readers += [asyncio.create_task(self._keep_experts(model, number)) for number in range(len(experts))]
        self._readers.append(asyncio.create_task(self._feel_pulses()))
        self._model, self._patience = model, max(LEAST_PATIENCE, model.layout.timeout)
        self.lost_records: list[LostRecord] = []
        """Processes of workers that have ended, and took what they had recorded with them."""

    @classmethod
    async def open(cls, model: RunningWorkers, rebalance_seconds: float = 0.0) -> WorkerClients:
        """Take over the control sockets of a model's workers; expert workers that end are started again.

        rebalance_seconds   time after which copies of experts are placed anew; 0: never
        """
        attention = [await connection_to(worker) for worker in model.attention_workers]
        clients = cls(model, attention, [await connection_to(worker) for worker in model.expert_workers])
        if rebalance_seconds:
            clients._readers.append(asyncio.create_task(clients.rebalance_forever(model, rebalance_seconds)))
        return clients

    @property
    def failure(self) -> str:
        """Why the deployment cannot answer any more; empty while it can."""
        gone = [one.lost for one in self._attention if one.lost]
        return gone[0] if len(gone) == len(self._attention) else ""

    @property
    def lost_experts(self) -> list[str]:
        """What is said of each expert worker that is gone; its experts may have copies."""
        return [one.lost for one in self._experts if one.lost]

    @property
    def lost(self) -> list[str]:
        """What is said of each worker that is gone, or hangs."""
        said = self.lost_experts + [one.lost for one in self._attention if one.lost]
        return said + [
            f"{one.name} has not answered for {one.silence:.0f} s: end its process if it hangs, a new one is started"
            for one in self._attention
            if not one.lost and one.silence >= self._patience
        ]

    @property
    def states(self) -> list[WorkerState]:
        """Each worker, attention first."""
        model = self._model
        return [
            one.state(role, number, worker.process.pid)
            for role, workers, connections in (
                ("attention", model.attention_workers, self._attention),
                ("experts", model.expert_workers, self._experts),
            )
            for number, (worker, one) in enumerate(zip(workers, connections, strict=True))
        ]

    @property
    def running(self) -> int:
        """Samples at the workers."""
        return sum(len(one.running) for one in self._attention)

    def has_room(self, most: int) -> bool:
        """Return whether to call `begin`: a worker runs fewer than `most`, or all are gone for good, which it tells."""
        alive = [one for one in self._attention if not one.lost]
        return min(len(one.running) for one in alive) < most if alive else not self._starting

    def begin(self, group: SampleGroup) -> None:
        """Send a group to the worker with the fewest samples; without workers it ends at once."""
        alive = [one for one in self._attention if not one.lost]
        if not alive:
            group.end(self.failure)
            return
        group.worker = min(alive, key=lambda one: len(one.running))
        first = next(self._numbers)
        group.numbers = {first: group.first}
        for sample in range(1, group.samples):
            group.numbers[next(self._numbers)] = group.first + sample
        group.worker.running.update(dict.fromkeys(group.numbers, group))
        write_frame(
            group.worker.writer,
            {
                "generate": {
                    "numbers": list(group.numbers),
                    "tokens": list(group.tokens),
                    "sampling": asdict(group.sampling),
                }
            },
        )

    def cancel(self, group: SampleGroup, choice: int | None = None) -> None:
        """End a choice of a group, None: all; those that have ended are ignored."""
        if group.worker is None:
            return
        for number in [number for number, one in group.numbers.items() if choice in (None, one)]:
            del group.numbers[number]
            if group.worker.running.pop(number, None) is not None and not group.worker.lost:
                write_frame(group.worker.writer, {"cancel": number})
                self.on_free()

    def end_answers(self, why: str) -> None:
        """End all samples at the workers with a sentence."""
        for one in self._attention:
            for number in list(one.running):
                if not one.lost:
                    write_frame(one.writer, {"cancel": number})
                self._hand_over(one, {"number": number, "finish": "lost", "error": why})

    async def change_weights(self, folder: str, start_from: Callable[[], None]) -> list[str]:
        """Let all workers read weights, and use them if all could; return the sentences of those that could not.

        Whoever calls holds `changing`.

        start_from   is called just before they are used: a worker that ends from then on comes back with them
        raises       Unavailable where a worker is gone before
        """
        everyone = [*self._experts, *self._attention]
        read = [] if any(one.lost for one in everyone) else await tell_weights(everyone, {"read": folder})
        failed = [str(one["failed"]) for one in read if one is not None and "failed" in one]
        lost = next((one.lost for one in everyone if one.lost), "")
        if failed or lost:
            await tell_weights([one for one in everyone if not one.lost], {"use": ""})
            if lost:
                raise Unavailable(lost)
            return failed
        start_from()
        await tell_weights(everyone, {"use": folder})
        return []

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
            worker = self._experts[number]
            if experts == current[number] or worker.lost:
                continue
            write_frame(worker.writer, {"hold": experts, "address": model.new_address(number)})
            answer = await asyncio.wait_for(worker.answers["ready"].get(), LOADING_SECONDS)
            if answer is None:
                return False  # it has failed, and is started again with what it held
            model.addresses[number], model.experts_of[number] = answer
            self._announce(model, number)
        self.rebalanced += 1
        return True

    async def rebalance_forever(self, model: RunningWorkers, seconds: float) -> None:
        """Place copies anew every so many seconds, by the rows of each expert since the last time."""
        before = await self.load()
        while True:
            await asyncio.sleep(seconds)
            async with self.changing:
                now = await self.load()
                new_E = now - before if now.shape == before.shape else now
                if new_E.min(initial=0) >= 0 and new_E.sum() >= LEAST_ROWS * max(1, len(new_E)):
                    await self.rebalance(model, new_E)
            before = now

    async def load(self) -> ndarray:
        """Return the rows of each expert since the start, of the attention workers that answer; empty: none does."""
        rows = await asyncio.gather(*(one.ask("load", COUNTING_SECONDS) for one in self._attention))
        found = [np.asarray(one) for one in rows if one is not None]
        return np.sum(found, axis=0) if found else np.zeros(0, dtype=np.int64)

    async def counters(self) -> list[WorkerCounters]:
        """Return the counts of each worker that is there and answers soon."""
        workers = [("attention", number, one) for number, one in enumerate(self._attention)]
        workers += [("experts", number, one) for number, one in enumerate(self._experts)]
        async with self._counting:
            counts = await asyncio.gather(*(one.ask("counters", COUNTING_SECONDS) for _, _, one in workers))
        return [
            WorkerCounters(role, number, found)
            for (role, number, _), found in zip(workers, counts, strict=True)
            if found is not None
        ]

    async def timelines(self) -> list[dict[str, Any]]:
        """Return what each worker has recorded, of those that are there and answer; others are then lost records."""
        everyone = [*self._attention, *self._experts]
        frames = await asyncio.gather(*(one.ask("timeline", TELLING_SECONDS) for one in everyone))
        silent = [one for one, frame in zip(everyone, frames, strict=True) if frame is None and not one.lost]
        self.lost_records += [LostRecord(one.name, time.time()) for one in silent]
        return [frame for frame in frames if frame is not None]

    async def _feel_pulses(self) -> None:
        """Ask workers every second whether they are there; an expert worker that hangs is given up.

        Attention workers that waited for its rows do without it already, until it is started again. While workers read
        weights or take other experts, nobody is asked.
        """
        while True:
            await asyncio.sleep(PULSE_SECONDS)
            for one in (*self._attention, *self._experts):
                if one.lost or self.changing.locked():
                    continue
                one.pulse()
                if one.silence > self._patience and one in self._experts:
                    _log.warning("%s has not answered for %.0f s: it is given up", one.name, self._patience)
                    one.writer.transport.abort()  # who reads from it takes the worker for ended

    def _announce(self, model: RunningWorkers, number: int) -> None:
        """Tell the attention workers where an expert worker is, and what it holds."""
        for one in self._attention:
            if not one.lost:
                write_frame(one.writer, {"rejoin": [number, *model.whereabouts()[number]]})

    async def close(self) -> None:
        """Stop reading, and close the sockets, which ends the workers."""
        for task in self._readers:
            task.cancel()
        for one in (*self._attention, *self._experts):
            one.writer.close()
            with contextlib.suppress(OSError):
                await one.writer.wait_closed()

    async def _keep_experts(self, model: RunningWorkers, number: int) -> None:
        """Read what an expert worker says; start it again when it ends, a few times, and tell attention where it is."""
        for restarts in range(RESTARTS + 1):
            connection = self._experts[number]
            while (frame := await connection.read()) is not None:
                connection.tell(frame)
            connection.writer.close()
            connection.end(f"{connection.name} {'hangs' if connection.silence > self._patience else 'ended'}")
            self.lost_records.append(LostRecord(connection.name, time.time()))
            if restarts == RESTARTS:
                break
            try:
                await asyncio.to_thread(model.restart_experts, number)
            except EngineError as error:
                connection.give_up(f"{connection.name} ended, and does not start again: {error}")
                return
            self._experts[number] = await connection_to(model.expert_workers[number])
            self._announce(model, number)
        connection.give_up(f"{connection.name} ended {RESTARTS + 1} times: look at what it printed")

    async def _keep_attention(self, model: RunningWorkers, number: int) -> None:
        """Read what an attention worker says; start it again when it ends, a few times, once all experts are there."""
        for restarts in range(RESTARTS + 1):
            connection = self._attention[number]
            await self._read(connection)
            connection.writer.close()
            self.lost_records.append(LostRecord(connection.name, time.time()))
            if restarts == RESTARTS:
                connection.give_up(f"{connection.name} ended {RESTARTS + 1} times: look at what it printed")
                break
            while self.lost_experts:
                await asyncio.sleep(_POLL_SECONDS)
            try:
                met = await asyncio.to_thread(model.restart_attention, number)
            except EngineError as error:
                connection.give_up(f"{connection.name} ended, and does not start again: {error}")
                break
            self._attention[number] = await connection_to(model.attention_workers[number])
            for one, (before, now) in enumerate(zip(met, model.whereabouts(), strict=True)):
                if before != now:
                    write_frame(self._attention[number].writer, {"rejoin": [one, *now]})
            self.on_free()
        self._starting -= 1
        self.on_free()

    async def _read(self, connection: Connection) -> None:
        """Hand each step to its request, until the worker is gone; then end its requests."""
        while (frame := await connection.read()) is not None:
            for step in frame.pop("progress", ()):
                self._hand_over(connection, step)
            connection.tell(frame)
        connection.end(f"{connection.name} is gone, and what it worked on is lost: it is being started again")
        for number in list(connection.running):
            self._hand_over(connection, {"number": number, "finish": "lost", "error": connection.lost})
        self.on_free()

    def _hand_over(self, connection: Connection, step: Step) -> None:
        number = step["number"]
        group = connection.running.get(number)
        if group is None:
            return
        group.mailbox.put(group.numbers[number], step)
        if "finish" in step:
            del connection.running[number], group.numbers[number]
            self.on_free()
