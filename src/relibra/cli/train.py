"""`relibra train`: post-train a model with RL."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, cast

import typer
from typer.core import TyperGroup
from typer.main import get_command

from relibra.cli.inputs import options
from relibra.cli.inputs.requests import documented
from relibra.cli.outputs.terminal import print_note, print_result, print_table, print_text
from relibra.errors import ConfigError, RelibraError

if TYPE_CHECKING:
    from relibra.rl.config.run_config import RunConfig
    from relibra.rl.run.launch import Finished

_USAGE_ERROR = cast("type[typer.BadParameter]", typer.BadParameter.__mro__[1])
"""click's `UsageError`, found as the base of `BadParameter`, as newer versions of typer bring their own click."""


@documented
def train(
    settings: options.RunSettings = None,
    resume: Path | None = None,
    supervise: Annotated[bool, typer.Option("--supervise")] = False,
    shrink: Annotated[bool, typer.Option("--shrink")] = False,
    as_json: options.Json = False,
    show_config: Annotated[bool, typer.Option("--show-config")] = False,
    estimate: Annotated[bool, typer.Option("--estimate")] = False,
    force: Annotated[bool, typer.Option("--force")] = False,
) -> None:
    """Post-train a model with RL: PPO, T-PPO, GRPO, DAPO or GSPO, experts balanced from the routes of the rollout.

    Progress goes to stderr. The first Ctrl-C finishes the current step and keeps the run folder readable; the second
    stops at once. Under torchrun this process is one of the ranks.

    resume  Continue the run in this folder from its last checkpoint; overrides change its settings.
    supervise  After a lost rank, start again from the last checkpoint.
    shrink  With --supervise: when restarts are used up, continue on fewer ranks, the most that divide the experts.
    show_config  Print the resolved settings as TOML and exit.
    estimate  Print the memory of a GPU by part and exit; reads no weights, needs no GPU. plan.cluster names the device.
    force  Train although the estimated memory does not fit the GPUs.

    Example: relibra train run.steps=3 warmup.steps=20   (a smoke run, too short to learn)
    """
    from relibra.rl.config.run_config import as_toml, check_resumable, drop_operational, load_config
    from relibra.rl.run.run_folder import read_settings

    file, overrides = options.file_and_overrides(settings)
    if resume is not None and file is not None:
        raise ConfigError(f"--resume {resume} and a settings file {file} contradict each other: leave out the file")
    base = None if resume is None else read_settings(resume)
    for line in drop_operational(base or {}):
        print_note(line)
    config = load_config(file, overrides, base=base)
    if base is not None:
        check_resumable(load_config(None, base=base), config)
    _check_server_options(config)
    if show_config:
        typer.echo(config.model_dump_json(indent=1) if as_json else as_toml(config))
        return
    if estimate:
        _print_memory(config, as_json=as_json)
        return

    from relibra.rl.run.launch import launch

    finished = launch(config, resume, supervise=supervise, shrink=shrink, force=force)
    if finished is not None:
        _finish(finished, as_json=as_json)


def _print_memory(config: RunConfig, *, as_json: bool) -> None:
    """Print the estimated memory of a run, and what helps where it does not fit; makes no run folder."""
    from relibra.rl.memory.estimate import GIB, PARTS
    from relibra.rl.memory.estimator import estimate_memory, refusal

    found, helps = estimate_memory(config)
    if as_json:
        typer.echo(json.dumps({**found.as_json(), "helps": {one.setting: one.saves for one in helps}}))
        return
    print_text(f"{found.model}; rank 0 of {found.ranks}, micro-batches of {found.tokens:,} tokens; GiB of a GPU:")
    parts = [part for part in PARTS if any(one.parts.get(part, 0) >= GIB / 200 for one in found.peaks)]
    rows = [{"": part, **{one.phase: f"{one.parts.get(part, 0) / GIB:.2f}" for one in found.peaks}} for part in parts]
    print_table([*rows, {"": "sum", **{one.phase: f"{one.total / GIB:.2f}" for one in found.peaks}}])
    peak = found.peak
    print_text(f"most in {peak.phase}: {peak.total / GIB:.2f}, reached at {peak.line or 'its beginning'}")
    if found.device_bytes is not None:
        print_text(
            f"{found.device_name}: {found.device_bytes / GIB:.1f} GiB, {found.usable_bytes / GIB:.1f} to be used; "
            f"{found.free_bytes / GIB:.1f} left for slots of plans"
        )
    else:
        print_text("no GPU here to compare with: plan.cluster=h100x8 names one")
    for line in (str(found.choice or ""), found.choice_line):
        if line:
            print_text(line)
    print_text(f"host memory of a node: {found.host_bytes / GIB:.1f} GiB")
    if found.offload_bytes >= GIB / 20:
        print_text(
            f"offloading: {found.offload_bytes / GIB:.1f} GiB in an optimizer step, {found.offload_seconds:.2f} s"
        )
    print_text("it fits" if found.fits else f"it does not fit: {refusal(found, helps)}")


def _check_server_options(config: RunConfig) -> None:
    """Raise ConfigError for `rollout.server_options` that `relibra serve` refuses, before a process starts."""
    words = shlex.split(config.rollout.server_options)
    if not words or config.rollout.engine != "serve":
        return
    from relibra.cli.serve.app import app

    group = get_command(app)
    assert isinstance(group, TyperGroup), "it has commands"
    where = f"rollout.server_options {config.rollout.server_options!r}"
    allowed = "allowed are the options of `relibra serve run --help`"
    if not {"-h", "--help"}.isdisjoint(words):
        raise ConfigError(f"{where} would print a help text and serve nothing: {allowed}")
    try:
        group.commands["run"].make_context("relibra serve", ["MODEL", *words])  # parses, and runs nothing
    except _USAGE_ERROR as error:
        raise ConfigError(f"{where}: {error.format_message().rstrip('.')}; {allowed}") from error


def _finish(finished: Finished, *, as_json: bool) -> None:
    """Write the report of a run that ended, and print its outcome; exit with 130 if it was stopped."""
    from relibra.reporting import write_report
    from relibra.reporting.data.metrics import read_metrics

    steps = read_metrics(finished.run / "metrics.jsonl").rows
    rewards = [row["reward"] for row in steps if row["reward"] is not None]
    page = None
    if steps:
        try:
            page = write_report(finished.run)
        except RelibraError as error:  # the run itself is complete
            print_note(f"no report: {error}")
    averaged = max(1, min(5, len(rewards) // 2))
    outcome = {
        "run": str(finished.run),
        "complete": finished.complete,
        "steps": len(steps),
        "first_reward": rewards[0] if rewards else None,
        "last_reward": rewards[-1] if rewards else None,
        "steps_averaged": averaged if rewards else None,
        "first_mean_reward": fmean(rewards[:averaged]) if rewards else None,
        "last_mean_reward": fmean(rewards[-averaged:]) if rewards else None,
        "report": str(page) if page else None,
        "shrunk": [asdict(one) for one in finished.shrunk],
    }
    print_result(outcome, as_json=as_json)
    if not finished.complete:
        raise typer.Exit(130)
