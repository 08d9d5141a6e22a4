"""The ranks of one machine, which torch's elastic agent starts and ends, and how they ended.

Imports torch only to start them.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from relibra.environment import rank_environment, uncollected_imports
from relibra.rl.config.run_config import RunConfig
from relibra.rl.run.run_failure import EndedRanks, Exit, RankFailure
from relibra.rl.run.run_folder import running_file

STOPPED_SECONDS = 30.0
"""Seconds beyond `parallel.heartbeat_seconds` after which a rank that is stopped is killed: other ranks, if
there are any, notice it before, and write their stacks."""
POLL_SECONDS = 2.0
RUNNING = "running "
"""Content of the file `done` of a rank until its work is done: the file is made before the disk may be full."""
WATCH_SECONDS = 0.2
START_RANK = (
    "import json, sys; place = json.load(open(sys.argv[1])); sys.path[:] = place['path']; "
    "from relibra.rl.run.node_ranks import watch_launcher; watch_launcher(place['launcher'], place['run']); "
    "from relibra.environment import uncollected_imports\n"
    "with uncollected_imports(): from relibra.rl.run.rank import main\n"
    "main(place)"
)
"""Program of a rank: it watches the launcher while it imports torch."""
_NO_SIGNALS = "none"
"""Names no signal: `launch` handles those that stop a run, and torch takes no empty list."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """A machine among those of a run.

    num_ranks    on each machine
    number       of this one
    host, port   of the first one, where the ranks of all meet; port 0: any that is free, for one machine
    """

    num_ranks: int
    number: int = 0
    num_nodes: int = 1
    host: str = "127.0.0.1"
    port: int = 0


def run_node_ranks(config: RunConfig, run: Path, node: Node) -> EndedRanks:
    """Start the ranks of this machine, and wait until they ended; the first failure ends all.

    Ranks stop after the present step when `running_file` is removed. A signal handler that raises KeyboardInterrupt
    kills them.
    """
    with (
        TemporaryDirectory(prefix="relibra-", ignore_cleanup_errors=True) as name,
        rank_environment(1),
        _killing_stopped(Path(name), config.parallel.heartbeat_seconds + STOPPED_SECONDS) as stopped,
    ):
        folder = Path(name)
        place = {"config": config.model_dump_json(), "run": str(run), "launcher": os.getpid(), "path": sys.path}
        (folder / "place.json").write_text(json.dumps(place), encoding="utf-8")
        failures = _launch(node, folder)
        first = node.number * node.num_ranks
        return EndedRanks(
            num_ranks=node.num_ranks,
            done={
                first + int(file.parent.name): how == "complete"
                for file in folder.rglob("done")
                if (how := file.read_text()) != RUNNING
            },
            failures={rank: _failure(failure, stopped) for rank, failure in failures.items()},
        )


def _launch(node: Node, folder: Path) -> dict[int, Any]:
    """Start the ranks and wait for them; return torch's `ProcessFailure` of those that failed, the first one first."""
    with uncollected_imports():
        from torch.distributed import TCPStore  # type: ignore[attr-defined]
        from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logger = logging.getLogger("torch.distributed.elastic")
    logger.propagate = False  # what the agent logs of ranks that end, `run_failure.py` says in one sentence
    logger.addHandler(logging.NullHandler())
    port, store = node.port, None
    if not port:  # the agent shares this server, so that no other program takes the port or reaches it from outside
        listener = socket.create_server((node.host, 0))
        port = listener.getsockname()[1]
        store = TCPStore(
            node.host, port, is_master=True, wait_for_workers=False, multi_tenant=True,
            master_listen_fd=listener.detach(),
        )  # fmt: skip
    # Before torch 2.12 the agent waits up to 30 s for ranks that it stops.
    timeout: dict[str, Any] = {"shutdown_timeout": 0} if "shutdown_timeout" in LaunchConfig.__dataclass_fields__ else {}
    config = LaunchConfig(
        min_nodes=node.num_nodes,
        max_nodes=node.num_nodes,
        nproc_per_node=node.num_ranks,
        run_id="relibra",
        rdzv_backend="static",
        rdzv_endpoint=f"[{node.host}]:{port}" if ":" in node.host else f"{node.host}:{port}",
        rdzv_configs={"rank": node.number},
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder)),
        signals_to_handle=_NO_SIGNALS,
        **timeout,
    )
    try:
        elastic_launch(config, sys.executable)("-c", START_RANK, str(folder / "place.json"))
    except ChildFailedError as error:
        return dict(error.failures)
    finally:
        del store
    return {}


def _failure(failure: Any, stopped: set[int]) -> RankFailure:
    message = failure.message["message"] if isinstance(failure.message, dict) else ""
    return RankFailure(code=failure.exitcode, message=message, stopped=failure.pid in stopped)


@contextmanager
def _killing_stopped(folder: Path, seconds: float) -> Iterator[set[int]]:
    """Inside, kill a rank that is stopped (SIGSTOP) for so long, or once another one failed; yield the process ids.

    Otherwise the agent waits half a minute for it, and where no other rank is left to notice it, for ever.

    folder   of the launch, which the command of each rank names
    """
    killed: set[int] = set()
    ended = threading.Event()

    def watch() -> None:
        pid: int | None = None
        since = 0.0
        while not ended.wait(POLL_SECONDS):
            before, pid = pid, _stopped_child(folder)
            since = since if pid == before else time.monotonic()
            given_up = any(folder.rglob("error.json"))
            if pid is not None and pid == before and (given_up or time.monotonic() - since > seconds):
                killed.add(pid)
                os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=watch, daemon=True, name="stopped ranks")
    thread.start()
    try:
        yield killed
    finally:
        ended.set()
        thread.join()


def _stopped_child(folder: Path) -> int | None:
    """Return the process id of a rank that SIGSTOP or a terminal stopped; None: there is none, or this is no Linux."""
    if sys.platform != "linux":
        return None
    try:
        found = os.waitid(os.P_ALL, 0, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
        if found is None or found.si_code != os.CLD_STOPPED:
            return None
        return found.si_pid if str(folder).encode() in Path(f"/proc/{found.si_pid}/cmdline").read_bytes() else None
    except (ChildProcessError, FileNotFoundError):  # there is no child, or it ended just now
        return None


def watch_launcher(launcher: int, run: str = "") -> None:
    """End this rank when the process that started it is gone, even by SIGKILL; ask it to stop when the run shall stop.

    launcher   process id
    run        run folder, whose `running_file` is removed to stop the run; empty: the launcher sends signals
    """

    def watch() -> None:
        file = running_file(Path(run)) if run else None
        while os.getppid() == launcher:
            handled = callable(signal.getsignal(signal.SIGTERM))  # not yet, while the rank starts
            try:
                stops = file is not None and handled and not file.exists()
            except OSError:  # a file system that does not answer now
                stops = False
            if stops:
                file = None
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(WATCH_SECONDS)
        os._exit(Exit.CRASHED)

    threading.Thread(target=watch, daemon=True, name="watch of the launcher").start()
