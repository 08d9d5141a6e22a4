"""Workers that are there and do not answer."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess

import numpy as np
import pytest

from relibra.errors import EngineError
from relibra.serving.channel import MOST_BYTES, progress_frames, read_frame, write_frame
from relibra.serving.launch import RunningWorkers
from relibra.serving.layout import WorkerLayout
from relibra.serving.server import workers
from relibra.serving.server.workers import HEALTH_SECONDS
from tests.serving.in_process import StoppedWorker
from tests.serving.models import greedy_request


@contextlib.asynccontextmanager
async def connected(role, pid):
    """Yield the connection of an API server to a worker, and the worker's end."""
    ours, theirs = socket.socketpair()
    connection = workers.Connection(StoppedWorker(role, pid), *await asyncio.open_connection(sock=ours))
    reader, writer = await asyncio.open_connection(sock=theirs)
    try:
        yield connection, reader, writer
    finally:
        for one in (connection.writer, writer):
            one.close()
            with contextlib.suppress(OSError):
                await one.wait_closed()


def test_answer_ends_a_silence_and_silent_worker_is_asked_once():
    async def watch():
        async with connected("experts", 12) as (connection, reader, writer):
            for _ in range(3):
                connection.check_health()
            silence = connection.silence
            asked = await read_frame(reader)
            write_frame(writer, {"health": True})
            frame = await connection.read()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(read_frame(reader), 0.05)
            return silence, asked, frame, connection.silence

    assert asyncio.run(watch()) == (3 * HEALTH_SECONDS, {"health": True}, {"health": True}, 0.0)


class TwoWorkers(RunningWorkers):
    """A deployment whose expert worker does not start again."""

    layout = WorkerLayout(timeout=0.04)

    def __init__(self):
        """Start nothing."""

    def restart_experts(self, _number):
        raise EngineError("no memory")

    def restart_attention(self, _number):
        raise EngineError("no memory")


async def with_clients(watch):
    """Return what is seen of workers that do not answer."""
    async with connected("attention", 11) as (attention, *_), connected("experts", 12) as (experts, *_):
        server = workers.WorkerClients(TwoWorkers(), [attention], [experts])
        try:
            return await watch(server)
        finally:
            await server.close()


@pytest.fixture
def quick(monkeypatch):
    for name, seconds in (("HEALTH_SECONDS", 0.002), ("SHOWN_SECONDS", 0.006), ("LEAST_PATIENCE", 0.04)):
        monkeypatch.setattr(workers, name, seconds)


def test_silent_workers_are_shown_and_then_given_up(quick):
    async def watch(server):
        seen = []
        while len(server.lost_records) < 2 or not server.failure:
            states = [(one["role"], one["number"], one["pid"], one["state"]) for one in server.states]
            if not seen or states != seen[-1]:
                seen.append(states)
            await asyncio.sleep(0.001)
        return seen, server.lost, server.failure, server.lost_records

    seen, said, failure, lost = asyncio.run(with_clients(watch))
    assert seen[0] == [("attention", 0, 11, "ready"), ("experts", 0, 12, "ready")]
    assert [("attention", 0, 11, "silent"), ("experts", 0, 12, "silent")] in seen
    assert "experts worker 0" in said[0]
    assert "attention worker 0" in said[1]
    assert failure == said[1]
    assert {worker for worker, _ in lost} == {"experts worker 0", "attention worker 0"}


def test_attention_ends_where_experts_are_gone_for_good(quick):
    async def watch(server):
        while not server.has_room(0):  # none is alive or comes back: choices end at once
            await asyncio.sleep(0.001)
        return [worker["state"] for worker in server.states]

    assert asyncio.run(asyncio.wait_for(with_clients(watch), 20)) == ["lost", "lost"]


def test_routes_travel_one_answer_in_a_frame():
    def ended(number, routes):
        sequence = greedy_request(number, 4, 2)
        sequence.finish, sequence.tokens, sequence.log_probs = "length", [1], [0.0]
        sequence.experts = [] if routes is None else [routes]
        return sequence

    frames = progress_frames([ended(1, None), ended(2, np.zeros((3, 1, 2), np.uint8)), ended(3, None)])
    assert [[one.number for one in frame] for frame in frames] == [[1, 3], [2]]


def test_a_frame_above_the_limit_ends_a_worker():
    async def read():
        async with connected("attention", 12) as (connection, _, writer):
            writer.write((MOST_BYTES + 1).to_bytes(4, "big"))
            return await connection.read()

    assert asyncio.run(read()) is None


def test_stopped_process_is_told_from_a_busy_one():
    async def watch():
        with subprocess.Popen(["sleep", "60"]) as process:
            async with connected("attention", process.pid) as (worker, *_):
                seen = [worker.stopped]
                process.send_signal(signal.SIGSTOP)
                os.waitpid(process.pid, os.WUNTRACED)
                seen.append(worker.stopped)
                process.kill()
                process.wait()
                return [*seen, worker.stopped]

    assert asyncio.run(watch()) == [False, True, False]


def test_nobody_is_blamed_while_workers_read_weights(quick):
    async def watch(server):
        async with server.changing:
            await asyncio.sleep(0.2)
            return [one["state"] for one in server.states]

    assert asyncio.run(with_clients(watch)) == ["ready", "ready"]
