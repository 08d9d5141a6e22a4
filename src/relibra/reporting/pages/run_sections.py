"""The sections of the report about a training run, from metrics.jsonl, in the order of the page.

Any row may lack any key: a section without numbers is left out, and so is a sentence.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from relibra.reporting.data.metrics import Metrics
from relibra.reporting.data.number_format import percent, plural
from relibra.reporting.data.sentences import (
    describe_alarms,
    describe_balance,
    describe_evaluations,
    describe_reward,
    describe_unfinished,
)
from relibra.reporting.html import run_figures
from relibra.reporting.html.html import bullets, paragraph, plot, section, table
from relibra.reporting.html.run_figures import Panel, has_any, run_panels, stage_seconds

MISMATCH_ROWS = (
    ("k3_kl", "k3", "mean of w − 1 − log w: estimates the KL divergence of rollout and trainer"),
    ("probability_difference", "difference of probabilities", "mean over tokens"),
    ("log_ratio_mean_abs", "log-ratio, mean", "mean of |log w|"),
    ("log_ratio_p99", "log-ratio, 99th percentile", "1 % of the tokens have a larger |log w|"),
    ("log_ratio_max", "log-ratio, largest", "of any token"),
    ("ratio_above_2", "ratios above 2", "share of tokens where w or 1 / w is above 2"),
    ("weight_mean", "weight, mean", "of w; 1 where rollout and trainer agree"),
    ("weight_std", "weight, deviation", "standard deviation of w"),
    ("ess", "effective samples", "effective sample size under importance weights / tokens"),
    ("chi2", "chi-square", "mean of w² minus 1"),
    ("masked_share", "masked", "share of tokens that the correction leaves out of the loss"),
    (
        "router_disagreement",
        "router disagreement",
        "share of (token, layer) where the trainer’s router picks other experts",
    ),
    ("router_choices_differing", "router choices differing", "share of choices"),
)
"""Key, name, meaning; w = probability by trainer / by rollout, at the same weights."""


def learning(metrics: Metrics) -> str:
    """Show reward, evaluations and response lengths."""
    reward = describe_reward(metrics)
    words = [reward, describe_evaluations(metrics), describe_unfinished(metrics)]
    return _panels_section(
        metrics,
        run_figures.LEARNING,
        ("learning", "Learning"),
        " ".join(word for word in words if word),
        "Reward: mean over the responses that ended in a step, with a band of one standard deviation. Evaluation: "
        "mean reward on held-out prompts. Response: tokens per response, of those that ended. Unfinished: share of "
        "the responses that continue in the next step. Truncated: share of those that ended because they reached the "
        "longest allowed length.",
        "Reward, response length and unfinished responses over RL steps. " + (reward or "No reward was recorded."),
    )


def balance(metrics: Metrics) -> str:
    """Show rank skew in training, without and with plans."""
    return _panels_section(
        metrics,
        run_figures.BALANCE,
        ("balance", "Balance in training"),
        describe_balance(metrics),
        "Rank skew of a step, over its micro-batches as they were trained: sum of the busiest ranks’ loads / sum of "
        "the mean loads. Load: tokens times chosen experts that a rank computes. Static layout: the same step without "
        "a plan, with experts on fixed ranks. Bound: the lowest skew that any replicas could reach with this schedule "
        "and these homes (the rank that owns each expert).",
    )


def mismatch(metrics: Metrics) -> str:
    """Show how far rollout and trainer differ, and the alarms that this raised."""
    rows = [
        [name, _format(last), _format(_worst(metrics, key)), meaning]
        for key, name, meaning in MISMATCH_ROWS
        if (last := metrics.last(key)) is not None
    ]
    alarms = describe_alarms(metrics)
    if not rows and not alarms:
        return ""
    calm = "No figure reached its alarm level."
    drawn = has_any(metrics, run_figures.MISMATCH)
    return section(
        "mismatch",
        "Mismatch of rollout and trainer",
        bullets(alarms, "notice") if alarms else paragraph(calm),
        paragraph(
            "The same tokens under the same weights, by the engine that sampled them (rollout) and by the trainer "
            "before its update. They differ in arithmetic and in the experts that the routers choose. w: probability "
            "by the trainer / by the rollout. Worst: farthest from agreement over all steps.",
            "how",
        ),
        plot(
            "mismatch-plot", run_panels(metrics, run_figures.MISMATCH), "Divergence of rollout and trainer over steps."
        )
        if drawn
        else "",
        table("Mismatch", ("", "last step", "worst", "meaning"), rows, text_columns=(0, 3)) if rows else "",
    )


def value_model(metrics: Metrics) -> str:
    """Show how much of the returns the value model explains; "" for algorithms without one."""
    last, words = metrics.last("explained_variance"), ""
    if last is not None:
        verdict = "better than a constant." if last > 0 else "a constant would do as well or better."
        words = f"At the last step the value model explains {last:.2f} of the variance of returns: {verdict}"
    return _panels_section(
        metrics,
        run_figures.VALUES,
        ("values", "Value model"),
        words,
        "Explained variance: 1 − variance of (reward − value) / variance of rewards, over the tokens of responses that "
        "ended, before the value model learns from them. 1 is perfect, 0 is what a constant reaches; below 0 the value "
        "model adds noise.",
    )


def update(metrics: Metrics) -> str:
    """Show entropy, clipping and gradient norm of the policy update."""
    return _panels_section(
        metrics,
        run_figures.UPDATE,
        ("update", "Policy update"),
        "",
        "Entropy: of the policy at the tokens it sampled, before the update. Clipped: share of trained tokens whose "
        "ratio was clipped. Gradient norm: before it is scaled down, mean over mini-batches.",
    )


def time(metrics: Metrics) -> str:
    """Show the seconds of each stage, and the idle share of the rollout batch."""
    pieces = []
    seconds = metrics.seconds()
    if seconds:
        totals = {stage: sum(metrics.known("seconds", stage)) for stage in seconds}
        whole = sum(totals.values()) or 1.0
        ordered = sorted(totals.items(), key=lambda pair: -pair[1])
        shares = ", ".join(f"{stage} {percent(total / whole)}" for stage, total in ordered)
        pieces += [
            paragraph(f"Wall-clock seconds of each step on rank 0, by stage. Over all steps: {shares}.", "how"),
            plot("seconds-plot", stage_seconds(metrics), f"Seconds per RL step by stage: {shares}."),
        ]
    of_routes = {name: metrics.known("bytes", name) for name in ("rollout", "trace", "plan", "exchange")}
    if any(fmean(found) for found in of_routes.values() if found):
        means = ", ".join(f"{name} {fmean(found) / 1e6:,.1f}" for name, found in of_routes.items() if found)
        pieces.append(
            paragraph(
                f"Routes in MB per step, all ranks together: {means}. Rollout: from the engines; trace: on disk; plan: "
                "counts per expert, all that the planner gets; exchange: sent to the ranks that train them, with their "
                "responses.",
                "how",
            )
        )
    if has_any(metrics, run_figures.IDLE):
        words = f"On average {percent(fmean(metrics.known('idle_share')))} of the batch was idle."
        pieces += [
            "<h3>Idle share of the rollout batch</h3>",
            paragraph(
                "Share of the sequences of a decoding batch whose response has ended, over all decoding steps: they "
                f"wait for the longest response, for the end of the window, or for a new prompt. {words}",
                "how",
            ),
            plot("idle-plot", run_panels(metrics, run_figures.IDLE), words),
        ]
    return section("time", "Seconds per stage", *pieces) if pieces else ""


def unreadable(metrics: Metrics) -> str:
    """Return a notice that lines were left out; "" where all were read."""
    if not metrics.unreadable:
        return ""
    return paragraph(
        f"{plural(metrics.unreadable, 'line')} of metrics.jsonl could not be read and were left out.", "notice"
    )


def _panels_section(
    metrics: Metrics, panels: Sequence[Panel], named: tuple[str, str], words: str, how: str, alternative: str = ""
) -> str:
    """Return a section of panels; "" without numbers.

    named         identifier and title
    words, how    what the numbers say, and what they are
    alternative   text for the figure; "": the words
    """
    identifier, title = named
    if not has_any(metrics, panels):
        return ""
    return section(
        identifier,
        title,
        paragraph(words) if words else "",
        paragraph(how, "how"),
        plot(f"{identifier}-plot", run_panels(metrics, panels), alternative or words or f"{title} over RL steps."),
    )


def _worst(metrics: Metrics, key: str) -> float:
    agreement = 1.0 if key in ("ess", "weight_mean") else 0.0
    return max(metrics.known(key), key=lambda value: abs(value - agreement))


def _format(value: float) -> str:
    if value == 0:
        return "0"
    return f"{value:.3f}" if 1e-3 <= abs(value) < 1e4 else f"{value:.1e}"
