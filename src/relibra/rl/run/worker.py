"""The process of one rank: join the group, train, and report by exit code."""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.connection
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import IntEnum
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING

from relibra.environment import (
    LaunchedRank,
    StartedServers,
    error_file,
    rendezvous_address,
    set_rendezvous,
    shows_tracebacks,
    tell_started_servers,
)
from relibra.errors import ConfigError, EngineError, LostPeerError, RelibraError, library_errors
from relibra.printable import escape_logs_and_tracebacks, print_traceback, printable
from relibra.rl.config.run_config import RunConfig, with_ranks
from relibra.rl.run.run_folder import open_launched, remove_if_unused
from relibra.rl.run.stderr_writer import lenient_stderr

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    import torch


class Exit(IntEnum):
    """Exit codes of a rank's process; negative codes are the signal that killed it."""

    DONE = 0
    FAILED = 1
    """An expected error; its message went to the parent or to stderr."""
    CRASHED = 3
    """An unexpected error, with its traceback on stderr; or the parent process ended."""
    LOST_PEER = 4
    """Another rank ended or timed out."""
    LEFT = 5
    """Stands for any code of a rank that ended without a last word: something called `os._exit`. No rank returns it."""
    STOPPED = 130
    """Stopped by Ctrl-C or SIGTERM after a whole step."""


OUTSIDE = "the run failed before, between or after its steps"
"""Begins the message of an error of a library; those of a step name its stage."""
LATER_SECONDS = 2.0
"""By how much a rank that lost a peer ends later under `torchrun`, which takes the first that ends for the cause."""
MESSAGE_BYTES = 4000
"""Most bytes of an error message sent to the parent: below the size that a pipe writes atomically."""
LAST_WORDS = {Exit.DONE: b"\0done", Exit.STOPPED: b"\0stopped"}
"""Sent instead of an error message by a rank that has done its steps, or stopped, and written the policy. Its exit code
says nothing: a reward function may call `os._exit(0)`, and what it leaves behind may crash as the interpreter ends."""


@lenient_stderr()
def run_worker(
    launched: LaunchedRank,
    config_json: str,
    run: str,
    address: tuple[str, int],
    listener: socket.socket | None,
    last_word: Connection,
    output: Connection | None = None,
    servers: StartedServers | None = None,
) -> None:
    """Run one of the ranks that `launch` started; exits with an `Exit` code.

    address    host and port where the ranks meet
    listener   on rank 0: socket that listens there
    last_word  receives one of `LAST_WORDS`, or an error message: the parent prints equal messages of several ranks once
    output     receives what this process prints; None: that goes where the parent prints
    servers    rollout servers that the run has started
    """
    _exit_with_parent()
    if output is not None:
        os.dup2(output.fileno(), 2)
    _print_to_stderr()
    escape_logs_and_tracebacks()
    config = RunConfig.model_validate_json(config_json)
    set_rendezvous(launched, address, config.parallel.threads_per_rank)
    if servers is not None:
        tell_started_servers(servers)

    def tell(text: str) -> None:
        last_word.send_bytes(printable(text).encode()[:MESSAGE_BYTES])

    with _exit_on_error(tell):
        from relibra.rl.run.heartbeat import heartbeats
        from relibra.rl.run.ranks import Rendezvous, is_peer_loss, joined_ranks
        from relibra.rl.trainer import train_rank

        device = choose_device(launched.local_rank, launched.num_local_ranks, config.parallel.device)
        if launched.rank == 0:
            print(f"device {describe_device(device)}", file=sys.stderr, flush=True)
        host, port = address
        rendezvous = Rendezvous(launched.rank, launched.num_ranks, port, listener, host)
        patience = config.parallel.timeout_seconds, config.parallel.heartbeat_seconds
        with (
            joined_ranks(patience[0], device, rendezvous),
            heartbeats(Path(run), address, *patience, on_lost=_lost(tell)),
            library_errors(OUTSIDE, EngineError, stays=is_peer_loss),
        ):
            complete = train_rank(config, Path(run), device)
        code = Exit.DONE if complete else Exit.STOPPED
        last_word.send_bytes(LAST_WORDS[code])
    for child in multiprocessing.active_children():
        if not child.daemon:  # of a reward, as those of a ProcessPoolExecutor, for which this process would wait
            child.kill()
    sys.exit(code)


