"""Runs that are signalled at random moments: each ends as one that never was, or in a sentence that names the rank."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.reliability.chinese_task import write_task
from benchmarks.reliability.started_run import RUN, StartedRun, Trained, are_gone, go_on, read_trained

RANKS = 2
STEPS = 10
HEARTBEAT_SECONDS = 5
START_SECONDS = 20
"""parallel.timeout_seconds: for ranks that meet, before there are signs of life."""
SETTINGS = (
    f"run.steps={STEPS}", "rollout.prompts_per_step=6", "rollout.responses_per_prompt=3", "rollout.max_response=12",
    "update.mini_batches=2", "algorithm.preset=grpo", "plan.balancer=relibra_paper_tokens", "checkpoint.every=2",
    f"parallel.ranks={RANKS}", f"parallel.heartbeat_seconds={HEARTBEAT_SECONDS}",
    f"parallel.timeout_seconds={START_SECONDS}", f"run.name={RUN}",
)  # fmt: skip
TARGETS = {
    "SIGKILL": ("all", "rank 0", "rank 1", "parent"),
    "SIGTERM": ("parent", "all", "rank 1", "rank 0"),
    "SIGSTOP": ("rank 0", "rank 1"),
}
"""Processes that each signal goes to, in turns: all of the run, one rank, or the one that was started first."""
STARTS = 0.15
"""Share of points before the first step."""
PATIENCE_SECONDS = 120.0
"""For a run to end after a signal; longer counts as hanging."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """When which processes get a signal.

    step     finished steps of the run; 0: it starts
    share    of the time until the next step (the first step, the end) that passes before the signal
    """

    number: int
    signal: str
    target: str
    step: int
    share: float

    @property
    def loses_rank(self) -> bool:
        """Return whether one rank is lost, which the others can tell."""
        return self.signal != "SIGTERM" and self.target.startswith("rank")


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Seconds of the undisturbed run from its start to the first step, between steps, and from the last to the end."""

    start: float
    step: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Ended:
    """What became of a run.

    told      seconds until stderr said what happened; None: nobody was left to say it
    ended     seconds until the run ended; None: it hung
    named     stderr names the rank that got the signal
    anew      it had no checkpoint yet and was started again
    equal     after resuming, its results are those of the undisturbed run
    gone      none of its processes outlived it
    said      what it said
    """

    point: Point
    told: float | None
    ended: float | None
    named: bool
    anew: bool
    equal: bool
    gone: bool
    said: str

    @property
    def lost_unnamed(self) -> bool:
        """A rank was lost and the others did not say which."""
        return self.point.loses_rank and not self.named

    @property
    def neither(self) -> bool:
        """It hung, left processes, or neither came back equal nor named the rank."""
        return self.ended is None or not self.gone or not (self.equal or self.named)


