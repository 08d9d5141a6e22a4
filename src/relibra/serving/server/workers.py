"""`WorkerClients`: workers as the API server sees them: what they run, whether they answer, and their replacement."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from fastapi import HTTPException
from numpy import ndarray

from relibra.engine.sequence import FinishReason
from relibra.errors import EngineError
from relibra.serving.channel import Progress, read_frame, write_frame
from relibra.serving.launch import LOADING_SECONDS, RunningWorkers, Worker, weights_stamp
from relibra.serving.layout import experts_of, held_by, place_copies, worker_imbalance
from relibra.serving.server.choice import Choice
from relibra.serving.server.metrics import WorkerCounts
from relibra.serving.server.recording import RouteRecorder

_log = logging.getLogger(__name__)
_ANSWERS = ("weights", "hold", "load", "counters", "timeline")
HEALTH_SECONDS = 1.0
"""Time after which a worker is asked whether it is there."""
SHOWN_SECONDS = 3.0
"""Silence of a worker from which on `/health` shows it."""
LEAST_PATIENCE = 10.0
"""Silence up to which no worker counts as hanging: a machine may be busy."""
ANSWER_SECONDS = 2.0
"""How long workers may take to return their counters, or what they have recorded."""


@dataclass(eq=False)
class Connection:
    """A worker and the API server's end of its connection.

    lost      why it is gone; empty: it is not
    for_good  it does not come back
    answers   to what was asked, by their keys; None: it has ended
    silence   seconds since it was asked something that it did not answer, as `check_health` counts them; 0: it has
              answered
    """

    worker: Worker
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    running: dict[int, Choice] = field(default_factory=dict)
    answers: defaultdict[str, asyncio.Queue[Any]] = field(default_factory=lambda: defaultdict(asyncio.Queue))
    lost: str = ""
    for_good: bool = False
    silence: float = 0.0

    @property
    def stopped(self) -> bool:
        """Whether its process is stopped, by SIGSTOP or a debugger."""
        with contextlib.suppress(OSError):
            return Path(f"/proc/{self.worker.process.pid}/stat").read_text().rpartition(") ")[2][0] in "Tt"
        return False

    def state(self) -> dict[str, Any]:
        """Return what `/health` shows of it: who it is, and since when it does not answer.

        "ready"; "silent": it does not answer; "lost": it is gone, and comes back where it can
        """
        silence = self.silence if not self.lost and self.silence >= SHOWN_SECONDS else 0.0
        state = "lost" if self.lost else "silent" if silence else "ready"
        who = {"role": self.worker.role, "number": self.worker.number, "pid": self.worker.process.pid}
        return {**who, "state": state, "silent_seconds": silence}

    def send(self, frame: dict[str, Any]) -> None:
        """Queue a frame to the worker, unless it is gone."""
        if not self.lost:
            write_frame(self.writer, frame)

    async def read(self) -> dict[str, Any] | None:
        """Wait for a frame, which ends a silence, and hand over the answers in it; None: the worker is gone."""
        frame = await read_frame(self.reader)
        if frame is not None:
            self.silence = 0.0
            for key in frame.keys() & set(_ANSWERS):
                self.answers[key].put_nowait(frame[key])
        return frame

    def check_health(self) -> None:
        """Ask whether it is there, once per silence; call it every HEALTH_SECONDS.

        Calls are counted instead of time, so that a server that was stopped itself blames no worker.
        """
        if not self.silence:
            self.send({"health": True})
        self.silence += HEALTH_SECONDS

    async def ask(self, what: str, value: Any = True, seconds: float = ANSWER_SECONDS) -> Any:
        """Return the worker's answer; None: it is gone, or does not answer in time."""
        answers = self.answers[what]
        while not answers.empty():
            answers.get_nowait()  # of a question that was given up
        if self.lost:
            return None
        self.send({what: value})
        try:
            return await asyncio.wait_for(answers.get(), seconds)
        except TimeoutError:
            return None

    async def command(self, what: str, value: Any, seconds: float = LOADING_SECONDS) -> Any:
        """Return the answer to a command that may take long; a worker that hangs is given up. None: it ends."""
        answer = await self.ask(what, value, seconds)
        if answer is None and not self.lost:
            self.writer.transport.abort()  # the task that reads from it takes the worker for ended
        return answer

    def end(self, why: str) -> None:
        """Note that the worker is gone; whoever waits for an answer gets None."""
        self.lost = why
        for key in _ANSWERS:
            self.answers[key].put_nowait(None)

    def give_up(self, why: str) -> None:
        """Note that the worker does not come back, and log why."""
        self.lost, self.for_good = f"{self.worker.name} {why}; stop this server and start it again", True
        _log.error("%s", self.lost)


