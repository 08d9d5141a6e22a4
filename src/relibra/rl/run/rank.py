"""The process of one rank, started by `launch` or `torchrun`: join the group, train, tell the launcher how it ended."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler, record

from relibra.environment import LaunchedRank, error_file, launched_rank, shows_tracebacks
from relibra.errors import ConfigError, EngineError, LostPeerError, RelibraError, library_errors
from relibra.files import write_text
from relibra.printable import escape_logs_and_tracebacks, print_traceback, printable, printable_lines
from relibra.rl.config.run_config import RunConfig, with_ranks
from relibra.rl.model.block_product import use_block_products
from relibra.rl.run.heartbeat import HangingPeerError, heartbeats
from relibra.rl.run.node_ranks import RUNNING, watch_launcher
from relibra.rl.run.ranks import Rendezvous, connect_ranks, is_peer_loss, joined_ranks
from relibra.rl.run.run_failure import Exit
from relibra.rl.run.run_folder import open_launched, remove_if_unused
from relibra.rl.run.stderr_writer import lenient_stderr
from relibra.rl.trainer import train_rank

OUTSIDE = "the run failed before, between or after its steps"
"""Begins the message of an error of a library; those of a step name its stage."""
LATER_SECONDS = 1.0
"""By how much a rank that lost a peer ends later: a launcher, which looks ten times a second, takes the first that ends
for the cause."""
LEAVE_SECONDS = 10.0
"""Seconds that a rank gets to end after its work."""
_EXPECTED = (RelibraError, OSError)


@lenient_stderr()
def main(place: Mapping[str, Any]) -> None:
    """Run one of the ranks that `launch` started.

    place   config: settings as JSON; run: its folder
    """
    launched, told = launched_rank(), error_file()
    assert launched is not None, "the agent tells a rank who it is"
    assert told is not None, "the agent tells a rank where to write"
    with suppress(OSError):  # one of them is closed
        os.dup2(2, 1)  # to the end of the process: what a reward prints at exit is no outcome either
    done = told.with_name("done")
    done.write_text(RUNNING)
    run = Path(place["run"])
    config = RunConfig.model_validate_json(place["config"])
    _, complete = run_rank(config, launched, lambda _: (run, False), prints=False)
    with done.open("r+") as file:  # overwrites as many bytes, for which a full disk has room
        file.write("complete" if complete else "stopped ")
    leave()


def leave() -> None:
    """Let this process end, whatever a reward left behind: processes of a ProcessPoolExecutor, and threads."""
    _kill_children()
    end = threading.Timer(LEAVE_SECONDS, os._exit, (0,))
    end.daemon = True
    end.start()


def _kill_children() -> None:
    for child in multiprocessing.active_children():
        child.kill()


def run_launched(config: RunConfig, launched: LaunchedRank, resume: Path | None) -> tuple[Path, bool]:
    """Run one of the ranks that `torchrun` started; return the run folder, and False if stopped by Ctrl-C or SIGTERM.

    resume   folder of a run to resume; None: a new run
    raises   ConfigError if the number of ranks does not fit the configuration
    """
    config = with_ranks(config, launched.num_ranks)
    if error_file() is not None:  # an agent started it
        watch_launcher(os.getppid())
    return run_rank(config, launched, lambda met: _open_together(config, resume, launched, met), prints=True)


def run_rank(
    config: RunConfig, launched: LaunchedRank, open_folder: Callable[[Rendezvous], tuple[Path, bool]], *, prints: bool
) -> tuple[Path, bool]:
    """Join the other ranks and train; return the run folder, and False if stopped by Ctrl-C or SIGTERM; collective.

    After an error this process ends at once, with a code of `Exit`. Nothing is torn down, because threads of a broken
    process group may never end, and the peers notice the end of a process earlier than a timeout.

    open_folder   returns the run folder, and whether this launch has made it
    prints        whether the error of this rank is printed, beside being recorded for the launcher
    """
    escape_logs_and_tracebacks()
    failures = _FailureRecord(launched.rank, prints=prints)
    outcome = None
    try:
        with _printing_to_stderr():
            outcome = record(_join_and_train, failures)(config, launched, open_folder, failures)
    except BaseException as error:  # noqa: BLE001 - process boundary
        failures.exit(error)
    if outcome is None:  # something called sys.exit
        os._exit(Exit.CRASHED)
    return outcome


def _join_and_train(
    config: RunConfig,
    launched: LaunchedRank,
    open_folder: Callable[[Rendezvous], tuple[Path, bool]],
    failures: _FailureRecord,
) -> tuple[Path, bool]:
    device = choose_device(launched.local_rank, launched.num_local_ranks)
    if launched.rank == 0:
        name = [f"({torch.cuda.get_device_name(device)})"] if device.type == "cuda" else []
        print("device", device.type, *name, file=sys.stderr, flush=True)
    timeout, patience = config.parallel.timeout_seconds, config.parallel.heartbeat_seconds
    met = connect_ranks(timeout, attempt=launched.restarts)
    run, created = open_folder(met)
    failures.created = run if created else None
    with (
        heartbeats(run, met, timeout, patience, on_lost=lambda sentence: failures.exit(HangingPeerError(sentence))),
        joined_ranks(timeout, device, met),
        library_errors(OUTSIDE, EngineError, stays=is_peer_loss),
    ):
        return run, train_rank(config, run, device)


def _open_together(
    config: RunConfig, resume: Path | None, launched: LaunchedRank, met: Rendezvous
) -> tuple[Path, bool]:
    """Return the run folder that rank 0 opens, and whether it is new; collective."""
    if launched.rank == 0:
        run, checkpoint = open_launched(config, resume, launched)
        if launched.restarts:
            goes_on = f"continuing {run} from {checkpoint}" if checkpoint else f"beginning anew in {run}"
            print(printable(f"restart {launched.restarts} by torchrun: {goes_on}"), file=sys.stderr, flush=True)
        met.store.set("run", json.dumps([str(run), resume is None and checkpoint is None]))
    try:
        folder, created = json.loads(met.store.get("run"))
    except RuntimeError as error:
        late = f"within {config.parallel.timeout_seconds:g} s (parallel.timeout_seconds)"
        raise LostPeerError(f"rank 0 did not open the run folder {late}: its process hangs, or is stopped") from error
    return Path(folder), created


class _FailureRecord(ErrorHandler):
    """Tells the launcher why this rank failed: expected errors by their message, others by their traceback.

    created   run folder that this launch has made, and that is removed again if nothing is in it
    """

    def __init__(self, rank: int, *, prints: bool) -> None:
        self._rank, self._prints = rank, prints
        self.created: Path | None = None

    def record_exception(self, e: BaseException) -> None:
        """Print and record an error."""
        expected = isinstance(e, _EXPECTED)
        text = printable(str(e)) if expected else traceback.format_exc()
        if shows_tracebacks():
            print_traceback(type(e), e, e.__traceback__)
        if self.created is not None:
            remove_if_unused(self.created)
        if isinstance(e, LostPeerError):
            time.sleep(LATER_SECONDS)
        about = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))}}
        file = error_file()
        try:
            write_text(file, json.dumps({"message": about})) if file else None
        except OSError:
            file = None
        if self._prints or file is None:
            print(printable_lines(f"rank {self._rank}: {text}"), file=sys.stderr, flush=True)

    def exit(self, error: BaseException) -> None:
        """End this process; record what `record` does not see: an error in a thread, sys.exit, an interrupt."""
        if threading.current_thread() is not threading.main_thread() or not isinstance(error, Exception):
            self.record_exception(error)
        _kill_children()
        sys.stderr.flush()
        kinds = ((HangingPeerError, Exit.HANGING_PEER), (LostPeerError, Exit.LOST_PEER), (_EXPECTED, Exit.FAILED))
        os._exit(next((code for kind, code in kinds if isinstance(error, kind)), Exit.CRASHED))


@contextmanager
def _printing_to_stderr() -> Iterator[None]:
    """Send what a reward, or a process of it, prints inside to stderr: stdout belongs to the outcome of the run."""
    before: int | None = None
    with suppress(OSError):  # one of them is closed
        before = os.dup(1)
        os.dup2(2, 1)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    try:
        yield
    finally:
        if before is not None:
            sys.stdout.flush()
            os.dup2(before, 1)
            os.close(before)


def choose_device(local_rank: int, num_local_ranks: int) -> torch.device:
    """Return this rank's GPU, or the CPU where the machine has no GPU; raises ConfigError for fewer GPUs than ranks."""
    gpus = torch.cuda.device_count()
    if not gpus:
        use_block_products()
        return torch.device("cpu")
    if gpus < num_local_ranks:
        raise ConfigError(
            f"{num_local_ranks} ranks on a machine with {gpus} GPU{'s' * (gpus > 1)}: each rank needs one; set "
            f"parallel.ranks to {gpus} at most, or hide the GPUs (CUDA_VISIBLE_DEVICES=) to train on the CPU"
        )
    torch.cuda.set_device(local_rank)
    # cuDNN plans its attention anew for each sequence length, which takes longer than a pass over all sequences.
    torch.backends.cuda.enable_cudnn_sdp(False)
    return torch.device("cuda", local_rank)
