"""`relibra train`: the main job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from relibra.errors import RelibraError


def train(
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN.toml] [KEY=VALUE]...",
            help="A TOML file (default: built-in settings), then dotted overrides; the last one wins.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")] = False,
    show_config: Annotated[
        bool, typer.Option("--show-config", help="Print the resolved settings as TOML and leave.")
    ] = False,
) -> None:
    """Post-train a small MoE policy with RL, its routes recorded at rollout and replayed in training.

    Progress goes to stderr. The first Ctrl-C lets the current step finish and leaves a readable run folder; the second
    stops at once. Under torchrun the command becomes one of its ranks.

    Example: relibra train run.steps=3 warmup.steps=20   (a smoke run, too short to learn)
    """
    from relibra.rl.config import as_toml, load_config

    words = settings or []
    file = Path(words[0]) if words and "=" not in words[0] else None
    config = load_config(file, words[1:] if file else words)
    if show_config:
        typer.echo(config.model_dump_json(indent=1) if as_json else as_toml(config))
        return

    from relibra.rl.launch import launch

    finished = launch(config)
    if finished is None:
        return
    from relibra.reporting import write_report
    from relibra.reporting.metrics import read_metrics

    steps = read_metrics(finished.run / "metrics.jsonl").rows
    rewards = [row["reward"] for row in steps]
    page = None
    if steps:
        try:
            page = write_report(finished.run)
        except RelibraError as error:  # the page is an extra; the run is done without it
            typer.echo(f"no report: {error}", err=True)
    if as_json:
        outcome = {
            "run": str(finished.run),
            "complete": finished.complete,
            "steps": len(steps),
            "first_reward": rewards[0] if rewards else None,
            "last_reward": rewards[-1] if rewards else None,
            "report": str(page) if page else None,
        }
        typer.echo(json.dumps(outcome))
    else:
        _print_outcome(finished.run, rewards, page)
    if not finished.complete:
        raise typer.Exit(130)


def _print_outcome(run: Path, rewards: list[float], page: Path | None) -> None:
    edge = max(1, min(5, len(rewards) // 2))
    if rewards:
        first, last = sum(rewards[:edge]) / edge, sum(rewards[-edge:]) / edge
        typer.echo(f"steps   {len(rewards)}")
        typer.echo(f"reward  {first:.2f} -> {last:.2f} (mean of the first and last {edge} steps)")
    typer.echo(f"run     {run}")
    if page:
        typer.echo(f"report  {page}")
