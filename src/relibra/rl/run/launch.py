"""Launch a run: start its processes, here or on Ray, and wait for them, or run as a rank that `torchrun` started.

Imports no torch before the ranks start: a bad setting is refused at once.
"""

from __future__ import annotations

import errno
import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

from relibra.environment import STOP_SIGNALS, LaunchedRank, keep_hub_offline, launched_rank, uncollected_imports
from relibra.errors import INSTALL_TRAINING, ConfigError, EngineError
from relibra.files import write_text
from relibra.printable import printable
from relibra.rl.config.model_folder import check_expert_ranks, check_model_path, names_hub
from relibra.rl.config.run_config import RunConfig, describe_training, with_ranks
from relibra.rl.memory.estimate import ESTIMATE_FILE, Estimate
from relibra.rl.memory.estimator import check_memory, with_estimate
from relibra.rl.run.node_ranks import Node, run_node_ranks
from relibra.rl.run.ray_nodes import check_ray, connected_ray, run_on_ray
from relibra.rl.run.run_failure import LostRankError, NoRoomError, check_ended, print_resume_hint
from relibra.rl.run.run_folder import (
    create_run_folder,
    latest_checkpoint,
    locked_run_folder,
    remove_if_unused,
    running_file,
)
from relibra.rl.run.shrinking import ShrinkLog, Shrunk, shrink_config
from relibra.rl.run.stderr_writer import lenient_stderr
from relibra.rl.tasks.make import check_task
from relibra.rl.tasks.reward_trial import try_reward
from relibra.user_function import check_function

MAX_RESTARTS = 3
"""Restarts of a supervised run without a newer checkpoint; with one they are counted anew."""


@dataclass(frozen=True)
class Finished:
    """Result of a run: its folder, whether it is complete (False: stopped by Ctrl-C or SIGTERM), and its shrinks."""

    run: Path
    complete: bool
    shrunk: tuple[Shrunk, ...] = ()


@lenient_stderr()
def launch(
    config: RunConfig,
    resume: Path | None = None,
    *,
    supervise: bool = False,
    shrink: bool = False,
    force: bool = False,
) -> Finished | None:
    """Run a configuration to its end, or until Ctrl-C, which lets the current step finish.

    resume      folder of a run to resume; None: a new run
    supervise   after a lost rank, start again from the last checkpoint, MAX_RESTARTS times without a newer one
    shrink      when restarts are used up, continue from the last checkpoint on fewer ranks
    force       train although the estimated memory does not fit
    returns     None under `torchrun` on every rank but the first
    raises      ConfigError if a package is missing, the run folder cannot be created, or the GPUs have too little
                memory; EngineError if a rank failed or was killed: the run folder keeps the finished steps
    """
    if shrink and not supervise:
        raise ConfigError("--shrink needs --supervise: it continues a supervised run on fewer ranks")
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
    if launched is not None:
        config = with_estimate(config, None, warns=launched.rank == 0)  # defaults: the check below chooses nothing
        if launched.rank == 0:
            _print_settings(config)
            if not launched.restarts:
                try_reward(config.task, launched.num_ranks)
                if not force:
                    check_memory(with_ranks(config, launched.num_ranks), launched.num_local_ranks)
        return _run_as_rank(config, launched, resume, supervise=supervise)
    if config.model.path:
        check_expert_ranks(config.model.path, config.parallel.ranks)
    check_task(config.task, config.evaluation.prompts if config.evaluation.every else 0)
    if not on_ray:  # its nodes may have what this machine has not
        try_reward(config.task, config.parallel.ranks)
    for setting, name in (("algorithm.loss", config.algorithm.loss), ("plan.balancer", config.plan.balancer)):
        if ":" in name:
            check_function(setting, name)
    config, found = _prepare(config, force=force)
    with connected_ray() if on_ray else nullcontext():
        return _start_ranks(config, resume, found, supervise=supervise, shrink=shrink, force=force)


def _prepare(config: RunConfig, *, force: bool) -> tuple[RunConfig, Estimate | None]:
    """Measure or check the cluster for plans; return the settings that fit the memory, and the estimate of it."""
    if config.follows_plans:
        _prepare_cluster(config)
    found = None if config.parallel.launcher == "ray" or force else check_memory(config)  # Ray's nodes have other GPUs
    return with_estimate(config, found), found


def _run_as_rank(config: RunConfig, launched: LaunchedRank, resume: Path | None, *, supervise: bool) -> Finished | None:
    """Run one of the ranks that `torchrun` started; return None on every rank but the first."""
    if config.parallel.launcher == "ray":
        raise ConfigError("parallel.launcher=ray starts the ranks itself: run relibra without torchrun")
    if supervise:
        raise ConfigError(
            "--supervise starts again the processes that relibra started: under torchrun leave it out and use "
            "torchrun's --max-restarts, after which a run continues from its last checkpoint"
        )
    with uncollected_imports():
        from relibra.rl.run.rank import run_launched

    if resume is not None and launched.rank == 0:
        with locked_run_folder(resume):
            (resume / ESTIMATE_FILE).unlink(missing_ok=True)  # it is of other settings
    run, complete = run_launched(config, launched, resume)
    if launched.rank != 0:
        return None
    if not complete:
        print_resume_hint(run)
    return Finished(run, complete)