def choose_points(count: int, seed: int) -> list[Point]:
    """Return random points; signals and their targets take turns."""
    rng, points = random.Random(seed), list[Point]()
    for number in range(count):
        name = list(TARGETS)[number % len(TARGETS)]
        targets = TARGETS[name]
        step = 0 if rng.random() < STARTS else rng.randint(1, STEPS)
        target = targets[number // len(TARGETS) % len(targets)]
        points.append(Point(number=number, signal=name, target=target, step=step, share=rng.random()))
    return points


def task_settings(home: Path) -> tuple[str, ...]:
    """Write the task into a new folder; return the settings of a run that is started there."""
    home.mkdir()
    return (*write_task(home), *SETTINGS)


def undisturbed(settings: Sequence[str], home: Path) -> tuple[Trained, Pace]:
    """Make two runs that nothing happens to; return what they trained, and how fast the second one was.

    The first one may compile kernels.
    """
    (first, _), (second, pace) = (_undisturbed(settings, home, home / name) for name in ("first", "second"))
    assert first == second, "two undisturbed runs differ, so that nothing can be held against them"
    assert any(row["grad_norm"] for row in first.metrics), "nothing was trained, so that nothing can be lost"
    return second, pace


def _undisturbed(settings: Sequence[str], home: Path, folder: Path) -> tuple[Trained, Pace]:
    with StartedRun([*settings, f"run.folder={folder}"], home, "stderr.txt") as run:
        assert run.wait_for_ranks(RANKS), f"the run did not start: {run.stderr}"
        times = [time.monotonic()]
        for step in (1, STEPS):
            assert run.wait_for(f"({step}/"), f"the run made no step {step}: {run.stderr}"
            times.append(time.monotonic())
        code = run.wait()
        times.append(time.monotonic())
        assert code == 0, f"the undisturbed run ended with {code}: {run.stderr}"
    trained = read_trained(folder / RUN)
    assert trained is not None, "the undisturbed run left no results"
    start, steps, end = (after - before for before, after in pairwise(times))
    return trained, Pace(start=start, step=steps / (STEPS - 1), end=end)


def signal_run(point: Point, settings: Sequence[str], home: Path, pace: Pace, whole: Trained) -> Ended:
    """Start a run, signal it at a point, resume it, and hold it against the undisturbed one.

    A run that ended before its point came is made again, with the point a half nearer to the step.
    """
    share, folder = point.share, home / f"point-{point.number}"
    words = [*settings, f"run.folder={folder}"]
    while True:
        shutil.rmtree(folder, ignore_errors=True)
        with StartedRun(words, home, "stderr.txt") as run:
            hit = _strike(run, point, share, pace)
            if hit is None:
                share /= 2
                continue
            ranks, told, ended = hit
            said = run.stderr
        break
    gone = are_gone(ranks)
    anew, code, said_again = go_on(words, home, folder / RUN)
    equal = code == 0 and read_trained(folder / RUN) == whole
    return Ended(
        point=point,
        told=told,
        ended=ended,
        named=re.search(rf"\b{point.target}\b", said) is not None and point.target.startswith("rank"),
        anew=anew,
        equal=equal,
        gone=gone,
        said=said if equal else f"{said}\n--- resumed:\n{said_again}",
    )


def _strike(
    run: StartedRun, point: Point, share: float, pace: Pace
) -> tuple[list[int], float | None, float | None] | None:
    """Wait for the point and send the signal; return the ranks, and seconds until told and ended; None: too late."""
    reached = run.wait_for(f"({point.step}/") if point.step else run.wait_for_ranks(RANKS)
    if not reached:
        return None
    ranks = run.ranks()
    seconds = pace.start if point.step == 0 else pace.end if point.step == STEPS else pace.step
    time.sleep(share * seconds)
    if run.process.poll() is not None or len(ranks) < RANKS:
        return None
    number, before, began, told = signal.Signals[point.signal], len(run.stderr), time.monotonic(), None
    try:
        if point.target == "all":
            os.killpg(run.process.pid, number)
        else:
            os.kill(run.process.pid if point.target == "parent" else ranks[int(point.target[-1])], number)
    except ProcessLookupError:
        return None
    while run.process.poll() is None and time.monotonic() - began < PATIENCE_SECONDS:
        if told is None and _tells(run.stderr[before:], point):
            told = time.monotonic() - began
        time.sleep(0.01)
    ended = time.monotonic() - began if run.process.poll() is not None else None
    if told is None and _tells(run.stderr[before:], point):
        told = ended
    return ranks, told, ended


def _tells(text: str, point: Point) -> bool:
    """Return whether a run says what happened to it: which rank is lost, or that it stops."""
    words = "stopp(ing|ed)" if point.signal == "SIGTERM" else rf"\b{point.target}\b"
    return re.search(words, text) is not None


def rows_of(ended: Sequence[Ended], seed: int) -> list[dict]:
    """Return a row per signal."""
    rows = []
    for name, targets in TARGETS.items():
        own = [one for one in ended if one.point.signal == name]
        told = [one.told for one in own if one.told is not None]
        until_end = [one.ended for one in own if one.ended is not None]
        of_ranks = [one for one in own if one.point.loses_rank]
        rows.append(
            {
                "case": name,
                "table": "signals",
                "label": "measured",
                "unit": "points: random moments of a run; equal: metrics, samples and policy after --resume are those "
                "of an undisturbed run; anew: had no checkpoint yet and was started again; named: rank named, of those "
                "points that hit one rank; failed: neither equal nor named, or hung, or left a process; seconds from "
                "the signal",
                "seed": seed,
                "repetitions": len(own),
                "points": len(own),
                "starting": sum(one.point.step == 0 for one in own),
                "equal": sum(one.equal for one in own),
                "anew": sum(one.anew for one in own),
                "hit one rank": len(of_ranks),
                "named": sum(one.named for one in of_ranks),
                "neither": sum(one.neither for one in own),
                "told seconds": statistics.median(told) if told else None,
                "told max": max(told, default=None),
                "ended seconds": statistics.median(until_end) if until_end else None,
                "ended max": max(until_end, default=None),
                "configuration": f"{RANKS} processes, {STEPS} steps, checkpoint every 2, heartbeat {HEARTBEAT_SECONDS} "
                f"s, collectives {START_SECONDS} s; to {', '.join(targets)} in turns",
            }
        )
    return rows
