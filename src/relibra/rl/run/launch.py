"""Launch a run: start its processes, here or on Ray, and wait for them, or run as a rank that `torchrun` started.

Imports no torch, so that the waiting process starts fast and uses little memory.
"""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

from relibra.environment import STOP_SIGNALS, LaunchedRank, keep_hub_offline, launched_rank
from relibra.errors import INSTALL_TRAINING, ConfigError
from relibra.printable import printable
from relibra.rl.config.model_folder import check_expert_ranks, check_model_path, names_hub
from relibra.rl.config.run_config import RunConfig, describe_training
from relibra.rl.run.on_ray.connection import check_ray, connected_ray
from relibra.rl.run.on_ray.driver import RayRanks
from relibra.rl.run.rank_processes import RankProcesses
from relibra.rl.run.run_failure import LostRankError, check_ended, print_resume_hint
from relibra.rl.run.run_folder import latest_checkpoint, locked_run_folder, open_or_create, remove_if_unused
from relibra.rl.run.stderr_writer import lenient_stderr
from relibra.rl.run.worker import run_launched
from relibra.rl.tasks.make import check_task
from relibra.user_function import check_function

MAX_RESTARTS = 3
"""Restarts of a supervised run without a newer checkpoint; with one they are counted anew."""


@dataclass(frozen=True)
class Finished:
    """Result of a run: its folder, and whether it is complete (False: stopped by Ctrl-C)."""

    run: Path
    complete: bool


@lenient_stderr()
def launch(config: RunConfig, resume: Path | None = None, *, supervise: bool = False) -> Finished | None:
    """Run a configuration to its end, or until Ctrl-C, which lets the current step finish.

    resume      folder of a run to resume; None: a new run
    supervise   after a lost rank, start again from the last checkpoint, MAX_RESTARTS times without a newer one
    returns     None under `torchrun` on every rank but the first
    raises      ConfigError if a package is missing or the run folder cannot be created; EngineError if a rank failed
                or was killed: the run folder keeps the finished steps
    """
    for package in ("torch", "transformers", "accelerate", "tensorboard"):
        if find_spec(package) is None:
            raise ConfigError(f"training needs the package {package!r}: {INSTALL_TRAINING}")
    if config.model.path:
        check_model_path(config.model.path)
        if not names_hub(config.model.path):
            keep_hub_offline()
    launched = launched_rank()
    on_ray = config.parallel.launcher == "ray"
    if on_ray:
        check_ray()
    if launched is None or launched.rank == 0:
        for line in describe_training(config):
            print(printable(line), file=sys.stderr, flush=True)
    if launched is not None:
        return _run_as_rank(config, launched, resume, supervise=supervise)
    if config.model.path:
        check_expert_ranks(config.model.path, config.parallel.ranks)
    check_task(config.task, config.evaluation.prompts if config.evaluation.every else 0)
    for setting, name in (("algorithm.loss", config.algorithm.loss), ("plan.balancer", config.plan.balancer)):
        if ":" in name:
            check_function(setting, name)
    if config.follows_plans:
        _prepare_cluster(config)
    with connected_ray() if on_ray else nullcontext():
        return _start_ranks(config, resume, supervise=supervise)


def _run_as_rank(config: RunConfig, launched: LaunchedRank, resume: Path | None, *, supervise: bool) -> Finished | None:
    """Run one of the ranks that `torchrun` started; return None on every rank but the first."""
    if config.parallel.launcher == "ray":
        raise ConfigError("parallel.launcher=ray starts the ranks itself: run relibra without torchrun")
    if supervise:
        raise ConfigError(
            "--supervise starts again the processes that relibra started: under torchrun leave it out and use "
            "torchrun's --max-restarts, after which a run continues from its last checkpoint"
        )
    run, complete = run_launched(config, launched, resume)
    if launched.rank != 0:
        return None
    if not complete:
        print_resume_hint(run)
    return Finished(run, complete)


