"""`run_forked`: long work for a client in a forked process, which ends when the client leaves and frees its memory."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NoReturn

from fastapi import HTTPException

from relibra.environment import keep_rust_from_backtraces, keep_tokenizers_serial
from relibra.errors import in_a_line
from relibra.serving.channel import Channel, read_frame
from relibra.serving.server.admission import SOON

SMALL_BYTES = 16 << 10
"""Bodies up to this size are read in the server's own process, which takes milliseconds."""
LARGE_BYTES = 1 << 20
"""Bodies above this size, shorter bodies, and answers are three kinds; each waits only for its own kind."""
SECONDS_BETWEEN_FORKS = 0.05
"""A pause in which short requests of others pass: a fork holds them for 30 ms; they take several turns of the loop."""
MOST_SECONDS = 60.0
MOST_MEMORY = 384 << 20
"""Bytes that work may take beyond what the server has."""
_AT_ONCE = {"body": min(4, max(1, (os.cpu_count() or 1) // 2)), "large body": 2, "answer": 4}
"""Processes of each kind; the server needs a core beside those of bodies."""
_places = {kind: asyncio.Semaphore(most) for kind, most in _AT_ONCE.items()}
_one_fork = asyncio.Lock()


async def run_forked(work: Callable[[], Iterable[Any]], size: int | None = None) -> list[Any]:
    """Return what `work` yields, as msgpack has it; the process is killed where the caller is cancelled.

    size     bytes of the body that `work` reads; None: it writes an answer
    raises   HTTPException as the work does; 400 where it takes more memory than a request may, 503 for more time
    """
    found: list[Any] = []
    async with _places["answer" if size is None else "large body" if size > LARGE_BYTES else "body"]:
        try:
            with ExitStack() as ended:
                ours, theirs = map(ended.enter_context, socket.socketpair())
                reader, writer = await asyncio.open_connection(sock=ours)
                ended.callback(writer.transport.abort)
                async with _one_fork:
                    if (process := os.fork()) == 0:
                        _work(work, theirs)
                    ended.callback(asyncio.get_running_loop().run_in_executor, None, os.waitpid, process, 0)
                    ended.callback(os.kill, process, signal.SIGKILL)  # called first; then a thread waits for it
                    await asyncio.sleep(SECONDS_BETWEEN_FORKS)
                theirs.close()
                async with asyncio.timeout(MOST_SECONDS):
                    while (frame := await read_frame(reader)) is not None and "yielded" in frame:
                        found.append(frame["yielded"])
                        await asyncio.sleep(0)
        except OSError as error:  # the time is over, or the system has no process or file left
            raise HTTPException(503, "the server is too busy for so long a request: send it later", SOON) from error
    if frame is None:
        raise HTTPException(400, "the request takes more memory than one may: send less at once")
    if "status" in frame:
        raise HTTPException(frame["status"], frame["detail"])
    return found


def _work(work: Callable[[], Iterable[Any]], end: socket.socket) -> NoReturn:
    """Send what `work` yields, and end this process; it keeps no other connection of the server open."""
    try:
        keep_tokenizers_serial()
        keep_rust_from_backtraces()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the server too, which kills this process
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(int(MOST_SECONDS) + 1)  # the server may have been killed
        os.nice(10)
        gc.disable()  # it would touch, and so copy, what the server has
        os.dup2(os.open(os.devnull, os.O_RDWR), 2)  # libraries print there when they lack memory
        for file in set(map(int, os.listdir("/proc/self/fd"))) - {0, 1, 2, end.fileno()}:
            with suppress(OSError):  # the file by which the folder was listed is closed already
                os.close(file)
        most = MOST_MEMORY + int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        with suppress(ValueError):  # the limit is less already
            resource.setrlimit(resource.RLIMIT_CORE, (1, 1))  # not 0: a program that is piped core dumps would run
        channel = Channel(end)
        try:
            for one in work():
                channel.send({"yielded": one})
            channel.send({"done": True})
        except HTTPException as error:
            channel.send({"status": error.status_code, "detail": error.detail})
        except Exception as error:  # noqa: BLE001 - the boundary of the process: the server answers the sentence
            if not isinstance(error, MemoryError):  # the server knows it by the end of the channel
                channel.send({"status": 500, "detail": f"the server failed: {in_a_line(error)}"})
    finally:
        os._exit(0)
