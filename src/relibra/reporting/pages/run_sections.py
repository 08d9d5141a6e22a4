"""The sections of the report about a training run, from metrics.jsonl, in the order of the page.

Any row may lack any key: a section without numbers is left out, and so is a sentence.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from relibra.printable import plural
from relibra.reporting.data.metrics import Metrics
from relibra.reporting.data.number_format import percent
from relibra.reporting.html import run_figures
from relibra.reporting.html.html import paragraph, plot, section, table
from relibra.reporting.html.run_figures import Panel, has_any, run_panels, stage_seconds

MAX_ALARMS = 10
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


FIGURES = (
    ("reward", "", "reward, first step", ".3f"),
    ("reward", "", "reward, last step", ".3f"),
    ("evaluation", "reward", "reward of the last evaluation", ".3f"),
    ("response_length", "", "tokens per response, last step", ",.0f"),
    ("unfinished_share", "", "unfinished responses, mean", ".1%"),
    ("rank_skew", "", "rank skew without a plan (largest / mean load), mean", ".3f"),
    ("planned_skew", "", "rank skew as planned, mean", ".3f"),
    ("replicas", "", "replicas of experts per step, mean", ",.0f"),
    ("moved_experts", "", "moves of experts per step, mean", ",.1f"),
    ("explained_variance", "", "variance explained by the value model, last step", ".2f"),
    ("k3_kl", "", "k3 divergence of rollout and trainer, mean (nats)", ".2e"),
    ("idle_share", "", "idle share of the rollout batch, mean", ".1%"),
)
"""Key, part, meaning with unit, form; a meaning with "first" or "last" shows that step, others the mean."""


class PanelSection(NamedTuple):
    """Curves of a run over its steps; `how` says what their numbers are."""

    title: str
    panels: tuple[Panel, ...]
    how: str = ""


PANELS = {
    "learning": PanelSection(
        "Learning",
        run_figures.LEARNING,
        "Reward: mean over the responses that ended in a step, with a band of one standard deviation. Evaluation: "
        "mean reward on held-out prompts. Response: tokens per response, of those that ended. Unfinished: share of "
        "the responses that continue in the next step. Truncated: share of those that ended because they reached the "
        "longest allowed length.",
    ),
    "balance": PanelSection(
        "Balance in training",
        run_figures.BALANCE,
        "Rank skew of a step, over its micro-batches as they were trained: sum of the busiest ranks’ loads / sum of "
        "the mean loads. Load: tokens times chosen experts that a rank computes. Static layout: the same step without "
        "a plan, with experts on fixed ranks. Bound: the lowest skew that any replicas could reach with this schedule "
        "and these homes (the rank that owns each expert).",
    ),
    "mismatch": PanelSection("Mismatch of rollout and trainer", run_figures.MISMATCH),
    "values": PanelSection(
        "Value model",
        run_figures.VALUES,
        "Explained variance: 1 − variance of (reward − value) / variance of rewards, over the tokens of responses that "
        "ended, before the value model learns from them. 1 is perfect, 0 is what a constant reaches; below 0 the value "
        "model adds noise.",
    ),
    "update": PanelSection(
        "Policy update",
        run_figures.UPDATE,
        "Entropy: of the policy at the tokens it sampled, before the update. Clipped: share of trained tokens whose "
        "ratio was clipped. Gradient norm: before it is scaled down, mean over mini-batches.",
    ),
    "idle": PanelSection("Idle share of the rollout batch", run_figures.IDLE),
}
"""By identifier, in the order of pages."""


def panels(metrics: Metrics, identifier: str) -> str:
    """Return one of `PANELS`; "" without numbers."""
    one = PANELS[identifier]
    if not has_any(metrics, one.panels):
        return ""
    figure = plot(f"{identifier}-plot", run_panels(metrics, one.panels), f"{one.title} over RL steps.")
    return section(identifier, one.title, paragraph(one.how, "how"), figure)


def figures(runs: Sequence[tuple[str, Metrics]]) -> str:
    """Show the key figures of runs (name, metrics) beside each other; "" without any."""
    rows = []
    for key, part, meaning, form in FIGURES:
        known = [metrics.known(key, part) for _, metrics in runs]
        if any(known):
            rows.append([meaning, *(format(_chosen(found, meaning), form) if found else "–" for found in known)])
    seconds = [sum(sum(metrics.known("seconds", stage)) for stage in metrics.seconds()) for _, metrics in runs]
    if any(seconds):
        means = [total / max(1, len(metrics.rows)) for total, (_, metrics) in zip(seconds, runs, strict=True)]
        rows.append(["seconds per step, mean (measured)", *(f"{mean:.2f}" if mean else "–" for mean in means)])
    if not rows:
        return ""
    names = ("", *(name for name, _ in runs))
    return section("figures", "Key figures", table("Key figures", names, rows, text_columns=(0,)))


def _chosen(known: Sequence[float], meaning: str) -> float:
    return known[-1] if "last" in meaning else known[0] if "first" in meaning else fmean(known)


def mismatch(metrics: Metrics) -> str:
    """Show how far rollout and trainer differ, and the alarms that this raised."""
    rows = [
        [name, _format(last), _format(_worst(metrics, key)), meaning]
        for key, name, meaning in MISMATCH_ROWS
        if (last := metrics.last(key)) is not None
    ]
    alarms = _alarms(metrics)
    if not rows and not alarms:
        return ""
    drawn = has_any(metrics, run_figures.MISMATCH)
    return section(
        "mismatch",
        "Mismatch of rollout and trainer",
        table("Alarms", ("steps with the alarm", "last of them", "what it said"), alarms, text_columns=(2,))
        if alarms
        else paragraph("No figure reached its alarm level."),
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


def _alarms(metrics: Metrics) -> list[list[str]]:
    """Return, for each figure that raised alarms, number of steps, last step and latest text."""
    found: dict[str, list[tuple[int, str]]] = {}
    for step, texts in zip(metrics.steps, metrics.texts("alarms"), strict=True):
        for text in texts:
            found.setdefault(text.partition(" ")[0], []).append((step, text))
    latest = [(len(dict(raised)), *raised[-1]) for raised in list(found.values())[:MAX_ALARMS]]
    return [[str(number), str(step), text[:400]] for number, step, text in latest]


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


def _worst(metrics: Metrics, key: str) -> float:
    agreement = 1.0 if key in ("ess", "weight_mean") else 0.0
    return max(metrics.known(key), key=lambda value: abs(value - agreement))


def _format(value: float) -> str:
    if value == 0:
        return "0"
    return f"{value:.3f}" if 1e-3 <= abs(value) < 1e4 else f"{value:.1e}"
