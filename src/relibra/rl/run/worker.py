"""One rank's process, from its start to its exit code."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING

from relibra.environment import LaunchedRank, set_rendezvous
from relibra.errors import RelibraError
from relibra.rl.config.run_config import RunConfig, with_ranks
from relibra.rl.run.run_folder import open_or_create

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    import torch


class Exit(IntEnum):
    """How a rank's process ended; below 0 stands the signal that killed it."""

    DONE = 0
    FAILED = 1
    """Its error is told in one sentence on stderr."""
    CRASHED = 3
    """Its traceback is on stderr, or its parent is gone."""
    LOST_PEER = 4
    """Another rank ended, or did not answer in time."""
    STOPPED = 130
    """Stopped by Ctrl-C after a whole step."""


MESSAGE_BYTES = 4000
"""Of an error's sentence at most so many go to the parent: a pipe takes them at once, or not at all."""


def run_worker(
    rank: int, config_json: str, run: str, port: int, listener: socket.socket | None, failure: Connection
) -> None:
    """Be one of the ranks that `launch` started; the exit code says how it ended.

    listener   on rank 0: what listens on the port where the ranks meet
    failure    takes the sentence of an error, for the parent to tell once where several ranks say the same
    """
    _end_with_parent()
    config = RunConfig.model_validate_json(config_json)
    set_rendezvous(rank, config.parallel.ranks, port, config.parallel.threads_per_rank)
    with _failing_at_once(lambda text: failure.send_bytes(text.encode()[:MESSAGE_BYTES])):
        from relibra.rl.run.ranks import Meeting, joined_ranks
        from relibra.rl.trainer import train_rank

        device = _device(rank, config.parallel.ranks)
        with joined_ranks(
            config.parallel.timeout_seconds, device, Meeting(rank, config.parallel.ranks, port, listener)
        ):
            complete = train_rank(config, Path(run), device)
    sys.exit(Exit.DONE if complete else Exit.STOPPED)


def run_launched(config: RunConfig, launched: LaunchedRank, resume: Path | None) -> tuple[Path, bool]:
    """Be one of the ranks that `torchrun` started; return the run folder, and False when stopped by Ctrl-C.

    resume   folder of a run to go on with; None: a new one
    raises   ConfigError when the number of ranks does not fit the configuration
    """
    config = with_ranks(config, launched.num_ranks)
    with _failing_at_once(lambda text: print(f"rank {launched.rank}: {text}", file=sys.stderr, flush=True)):
        from relibra.rl.run.ranks import broadcast_json, joined_ranks
        from relibra.rl.trainer import train_rank

        device = _device(launched.local_rank, launched.num_local_ranks)
        with joined_ranks(config.parallel.timeout_seconds, device):
            run = Path(broadcast_json(str(open_or_create(config, resume)) if launched.rank == 0 else None))
            complete = train_rank(config, run, device)
    return run, complete


@contextmanager
def _failing_at_once(tell: Callable[[str], None]) -> Iterator[None]:
    """Report whatever goes wrong and end this process on the spot: errors in their sentence, bugs by their traceback.

    No exception passes on and nothing is torn down: threads of a broken process group may never end, and the peers
    notice the end of a process sooner than a silence.
    """
    try:
        yield
    except BaseException as error:  # noqa: BLE001 - process boundary
        from relibra.rl.run.ranks import LostPeerError

        expected = isinstance(error, RelibraError | OSError)
        if expected:
            tell(str(error))
        else:
            print(traceback.format_exc(), file=sys.stderr, flush=True)
        lost = isinstance(error, LostPeerError)
        os._exit(Exit.LOST_PEER if lost else Exit.FAILED if expected else Exit.CRASHED)


def _end_with_parent() -> None:
    """End this process at once when the one that started it is gone, even by SIGKILL."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker has a parent process"

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(Exit.CRASHED)

    threading.Thread(target=watch, daemon=True).start()


def _device(local_rank: int, num_local_ranks: int) -> torch.device:
    """Return this rank's GPU if there is one for every rank of this machine, else the CPU."""
    import torch

    if torch.cuda.device_count() < num_local_ranks:
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)
