"""The ranks of one node: what a Ray actor does there. Imports neither ray nor torch."""

from __future__ import annotations

import multiprocessing
import os
import queue
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import relibra
from relibra.environment import LaunchedRank, StartedServers, keep_hub_offline
from relibra.rl.run.rank_processes import EndedRanks, RankProcesses

LINE_BYTES = 8192
"""Longer lines of a rank are cut into several."""
LINES = 256
"""Most lines in one answer; ranks wait to print more until the driver has fetched these."""
WAIT_SECONDS = 0.05
"""Seconds to wait for lines that are printed together."""
END_SECONDS = 10.0
"""Seconds to wait for killed processes."""


@dataclass(frozen=True)
class News:
    """What happened since the news before.

    lines   that ranks printed
    ended   None: they still run, or more lines will follow
    """

    lines: tuple[str, ...]
    ended: EndedRanks | None


def enter_folder(folder: str, run: str, version: str) -> str:
    """Enter the folder of the driver; return why this node cannot take part, or nothing.

    run       run folder
    version   of the driver's relibra
    """
    if version != relibra.__version__:
        return f"it has relibra {relibra.__version__}, and the driver {version}: install the same on all nodes"
    try:
        os.chdir(folder)
    except OSError as error:
        return f"the folder {folder}, where the run was started, cannot be entered there ({error.strerror})"
    if not (Path(run) / "config.json").is_file():
        return f"the run folder {run} is not there: set run.folder to storage that all nodes share"
    return ""


class NodeRanks:
    """Starts the processes of a node's ranks, passes on what they print, and tells how they ended.

    Ray runs its methods in several threads: `news` waits while `interrupt` is called.
    """

    def __init__(self, ranks: Sequence[LaunchedRank]) -> None:
        """Start nothing yet."""
        self._ranks = ranks
        self._lines: queue.Queue[str | None] = queue.Queue(LINES)  # None: no more will come
        self._silent = False
        self._listener: socket.socket | None = None
        self._processes: RankProcesses | None = None
        self._ended: EndedRanks | None = None
        self._watcher: threading.Thread | None = None

    def prepare(self, folder: str, run: str, version: str) -> str:
        """Enter the folder of the driver; return why this node cannot train, or nothing."""
        return enter_folder(folder, run, version)

    def listen(self, host: str) -> int:
        """Return a free port on which rank 0 will serve the store of the group."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        return int(self._listener.getsockname()[1])

    def start(
        self,
        config_json: str,
        run: str,
        *,
        address: tuple[str, int],
        heartbeat_seconds: float,
        offline: bool,
        servers: StartedServers | None = None,
    ) -> None:
        """Start the processes.

        address             host and port where all ranks of the run meet
        heartbeat_seconds   parallel.heartbeat_seconds
        offline             use downloaded models only
        servers             rollout servers that the run has started
        """
        if offline:
            keep_hub_offline()
        reader, writer = multiprocessing.Pipe(duplex=False)
        self._processes = RankProcesses(
            self._ranks,
            config_json,
            run,
            address=address,
            listener=self._listener,
            output=writer,
            servers=servers,
        )
        self._processes.start()
        writer.close()
        threading.Thread(target=self._read, args=(os.dup(reader.fileno()),), daemon=True).start()
        self._watcher = threading.Thread(target=self._watch, args=(heartbeat_seconds,), daemon=True)
        self._watcher.start()

    def news(self, seconds: float) -> News:
        """Return what was printed; wait until there is something, at most so many seconds."""
        deadline = time.monotonic() + seconds
        lines: list[str] = []
        while not self._silent and len(lines) < LINES:
            try:
                line = self._lines.get(timeout=WAIT_SECONDS if lines else seconds)
            except queue.Empty:
                break
            self._silent = line is None
            lines += [] if line is None else [line]
        if self._silent and self._watcher is not None:
            self._watcher.join(max(0.0, deadline - time.monotonic()))
        # A process that a reward left behind may keep the pipe open.
        return News(tuple(lines), self._ended if self._silent or not lines else None)

    def interrupt(self) -> None:
        """Ask the ranks to stop after the present step."""
        if self._processes is not None:
            self._processes.interrupt()

    def end(self) -> None:
        """Kill the ranks that still run."""
        if self._processes is not None and self._watcher is not None:
            self._processes.kill()
            self._watcher.join(END_SECONDS)

    def _watch(self, heartbeat_seconds: float) -> None:
        assert self._processes is not None
        self._ended = self._processes.wait(heartbeat_seconds)

    def _read(self, output: int) -> None:
        with os.fdopen(output, "rb") as file:
            while line := file.readline(LINE_BYTES):
                self._lines.put(line.decode(errors="replace").rstrip("\n"))
        self._lines.put(None)
