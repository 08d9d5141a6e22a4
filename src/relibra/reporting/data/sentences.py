"""What the numbers of routes and of a run mean, in words. Plain text: HTML is escaped where it is put on a page."""

from __future__ import annotations

from statistics import fmean

from relibra.reporting.data.metrics import Metrics
from relibra.reporting.data.number_format import percent, plural, times
from relibra.reporting.data.summary import Stability, Summary

ALIKE, DIFFERENT = 0.98, 0.90
"""Cosines between micro-batch and step: above the first one plan per step fits all, below the second it fits few."""

CHANCE_MARGIN = 0.02
"""A cosine this close to what chance alone gives shows no difference between micro-batches beyond chance."""

MAX_ALARMS = 10


def describe_skew(summary: Summary) -> str:
    """Return what the recorded routes cost without a plan, on the ranks of the run and, if these are few, on 8."""
    if summary.headline is None:
        return "With one expert per layer there is nothing to balance."
    view, found = summary.headline
    where = f"this run’s {view.ranks} ranks" if view.is_own else f"{view.ranks} ranks"
    even = "the expert work is close to even: " if found.skew_weighted < 1.05 else ""
    first = (
        f"With the recorded routes and no plan, {even}the busiest of {where} does {times(found.skew_weighted)} the "
        f"mean expert work, and ranks wait for it {percent(found.idle_share)} of the expert time"
    )
    larger = next((other for _, other in summary.possible if other.ranks == 8 and view.ranks < 8), None)
    if larger is None:
        return f"{first}."
    return f"{first}; on 8 ranks it would be {times(larger.skew_weighted)} and {percent(larger.idle_share)}."


def describe_stability(stability: Stability) -> str:
    """Return whether one plan per step would do; the thresholds are rules of thumb and named as such on the page."""
    if stability.micro_batches < 2:
        return "There is a single micro-batch, so a plan for the step is a plan for the micro-batch."
    found = f"The mean cosine between a micro-batch and its step is {stability.cosine:.3f}"
    chance = f"chance alone would give about {stability.chance:.3f} at this size"
    if stability.cosine >= ALIKE:
        return f"One plan per step would be enough. {found}, and {chance}: the micro-batches use the same experts."
    by_chance = stability.chance - stability.cosine < CHANCE_MARGIN
    if stability.cosine >= DIFFERENT and by_chance:
        return (
            f"One plan per step would remove most of the skew. {found}, and {chance}: the rest is chance, because a "
            "micro-batch has few tokens."
        )
    if stability.cosine >= DIFFERENT:
        return (
            f"One plan per step would remove most of the skew, not all. {found}, while {chance}: some micro-batches "
            "use other experts most."
        )
    if by_chance:
        return (
            f"Each micro-batch needs its own plan, because it is small. {found}, and {chance}: few tokens differ by "
            "chance, which only a plan made for exactly these tokens can use."
        )
    return (
        f"Each micro-batch needs its own plan. {found}, while {chance}: the most used experts change from one "
        "micro-batch to the next, so a plan for the whole step fits few of them."
    )


def describe_history(stability: Stability) -> str:
    """Return how well the last step predicts this one; "" with one step."""
    if stability.step_to_step is None:
        return ""
    return (
        f"From one recorded step to the next the load of whole steps has a cosine of {stability.step_to_step:.3f}: "
        "this is how well the loads of the last step predict this one."
    )


def describe_reward(metrics: Metrics) -> str:
    """Return how the reward changed; "" without one."""
    known = metrics.known("reward")
    if not known:
        return ""
    if len(known) == 1:
        return f"The mean reward was {known[0]:.3f} in the only step that has one."
    edge = max(1, min(5, len(known) // 2))
    first, last = sum(known[:edge]) / edge, sum(known[-edge:]) / edge
    over = f"mean of the first and last {edge} steps" if edge > 1 else "first and last step"
    over += " in which responses ended" * (len(known) < len(metrics.rows))
    return f"The mean reward went from {first:.3f} to {last:.3f} in {plural(len(metrics.rows), 'step')} ({over})."


def describe_balance(metrics: Metrics) -> str:
    """Return how plans or live balancing changed the rank skew; "" without either."""
    pairs = zip(metrics.column("rank_skew"), metrics.column("planned_skew"), strict=True)
    both = [(static, planned) for static, planned in pairs if static is not None and planned is not None]
    if not both:
        known = metrics.known("rank_skew")
        if not known:
            return ""
        return f"Rank skew (largest / mean load of ranks) is {times(fmean(known))} on average; no step was planned."
    static, planned = (fmean(values) for values in zip(*both, strict=True))
    copies, moved = (round(sum(value or 0 for value in metrics.column(name))) for name in ("replicas", "moved_experts"))
    means = [f"{plural(copies, 'replica')} (temporary copies of experts on other ranks)"] * bool(copies)
    means += [f"{plural(moved, 'move')} of experts to another rank"] * bool(moved)
    used = f", with {' and '.join(means)}" if means else ""
    return (
        f"Balancing reduced rank skew (largest / mean load of ranks) from {times(static)} to {times(planned)}, mean of "
        f"{plural(len(both), 'step')}{used}."
    )


def describe_alarms(metrics: Metrics) -> list[str]:
    """Return, for each figure that raised alarms, in how many steps, and the latest of its sentences."""
    found: dict[str, list[tuple[int, str]]] = {}
    for step, sentences in zip(metrics.steps, metrics.texts("alarms"), strict=True):
        for sentence in sentences:
            found.setdefault(sentence.partition(" ")[0], []).append((step, sentence))
    words = []
    for raised in list(found.values())[:MAX_ALARMS]:
        steps = list(dict.fromkeys(step for step, _ in raised))
        last, sentence = raised[-1]
        often = f"Step {last}" if len(steps) == 1 else f"{plural(len(steps), 'step')}, from {steps[0]} to {last}"
        words.append(f"{often}: {sentence[:400]}.")
    return words


def describe_evaluations(metrics: Metrics) -> str:
    """Return the rewards of the first and the last evaluation; "" without one."""
    known = metrics.known("evaluation", "reward")
    if not known:
        return ""
    first = "" if len(known) == 1 else f", after {known[0]:.3f} at the first"
    return f"The last of {plural(len(known), 'evaluation')} on held-out prompts gave {known[-1]:.3f}{first}."


def describe_unfinished(metrics: Metrics) -> str:
    """Return the mean share of responses that their window left unfinished; "" where all ended."""
    known = metrics.known("unfinished_share")
    if not any(known):
        return ""
    return f"On average {percent(fmean(known))} of the responses were unfinished when their window ended."