def run_launched(config: RunConfig, launched: LaunchedRank, resume: Path | None) -> tuple[Path, bool]:
    """Run one of the ranks that `torchrun` started; return the run folder, and False if stopped by Ctrl-C or SIGTERM.

    resume   folder of a run to resume; None: a new run
    raises   ConfigError if the number of ranks does not fit the configuration
    """
    config = with_ranks(config, launched.num_ranks)
    escape_logs_and_tracebacks()

    created: Path | None = None

    def tell(text: str) -> None:
        print(f"rank {launched.rank}: {printable(text)}", file=sys.stderr, flush=True)
        if created is not None:
            remove_if_unused(created)

    with _exit_on_error(tell, _record_failure), _printing_to_stderr():
        from relibra.rl.run.heartbeat import heartbeats
        from relibra.rl.run.ranks import is_peer_loss, joined_ranks
        from relibra.rl.trainer import train_rank

        device = choose_device(launched.local_rank, launched.num_local_ranks, config.parallel.device)
        if launched.rank == 0:
            print(f"device {describe_device(device)}", file=sys.stderr, flush=True)
        patience = config.parallel.timeout_seconds, config.parallel.heartbeat_seconds
        attempt = launched.restarts
        with joined_ranks(patience[0], device, attempt=attempt):
            run, again = _open_together(config, resume, launched)
            created = run if resume is None and not again else None
            with (
                heartbeats(run, rendezvous_address(), *patience, on_lost=_lost(tell, _record_failure), attempt=attempt),
                library_errors(OUTSIDE, EngineError, stays=is_peer_loss),
            ):
                complete = train_rank(config, run, device)
    return run, complete


def _open_together(config: RunConfig, resume: Path | None, launched: LaunchedRank) -> tuple[Path, bool]:
    """Return the run folder, and whether a run of this launch continues there; collective."""
    from relibra.rl.run.ranks import broadcast_json

    found = None
    if launched.rank == 0:
        run, checkpoint = open_launched(config, resume, launched)
        found = [str(run), checkpoint is not None]
        if launched.restarts:
            goes_on = f"continuing {run} from {checkpoint}" if checkpoint else f"beginning anew in {run}"
            print(printable(f"restart {launched.restarts} by torchrun: {goes_on}"), file=sys.stderr, flush=True)
    folder, again = broadcast_json(found)
    return Path(folder), again


def _record_failure(text: str | None) -> None:
    """Tell `torchrun` why this rank failed, as torch's `record` does, so that its summary shows the first cause.

    text   None: a peer was lost, which is no cause. This rank then ends a little later than the one that failed first
    """
    if text is None:
        time.sleep(LATER_SECONDS)
        return
    file = error_file()
    if file is not None:
        about = {"py_callstack": printable(text), "timestamp": str(int(time.time()))}
        file.write_text(json.dumps({"message": {"message": printable(text), "extraInfo": about}}), encoding="utf-8")


@contextmanager
def _exit_on_error(
    report: Callable[[str], None], record: Callable[[str | None], None] = lambda _: None
) -> Iterator[None]:
    """Report any error and end this process at once: expected errors by their message, others by their traceback.

    Nothing is torn down, because threads of a broken process group may never end, and the peers notice the end of a
    process earlier than a timeout.

    record   called last, with the message, or the traceback of an unexpected error; None: a peer was lost
    """
    try:
        yield
    except BaseException as error:  # noqa: BLE001 - process boundary
        expected = isinstance(error, RelibraError | OSError)
        if expected:
            report(str(error))
        if not expected or shows_tracebacks():
            print_traceback(type(error), error, error.__traceback__)
        lost = isinstance(error, LostPeerError)
        record(None if lost else str(error) if expected else traceback.format_exc())
        os._exit(Exit.LOST_PEER if lost else Exit.FAILED if expected else Exit.CRASHED)


def _lost(report: Callable[[str], None], record: Callable[[None], None] = lambda _: None) -> Callable[[str], None]:
    """Return what a rank does whose peer is lost: it reports that, and ends, whatever its main thread waits for."""

    def end(sentence: str) -> None:
        report(sentence)
        record(None)
        os._exit(Exit.LOST_PEER)

    return end


def _print_to_stderr() -> None:
    """Send what a reward, or a process of it, prints to stderr: stdout belongs to the outcome of the run."""
    with suppress(OSError):  # one of them is closed
        os.dup2(2, 1)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)


@contextmanager
def _printing_to_stderr() -> Iterator[None]:
    """Do the same inside only: rank 0 of `torchrun` prints the outcome itself."""
    try:
        before = os.dup(1)
    except OSError:  # closed
        yield
        return
    _print_to_stderr()
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(before, 1)
        os.close(before)


def _exit_with_parent() -> None:
    """End this process when its parent process ends, even by SIGKILL."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker has a parent process"

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(Exit.CRASHED)

    threading.Thread(target=watch, daemon=True).start()


def choose_device(local_rank: int, num_local_ranks: int, wanted: str) -> torch.device:
    """Return this rank's GPU; the CPU where that is wanted, or the machine has no GPU at all.

    wanted   parallel.device
    raises   ConfigError for fewer GPUs than ranks
    """
    import torch

    gpus = torch.cuda.device_count() if wanted == "auto" else 0
    if not gpus:
        return torch.device("cpu")
    if gpus < num_local_ranks:
        raise ConfigError(
            f"{num_local_ranks} ranks on a machine with {gpus} GPU{'s' * (gpus > 1)}: each rank needs one; set "
            f"parallel.ranks to {gpus} at most, or parallel.device=cpu to train on the CPU"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def describe_device(device: torch.device) -> str:
    """Return the kind of a device in words."""
    import torch

    return "cpu" if device.type == "cpu" else f"{device.type} ({torch.cuda.get_device_name(device)})"
