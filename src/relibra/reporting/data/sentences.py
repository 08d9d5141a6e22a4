"""What the numbers mean, in words. Plain text: whoever puts it on a page escapes it."""

from __future__ import annotations

from relibra.reporting.data.summary import Stability, Summary

ALIKE, DIFFERENT = 0.98, 0.90
"""Cosines between micro-batch and step: above the first one plan per step fits all, below the second it fits few."""

LUCK = 0.02
"""A cosine this close to what chance alone gives shows no difference between micro-batches beyond chance."""

_THIN_SPACE = "\u202f"


def times(value: float) -> str:
    """Write a ratio.

    >>> times(1.666)
    '1.67×'
    """
    return f"{value:.2f}×" if value < 10 else f"{value:.1f}×"


def percent(share: float) -> str:
    """Write a share of one; small ones keep a digit.

    >>> percent(0.404), percent(0.0123)
    ('40\u202f%', '1.2\u202f%')
    """
    return f"{100 * share:.0f}{_THIN_SPACE}%" if share >= 0.0995 else f"{100 * share:.1f}{_THIN_SPACE}%"


def exact_percent(share: float) -> str:
    """Write a share of one so that only what is nothing reads as nothing.

    >>> exact_percent(0.0), exact_percent(0.0001), exact_percent(0.22)
    ('0\u202f%', 'less than 0.1\u202f%', '22\u202f%')
    """
    if share <= 0:
        return f"0{_THIN_SPACE}%"
    return percent(share) if share >= 0.0005 else f"less than 0.1{_THIN_SPACE}%"


def count(value: int) -> str:
    """Write a whole number with its thousands apart.

    >>> count(90145)
    '90\u202f145'
    """
    return f"{value:,}".replace(",", _THIN_SPACE)


def plural(value: int, noun: str) -> str:
    """Write a number with its noun.

    >>> plural(1, "step"), plural(3, "micro-batch")
    ('1 step', '3 micro-batches')
    """
    ending = "" if value == 1 else "es" if noun.endswith("ch") else "s"
    return f"{count(value)} {noun}{ending}"


def verdict(summary: Summary, *, planned: bool = False) -> str:
    """Say in one or two sentences what the load costs, at the run's own size and, where it is small, at 8 ranks.

    planned   the run followed plans, so that this is what it was spared
    """
    if summary.headline is None:
        return "With one expert per layer there is nothing to balance."
    view, found = summary.headline
    where = f"On this run’s {view.ranks} ranks" if view.is_own else f"On {view.ranks} ranks"
    where = f"Without plans, o{where[1:]}" if planned else where
    even = "the expert work is close to even: " if found.skew_weighted < 1.05 else ""
    first = (
        f"{where} {even}the busiest one does {times(found.skew_weighted)} the mean expert work; "
        f"waiting for it costs the ranks {percent(found.idle_share)} of the expert time."
    )
    larger = next((other for _, other in summary.possible if other.ranks == 8 and view.ranks < 8), None)
    if larger is None:
        return first
    return (
        f"{first} On {larger.ranks} ranks the busiest one would do {times(larger.skew_weighted)} the mean, and waiting "
        f"would cost {percent(larger.idle_share)}."
    )


def one_plan_or_many(stability: Stability) -> str:
    """Say whether one plan per step would do; the thresholds are rules of thumb and named as such on the page."""
    if stability.micro_batches < 2:
        return "There is a single micro-batch, so a plan for the step is a plan for the micro-batch."
    found = f"The mean cosine between a micro-batch and its step is {stability.cosine:.3f}"
    chance = f"chance alone would give about {stability.chance:.3f} at this size"
    if stability.cosine >= ALIKE:
        return f"One plan per step would be enough. {found}, and {chance}: the micro-batches want the same experts."
    by_luck = stability.chance - stability.cosine < LUCK
    if stability.cosine >= DIFFERENT and by_luck:
        return (
            f"One plan per step would take out most of the skew. {found}, and {chance}: what is left is the luck of "
            "few tokens per micro-batch."
        )
    if stability.cosine >= DIFFERENT:
        return (
            f"One plan per step would take out most of the skew, not all. {found}, while {chance}: "
            "some micro-batches have hot experts of their own."
        )
    if by_luck:
        return (
            f"Each micro-batch needs its own plan, because it is small. {found}, and {chance}: the difference is the "
            "luck of few tokens, which only a plan made for exactly these tokens can use."
        )
    return (
        f"Each micro-batch needs its own plan. {found}, while {chance}: the hot experts change from one micro-batch to "
        "the next, so a plan for the whole step fits few of them."
    )


def history(stability: Stability) -> str:
    """Say how well the last step predicts this one; empty with one step."""
    if stability.step_to_step is None:
        return ""
    return (
        f"From one recorded step to the next the whole-step load has a cosine of {stability.step_to_step:.3f}: "
        "this is what a plan made from the last step’s loads could know of this one."
    )
