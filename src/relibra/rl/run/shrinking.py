"""Shrink a run whose rank is lost for good: on how many ranks it goes on, and what that cost. Imports no torch."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

from relibra.rl.config.model_folder import expert_count
from relibra.rl.config.run_config import RunConfig, load_config
from relibra.rl.run.run_folder import read_settings

POLL_SECONDS = 0.2
STEPS_BEFORE = 5
"""Steps before the loss whose median is the time of a step on all ranks."""


@dataclass(frozen=True, kw_only=True)
class Shrunk:
    """A run that goes on with fewer ranks.

    checkpoint            steps before the checkpoint that it goes on from
    steps_redone          steps after that, which had been finished
    seconds               from the first loss without a newer checkpoint until the run was back; None: it never was
    step_seconds_before   of a step on all ranks, the median of the last ones; None: none was finished
    step_seconds          the same now, without the first step, which compiles; None: no second one was finished
    """

    ranks_before: int
    ranks: int
    checkpoint: int
    steps_redone: int
    seconds: float | None = None
    step_seconds_before: float | None = None
    step_seconds: float | None = None


def fewer_ranks(ranks: int, num_experts: int) -> int | None:
    """Return the largest smaller number of ranks that divides the experts; None: there is none.

    num_experts   0: of a dense model, or not known before it is loaded

    >>> fewer_ranks(8, 60), fewer_ranks(4, 0), fewer_ranks(1, 8)
    (6, 3, None)
    """
    return next((fewer for fewer in range(ranks - 1, 0, -1) if num_experts % fewer == 0), None)


def shrink_run(config: RunConfig, run: Path) -> RunConfig | None:
    """Return the settings of a run on fewer ranks, as `--resume RUN parallel.ranks=N` reads them; None: on one already.

    raises   ConfigError where its settings do not fit these ranks
    """
    experts = expert_count(config.model.path) if config.model.path else config.model.num_experts
    fewer = fewer_ranks(config.parallel.ranks, experts)
    return None if fewer is None else load_config(None, [f"parallel.ranks={fewer}"], base=read_settings(run))


@dataclass(frozen=True)
class Losses:
    """Losses of ranks without a newer checkpoint.

    since        when the first was noticed, by the monotonic clock
    checkpoint   steps before the checkpoint
    step_lines   lines of metrics.jsonl that were found, by step
    """

    since: float
    checkpoint: int
    step_lines: Mapping[int, str]

    def shrunk(self, ranks_before: int, ranks: int) -> Shrunk:
        """Return a shrink whose cost is not yet known."""
        last = [self.step_lines[step] for step in sorted(self.step_lines)[-STEPS_BEFORE:]]
        return Shrunk(
            ranks_before=ranks_before,
            ranks=ranks,
            checkpoint=self.checkpoint,
            steps_redone=sum(step >= self.checkpoint for step in self.step_lines),
            step_seconds_before=_step_seconds(last),
        )


def note_loss(run: Path, checkpoint: str, before: Losses | None) -> Losses:
    """Return the losses of a run after one more, which `before` are without a newer checkpoint."""
    after = int(checkpoint.removeprefix("step-"))
    if before is None or before.checkpoint != after:
        return Losses(time.monotonic(), after, read_step_lines(run))
    return replace(before, step_lines={**before.step_lines, **read_step_lines(run)})


def measure_cost(shrunk: Shrunk, losses: Losses, lines: Mapping[int, str], seconds: float) -> Shrunk:
    """Return a shrink with what it cost, as far as the steps of metrics.jsonl show it.

    lines     of metrics.jsonl by step; those that were there before the shrink are not of it
    seconds   since the first loss
    """
    own = [
        step
        for step, line in sorted(lines.items())
        if step >= shrunk.checkpoint and line != losses.step_lines.get(step)
    ]
    back = shrunk.checkpoint + max(1, shrunk.steps_redone)
    return replace(
        shrunk,
        seconds=round(seconds, 2) if shrunk.seconds is None and own and own[-1] + 1 >= back else shrunk.seconds,
        step_seconds=_step_seconds([lines[step] for step in own[1:]]),
    )


@contextmanager
def watch_cost(shrunk: list[Shrunk], losses: Losses | None, run: Path) -> Iterator[None]:
    """Inside, measure what the last shrink cost, and print it once it is known.

    losses   before the last shrink; None: there was none, and nothing is measured
    """
    if losses is None or shrunk[-1].step_seconds is not None:
        yield
        return
    ended = threading.Event()

    def watch() -> None:
        found = shrunk[-1]
        over = False
        while not over and (found.seconds is None or found.step_seconds is None):
            over = ended.wait(POLL_SECONDS)
            found = measure_cost(found, losses, read_step_lines(run), time.monotonic() - losses.since)
        shrunk[-1] = found
        if found.seconds is not None:
            print(f"shrunk: {json.dumps(asdict(found))}", file=sys.stderr, flush=True)

    thread = threading.Thread(target=watch, daemon=True, name="cost of a shrink")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def read_step_lines(run: Path) -> dict[int, str]:
    """Return the whole lines of metrics.jsonl by step; {}: there are none, or the folder does not answer."""
    found = {}
    with suppress(OSError):
        for line in (run / "metrics.jsonl").read_text(encoding="utf-8", errors="replace").split("\n")[:-1]:
            with suppress(ValueError, KeyError, TypeError):  # half of a line, on a full disk
                found[int(json.loads(line)["step"])] = line
    return found


def _step_seconds(lines: list[str]) -> float | None:
    of_steps = [sum(json.loads(line)["seconds"].values()) for line in lines]
    return round(median(of_steps), 4) if of_steps else None