async def connection_to(worker: Worker) -> Connection:
    """Take over the connection of a worker."""
    return Connection(worker, *await asyncio.open_connection(sock=worker.control.take_socket()))


WORTH_A_CHANGE = 1.05
"""A change is made where imbalance of workers now / imbalance after it is above this."""
LEAST_ROWS = 100
"""Choices per expert and layer, in one period or several, below which nothing is changed."""
RESTARTS = 3
"""How often a worker that ends is started again."""
_POLL_SECONDS = 0.1


class WorkerClients:
    """Choices at the attention workers, and commands to all workers.

    rebalanced     times that copies of experts were placed anew
    changing       lock of whoever changes what workers hold
    on_free        is called when a choice has ended
    lost_records   workers whose records are lost, because they ended or did not answer, with the Unix times
    """

    def __init__(
        self,
        model: RunningWorkers,
        attention: list[Connection],
        experts: list[Connection],
        recorder: RouteRecorder | None = None,
    ) -> None:
        """Use `open`."""
        self._recorder = recorder
        self.rebalanced = 0
        self.changing, self._counting = asyncio.Lock(), asyncio.Lock()
        self.on_free: Callable[[], None] = lambda: None
        self.lost_records: list[tuple[str, float]] = []
        self._model, self._patience = model, max(LEAST_PATIENCE, model.layout.timeout)
        self._attention, self._experts, self._numbers = attention, experts, itertools.count()
        workers = [(connections, number) for connections in (attention, experts) for number in range(len(connections))]
        self._tasks = [asyncio.create_task(self._keep(*worker)) for worker in workers]
        self._tasks.append(asyncio.create_task(self._check_health()))

    @classmethod
    async def open(
        cls, model: RunningWorkers, rebalance_seconds: float = 0.0, recorder: RouteRecorder | None = None
    ) -> WorkerClients:
        """Take over a model's workers, which start again when they end.

        rebalance_seconds   time after which copies move; 0: never
        recorder            takes the routes of all answers
        """
        attention = [await connection_to(worker) for worker in model.attention_workers]
        clients = cls(model, attention, [await connection_to(worker) for worker in model.expert_workers], recorder)
        if rebalance_seconds:
            clients._tasks.append(asyncio.create_task(clients._rebalance_forever(rebalance_seconds)))
        return clients

    @property
    def _everyone(self) -> list[Connection]:
        return [*self._attention, *self._experts]

    @property
    def failure(self) -> str:
        """Why the deployment cannot answer now; empty while it can."""
        gone = [worker.lost for worker in self._attention if worker.lost]
        return gone[0] if len(gone) == len(self._attention) else ""

    @property
    def lost(self) -> list[str]:
        """Why each worker is gone; experts that are gone may have copies."""
        return [worker.lost for worker in (*self._experts, *self._attention) if worker.lost]

    @property
    def states(self) -> list[dict[str, Any]]:
        """Each worker, attention first."""
        return [worker.state() for worker in self._everyone]

    @property
    def running(self) -> int:
        """Choices at the workers."""
        return sum(len(worker.running) for worker in self._attention)

    def has_room(self, most: int) -> bool:
        """Return whether to call `begin`: a worker runs fewer than `most`, or none comes back and `begin` ends it."""
        alive = [worker for worker in self._attention if not worker.lost]
        if not alive:
            return all(worker.for_good for worker in self._attention)
        return min(len(worker.running) for worker in alive) < most

    def begin(self, choice: Choice, most: int) -> None:
        """Send a choice to a worker with room that runs another sample of its prompt, else to the one with the fewest.

        Without workers the choice ends at once.
        """
        alive = [worker for worker in self._attention if not worker.lost and len(worker.running) < most]
        if not alive:
            choice.end("lost", self.failure)
            return

        def order(worker: Connection) -> tuple[bool, int]:
            return not any(one.prompt is choice.prompt for one in worker.running.values()), len(worker.running)

        worker, number = min(alive, key=order), next(self._numbers)
        worker.running[number] = choice
        request = choice.request(number)
        if self._recorder is not None:
            request.sampling = replace(request.sampling, routes=True)
        worker.send({"generate": request})

    def cancel(self, choice: Choice) -> None:
        """End a choice; one that has ended, or has not begun, is ignored."""
        for worker in self._attention:
            if choice.number is not None and worker.running.get(choice.number) is choice:
                del worker.running[choice.number]
                worker.send({"cancel": choice.number})
                self.on_free()

    def end_answers(self, finish: FinishReason, error: str = "") -> None:
        """End all choices at the workers with an error sentence; without one, with the tokens that have come."""
        for worker in self._attention:
            for number in list(worker.running):
                worker.send({"cancel": number})
                self._hand_over(worker, Progress(number=number, finish=finish, error=error))

    async def change_weights(self, folder: Path) -> list[str]:
        """Let all workers read weights, and use them if all could; return the sentences of those that could not.

        Whoever calls holds `changing`. Raises HTTPException (503) where a worker is gone before they are used.
        """
        everyone, stamp = [*self._experts, *self._attention], weights_stamp(folder)

        async def tell(command: dict[str, str]) -> list[dict[str, Any] | None]:
            return await asyncio.gather(*(worker.command("weights", command) for worker in everyone))

        read = [] if any(worker.lost for worker in everyone) else await tell({"read": str(folder)})
        failed = [str(answer["failed"]) for answer in read if answer is not None and "failed" in answer]
        lost = next((worker.lost for worker in everyone if worker.lost), "")
        if failed or lost:
            await tell({"use": ""})
            if lost:
                raise HTTPException(503, lost)
            return failed
        self._model.start_from(folder, stamp)  # a worker that ends from now on comes back with them
        await tell({"use": str(folder)})
        return []

    async def rebalance(self, load_LE: ndarray) -> bool:
        """Let workers hold copies of each layer's most chosen experts, one worker after another, without a pause.

        load_LE   choices of each expert in the period that decides
        returns   whether anything has changed: a placement that is hardly better is left alone
        """
        model = self._model
        current_LNE = held_by([experts for _, experts in model.experts], model.num_experts)
        better_LNE = place_copies(model.home_LNE, model.layout.spare_experts, load_LE)
        if worker_imbalance(current_LNE, load_LE) <= WORTH_A_CHANGE * worker_imbalance(better_LNE, load_LE):
            return False
        changed = False
        for number, experts in enumerate(experts_of(better_LNE)):
            worker = self._experts[number]
            if np.array_equal(better_LNE[:, number], current_LNE[:, number]) or worker.lost:
                continue
            address = await worker.command("hold", [experts, model.new_address(number)])
            if address is None:
                break  # it has failed, and is started again with what it held
            model.experts[number] = address, experts
            self._announce(number)
            changed = True
        self.rebalanced += changed
        return changed

    async def _rebalance_forever(self, seconds: float) -> None:
        """Place copies anew every `seconds`, by the choices of experts since the last period that had enough."""
        before = await self._load()
        while True:
            await asyncio.sleep(seconds)
            async with self.changing:
                now = await self._load()
                if now.shape == before.shape and (now >= before).all():
                    if (now - before).sum() < LEAST_ROWS * max(1, now.size):
                        continue  # the next period adds to them
                    await self.rebalance(now - before)
            before = now

    async def _load(self) -> ndarray:
        """Return the choices `[L, E]` since the start, of the attention workers that answer; empty: none does."""
        rows = await asyncio.gather(*(worker.ask("load") for worker in self._attention))
        found = [np.asarray(row) for row in rows if row is not None]
        return np.sum(found, axis=0) if found else np.zeros((0, 0), dtype=np.int64)

    async def counters(self) -> WorkerCounts:
        """Return the counts of each worker that is there and answers soon, by role and number."""
        async with self._counting:
            everyone = self._everyone
            counts = await asyncio.gather(*(one.ask("counters") for one in everyone))
        found = zip(everyone, counts, strict=True)
        return {(one.worker.role, one.worker.number): count for one, count in found if count is not None}

    async def timelines(self) -> list[dict[str, Any]]:
        """Return what each worker that answers has recorded; note the others in `lost_records`."""
        everyone = self._everyone
        frames = await asyncio.gather(*(worker.ask("timeline") for worker in everyone))
        silent = [worker for worker, frame in zip(everyone, frames, strict=True) if frame is None and not worker.lost]
        self.lost_records += [(one.worker.name, time.time()) for one in silent]
        return [frame for frame in frames if frame is not None]

    async def _check_health(self) -> None:
        """Ask workers every second whether they are there; one that hangs is given up.

        While workers read weights or take other experts, only those whose process is stopped count as silent.
        """
        while True:
            await asyncio.sleep(HEALTH_SECONDS)
            for worker in self._everyone:
                if worker.lost or (self.changing.locked() and not worker.stopped):
                    continue
                worker.check_health()
                if worker.silence > self._patience:
                    _log.warning("%s has not answered for %.0f s: it is given up", worker.worker.name, self._patience)
                    worker.writer.transport.abort()  # the task that reads from it takes the worker for ended

    def _announce(self, number: int) -> None:
        """Send the attention workers where an expert worker is, and what it holds."""
        for worker in self._attention:
            worker.send({"rejoin": [number, *self._model.experts[number]]})

    async def close(self) -> None:
        """Stop reading, and end the connections, which ends the workers."""
        for task in self._tasks:
            task.cancel()
        for worker in self._everyone:
            worker.writer.transport.abort()  # one that is stopped takes nothing any more

    async def _keep(self, connections: list[Connection], number: int) -> None:
        """Read from a worker; start it again when it ends, a few times."""
        for restarts in range(RESTARTS + 1):
            connection = connections[number]
            while (frame := await connection.read()) is not None:
                for progress in msgspec.convert(frame.get("progress", ()), tuple[Progress, ...]):
                    self._hand_over(connection, progress)
            state = "hangs" if connection.silence > self._patience else "is gone"
            connection.end(
                f"{connection.worker.name} {state}, and what it worked on is lost: it is being started again"
            )
            for running in list(connection.running):
                self._hand_over(connection, Progress(number=running, finish="lost", error=connection.lost))
            connection.writer.close()
            self.lost_records.append((connection.worker.name, time.time()))
            self.on_free()
            why = f"ended {RESTARTS + 1} times: look at what it printed"
            if restarts == RESTARTS:
                break
            try:
                await (self._restart_experts if connection in self._experts else self._restart_attention)(number)
            except (EngineError, OSError) as error:
                why = f"ended, and does not start again: {error}"
                coming = any(worker.lost and not worker.for_good for worker in self._experts)
                if connection in self._experts or not coming:
                    break  # if not, again: an expert worker may have ended while this one connected
            self.on_free()
        connection.give_up(why)
        self.on_free()

    async def _restart_experts(self, number: int) -> None:
        """Start an expert worker again, and announce where it is; raises EngineError."""
        await asyncio.to_thread(self._model.restart_experts, number)
        self._experts[number] = await connection_to(self._model.expert_workers[number])
        self._announce(number)

    async def _restart_attention(self, number: int) -> None:
        """Start an attention worker again, once all experts are there; raises EngineError."""
        while lost := [worker for worker in self._experts if worker.lost]:
            if gone := next((worker.worker.name for worker in lost if worker.for_good), ""):
                raise EngineError(f"{gone} does not come back")
            await asyncio.sleep(_POLL_SECONDS)
        known = await asyncio.to_thread(self._model.restart_attention, number)
        self._attention[number] = await connection_to(self._model.attention_workers[number])
        for expert_worker, (before, now) in enumerate(zip(known, self._model.experts, strict=True)):
            if before != now:
                self._attention[number].send({"rejoin": [expert_worker, *now]})

    def _hand_over(self, connection: Connection, progress: Progress) -> None:
        choice = connection.running.get(progress.number)
        if choice is None:
            return
        if self._recorder is not None and progress.routes is not None:
            self._recorder.add(len(choice.prompt), progress.routes)
            if not choice.sampling.routes:
                progress = msgspec.structs.replace(progress, routes=None)
        choice.put(progress)
        if progress.finish is not None:
            del connection.running[progress.number]
            self.on_free()
