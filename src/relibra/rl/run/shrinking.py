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

from relibra.errors import ConfigError
from relibra.rl.config.model_folder import expert_count
from relibra.rl.config.run_config import RunConfig, load_config

POLL_SECONDS = 2.0


@dataclass(frozen=True, kw_only=True)
class Shrunk:
    """A run that goes on with fewer ranks.

    checkpoint            steps before the checkpoint that it goes on from
    steps_redone          steps after that, which had been finished
    seconds               from the first lost rank at this checkpoint until lost steps are redone; None: they were not
    step_seconds_before   of a step on all ranks, the median of the last five; None: none was finished
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


def shrink_config(config: RunConfig) -> RunConfig | None:
    """Return the settings of a run on the next smaller number of ranks that rules and experts allow; None: none."""
    experts = expert_count(config.model.path) if config.model.path else config.model.num_experts
    ranks = config.parallel.ranks
    while (fewer := fewer_ranks(ranks, experts)) is not None:
        with suppress(ConfigError):
            return load_config(None, [f"parallel.ranks={fewer}"], base=config.model_dump(mode="json"))
        ranks = fewer
    return None


def measure_cost(shrunk: Shrunk, old: Mapping[int, str], lines: Mapping[int, str], seconds: float) -> Shrunk:
    """Return a shrink with what it cost, as far as lines of metrics.jsonl by step show it.

    old       lines before the shrink: those that are still there do not count
    seconds   since the first loss
    """
    own = [step for step in sorted(lines) if step >= shrunk.checkpoint and lines[step] != old.get(step)]
    is_back = bool(own) and own[-1] + 1 >= shrunk.checkpoint + shrunk.steps_redone
    return replace(
        shrunk,
        seconds=round(seconds, 2) if shrunk.seconds is None and is_back else shrunk.seconds,
        step_seconds=_step_seconds([lines[step] for step in own[1:]]),
    )


class ShrinkLog:
    """Follows when a run loses ranks, and measures what its shrinks cost."""

    def __init__(self, run: Path) -> None:
        """Begin without a loss."""
        self._run, self._checkpoint, self._since = run, -1, 0.0
        self._lines: dict[int, str] = {}
        self.shrunk: list[Shrunk] = []

    def note_loss(self, checkpoint: str) -> None:
        """Note a loss; seconds count from the first loss since this checkpoint."""
        steps, found = int(checkpoint.removeprefix("step-")), read_step_lines(self._run)
        if steps != self._checkpoint:
            self._checkpoint, self._since, self._lines = steps, time.monotonic(), {}
        self._lines |= found

    def note_shrink(self, before: int, ranks: int) -> None:
        """Add a shrink after the last loss; its cost is not known yet."""
        redone = sum(step >= self._checkpoint for step in self._lines)
        whole = _step_seconds([self._lines[step] for step in sorted(self._lines)[-5:]])
        about = {"checkpoint": self._checkpoint, "steps_redone": redone}
        self.shrunk.append(Shrunk(ranks_before=before, ranks=ranks, step_seconds_before=whole, **about))

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Inside, measure what the last shrink cost, and print it once it is known."""
        if not self.shrunk or self.shrunk[-1].step_seconds is not None:
            yield
            return
        ended, since, old = threading.Event(), self._since, dict(self._lines)

        def watch() -> None:
            found, over = self.shrunk[-1], False
            while not over and (found.seconds is None or found.step_seconds is None):
                over = ended.wait(POLL_SECONDS)
                found = measure_cost(found, old, read_step_lines(self._run), time.monotonic() - since)
            self.shrunk[-1] = found
            if not (found.seconds is None or found.step_seconds is None):
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