def _start_ranks(config: RunConfig, resume: Path | None, *, supervise: bool) -> Finished:
    """Start the ranks of a run, new or resumed, and wait until it ends."""
    run = open_or_create(config, resume)
    if resume is not None:
        with locked_run_folder(run):  # fail before processes start if the run is in use; rank 0 locks it later
            pass
    print(f"starting {config.parallel.ranks} processes; run folder {printable(str(run))}", file=sys.stderr, flush=True)
    try:
        complete = _run_supervised(config, run) if supervise else _run_processes(config, run)
    except KeyboardInterrupt:
        print_resume_hint(run)
        raise
    finally:
        if resume is None:
            remove_if_unused(run)
    if not complete:
        print_resume_hint(run)
    return Finished(run, complete)


def _prepare_cluster(config: RunConfig) -> None:
    """Measure the machine of `plan.cluster` if it asks for that; raise ClusterError, before processes start, if bad."""
    from relibra.calibration.machine import check_cluster, measure_cluster

    if config.plan.cluster == "measure" and config.parallel.launcher == "ray":
        raise ConfigError(
            "plan.cluster 'measure' measures the machine on which relibra is called, not Ray's nodes: run `relibra "
            "calibrate --output cluster.toml` on one and set plan.cluster=cluster.toml"
        )
    if config.plan.cluster == "measure":
        print("plan.cluster 'measure': measuring this machine, or reading its measurement", file=sys.stderr, flush=True)
        print(f"plan.cluster: {measure_cluster(config.parallel.ranks)}", file=sys.stderr, flush=True)
    else:
        check_cluster(config.plan.cluster)


def _run_supervised(config: RunConfig, run: Path) -> bool:
    """Run the processes, and again from the last checkpoint after a lost rank."""
    checkpoint, left = latest_checkpoint(run), MAX_RESTARTS
    while True:
        try:
            return _run_processes(config, run)
        except LostRankError as error:
            before, checkpoint = checkpoint, latest_checkpoint(run)
            left = left if checkpoint == before else MAX_RESTARTS
            if checkpoint is None or not left:
                raise
            left -= 1
            print(printable(str(error)), file=sys.stderr)
            again = f"restarting from {checkpoint}, {left} more without a newer checkpoint"
            print(printable(again), file=sys.stderr, flush=True)


def _run_processes(config: RunConfig, run: Path) -> bool:
    """Run the ranks once, on this machine or on Ray; return False if stopped by Ctrl-C or SIGTERM."""
    if config.parallel.launcher == "ray":
        return _watch(RayRanks(config, run), config, run)
    num_ranks = config.parallel.ranks
    places = [LaunchedRank(rank, rank, num_ranks, num_ranks) for rank in range(num_ranks)]
    with socket.create_server(("127.0.0.1", 0)) as listener:  # from here on, no other program can take the port
        address = ("127.0.0.1", listener.getsockname()[1])
        ranks = RankProcesses(places, config.model_dump_json(), str(run), address=address, listener=listener)
        return _watch(ranks, config, run)


def _watch(ranks: RankProcesses | RayRanks, config: RunConfig, run: Path) -> bool:
    forward = _InterruptForwarder(ranks.interrupt)
    try:
        ranks.start()
        ended = ranks.wait(config.parallel.heartbeat_seconds)
    finally:
        ranks.end()
        forward.restore()
    return check_ended(ended, run, asked=forward.asked)


class _InterruptForwarder:
    """Forwards the first Ctrl-C or SIGTERM to the ranks, and raises KeyboardInterrupt at the second."""

    def __init__(self, interrupt: Callable[[], None]) -> None:
        self._interrupt = interrupt
        self._count = 0
        self._before = {number: signal.signal(number, self._on_interrupt) for number in STOP_SIGNALS}

    @property
    def asked(self) -> bool:
        """Return whether the run was asked to stop."""
        return self._count > 0

    def restore(self) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _on_interrupt(self, number: int, _frame: FrameType | None) -> None:
        self._count += 1
        if self._count > 1:
            raise KeyboardInterrupt
        again = "press Ctrl-C again" if number == signal.SIGINT else "send SIGTERM again"
        print(f"stopping after this step; {again} to stop at once", file=sys.stderr, flush=True)
        self._interrupt()