def _start_ranks(
    config: RunConfig, resume: Path | None, found: Estimate | None, *, supervise: bool, shrink: bool, force: bool
) -> Finished:
    """Start the ranks of a run, new or resumed, and wait until it ends.

    found   estimate of its memory, which is kept in the run folder
    """
    run = create_run_folder(config) if resume is None else resume.absolute()
    if resume is not None:
        with locked_run_folder(run):  # fail before processes start if the run is in use; rank 0 locks it later
            pass
    _keep_estimate(run, found)
    log = ShrinkLog(run)
    print(f"starting {config.parallel.ranks} processes; run folder {printable(str(run))}", file=sys.stderr, flush=True)
    _print_settings(config)
    try:
        restarts = MAX_RESTARTS if supervise else 0
        complete = _run_supervised(config, run, restarts, log if shrink else None, force=force)
    except KeyboardInterrupt:
        print_resume_hint(run)
        raise
    finally:
        if resume is None:
            remove_if_unused(run)
    if not complete:
        print_resume_hint(run)
    return Finished(run, complete, tuple(log.shrunk))


def _keep_estimate(run: Path, found: Estimate | None) -> None:
    """Write the estimate of this start in place of an earlier one, which is of other settings."""
    (run / ESTIMATE_FILE).unlink(missing_ok=True)
    if found is not None:
        write_text(run / ESTIMATE_FILE, json.dumps(found.as_json(), indent=1) + "\n")


def _print_settings(config: RunConfig) -> None:
    """Print where the settings of a run come from, with warnings; only once it is clear that it starts."""
    for line in describe_training(config):
        print(printable(line), file=sys.stderr, flush=True)


def _prepare_cluster(config: RunConfig) -> None:
    """Measure this machine if `plan.cluster` is 'measure', else check the cluster; raises ConfigError, ClusterError."""
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


def _run_supervised(config: RunConfig, run: Path, restarts: int, log: ShrinkLog | None, *, force: bool) -> bool:
    """Run the processes, again from the last checkpoint after a lost rank, then on fewer ranks, as a resumed run.

    restarts   without a newer checkpoint
    log        gets what each shrink cost; None: the run ends when restarts are used up
    """
    checkpoint, left = latest_checkpoint(run), restarts
    while True:
        try:
            with log.watch() if log else nullcontext():
                return _run_processes(config, run)
        except (LostRankError, NoRoomError) as error:
            before, checkpoint = checkpoint, latest_checkpoint(run)
            left = left if checkpoint == before else restarts
            left = 0 if isinstance(error, NoRoomError) else left
            fewer = shrink_config(config) if log and checkpoint and not left else None
            if checkpoint is None or not (left or fewer):
                raise
            print(printable(str(error)), file=sys.stderr)
            if log:
                log.note_loss(checkpoint)
            if log and fewer:
                ranks, left = config.parallel.ranks, restarts
                config, found = _prepare(fewer, force=force)
                _keep_estimate(run, found)
                log.note_shrink(ranks, config.parallel.ranks)
                again = f"going on from {checkpoint} on {config.parallel.ranks} of {ranks} ranks"
            else:
                left -= 1
                again = f"restarting from {checkpoint}, {left} more without a newer checkpoint"
            print(printable(again), file=sys.stderr, flush=True)


def _run_processes(config: RunConfig, run: Path) -> bool:
    """Run the ranks once, on this machine or on Ray; return False if stopped by Ctrl-C or SIGTERM."""
    running = running_file(run)
    try:
        running.touch()
        with _stop_on_signals(running) as signals:
            if config.parallel.launcher == "ray":
                ended = run_on_ray(config, run)
            else:
                ended = run_node_ranks(config, run, Node(num_ranks=config.parallel.ranks))
    except OSError as error:
        next_step = ": make room there, or set TMPDIR" if error.errno == errno.ENOSPC else ""
        raise EngineError(f"cannot start the ranks ({error}){next_step}") from error
    finally:
        running.unlink(missing_ok=True)
    return check_ended(ended, run, asked=bool(signals))


@contextmanager
def _stop_on_signals(running: Path) -> Iterator[list[int]]:
    """Remove a file at the first Ctrl-C or SIGTERM inside, raise KeyboardInterrupt at the second; yield the signals."""
    signals: list[int] = []

    def stop(number: int, _frame: FrameType | None) -> None:
        signals.append(number)
        if len(signals) > 1:
            raise KeyboardInterrupt
        again = "press Ctrl-C again" if number == signal.SIGINT else "send SIGTERM again"
        print(f"stopping after this step; {again} to stop at once", file=sys.stderr, flush=True)
        running.unlink(missing_ok=True)  # takes no room on a full disk

    before = {number: signal.signal(number, stop) for number in STOP_SIGNALS}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
