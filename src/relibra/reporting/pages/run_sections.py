"""The sections of the report about a training run: what metrics.jsonl says, in the order of the page.

Any row may lack any key: a section without numbers is left out, and so is a sentence.
"""

from __future__ import annotations

from collections.abc import Sequence

from relibra.reporting.data.metrics import Metrics
from relibra.reporting.data.sentences import count, percent, plural, times
from relibra.reporting.html import run_figures
from relibra.reporting.html.html import bullets, paragraph, plot, section, table
from relibra.reporting.html.run_figures import Panel, has_any, stage_seconds, step_panels

MAX_ALARMS = 10

MISMATCH_ROWS = (
    ("k3_kl", "k3", "mean of w − 1 − log w: estimates the divergence of sampler and trainer"),
    ("probability_difference", "difference of probabilities", "mean over tokens"),
    ("log_ratio_mean_abs", "log-ratio, mean", "mean of |log w|"),
    ("log_ratio_p99", "log-ratio, 99th percentile", "1 % of the tokens have a larger |log w|"),
    ("log_ratio_max", "log-ratio, largest", "of any token"),
    ("ratio_above_2", "ratios above 2", "share of tokens where w or 1 / w is above 2"),
    ("weight_mean", "weight, mean", "of w; 1 where sampler and trainer agree"),
    ("weight_std", "weight, deviation", "standard deviation of w"),
    ("ess", "effective samples", "share of tokens that importance sampling leaves"),
    ("chi2", "chi-square", "mean of w² minus 1"),
    ("masked_share", "masked", "share of tokens that the correction leaves out"),
    ("router_disagreement", "router disagreement", "(token, layer) where the trainer would have chosen other experts"),
    ("router_choices_differing", "router choices differing", "share of choices"),
)
"""Key, name, meaning; w = probability by trainer / by sampler, at the same weights."""


def headline(metrics: Metrics) -> tuple[str, str]:
    """Say in a sentence each how the reward moved, and what the plans were good for; empty where nothing is known."""
    planned = balance_in_words(metrics) if metrics.has("planned_skew") else ""
    return reward_in_words(metrics), planned


def learning(metrics: Metrics) -> str:
    """Show reward, evaluations and response lengths."""
    if not has_any(metrics, run_figures.LEARNING):
        return ""
    words = [reward_in_words(metrics), _evaluations_in_words(metrics), _unfinished_in_words(metrics)]
    return section(
        "learning",
        "Learning",
        paragraph(" ".join(word for word in words if word)),
        paragraph(
            "Reward: mean over the responses that ended in a step, with a band of one standard deviation. Evaluation: "
            "mean reward on held-out prompts. Response length: tokens per response, of those that ended. Unfinished: "
            "share of the responses under way that go on in the next step. Cut: share of those that ended because they "
            "were as long as allowed.",
            "how",
        ),
        plot(
            "learning-plot",
            step_panels(metrics, run_figures.LEARNING),
            "Reward, response length and unfinished responses over RL steps. "
            + (reward_in_words(metrics) or "No reward was recorded."),
        ),
    )


def balance(metrics: Metrics) -> str:
    """Show how even the ranks' expert work was in training, before and after planning."""
    if not has_any(metrics, run_figures.BALANCE):
        return ""
    words = balance_in_words(metrics)
    return section(
        "balance",
        "Balance in training",
        paragraph(words),
        paragraph(
            "Per step, over the micro-batches as they were trained: sum of the busiest ranks’ loads / sum of the mean "
            "loads. Static layout: without a plan. Bound: the lowest that any copies could reach with this schedule "
            "and these homes.",
            "how",
        ),
        plot("balance-plot", step_panels(metrics, run_figures.BALANCE), words),
    )


def mismatch(metrics: Metrics) -> str:
    """Show how far trainer and sampler were apart, and what alarms that raised."""
    rows = [
        [name, _figure(last), _figure(_worst(metrics, key)), meaning]
        for key, name, meaning in MISMATCH_ROWS
        if (last := metrics.last(key)) is not None
    ]
    alarms = alarms_in_words(metrics)
    if not rows and not alarms:
        return ""
    calm = "No figure was at a level that has preceded trouble elsewhere."
    panels = [panel for panel in run_figures.MISMATCH if has_any(metrics, [panel])]
    return section(
        "mismatch",
        "Trainer beside sampler",
        bullets(alarms, "notice") if alarms else paragraph(calm) if rows else "",
        paragraph(
            "The same tokens under the same weights, by the engine that sampled them and by the trainer before its "
            "update; what differs is arithmetic, and the experts that the routers chose. w is the ratio of the two "
            "probabilities. Worst: farthest from agreement over all steps.",
            "how",
        ),
        plot("mismatch-plot", step_panels(metrics, panels), "Divergence of trainer and sampler over RL steps.")
        if panels
        else "",
        table("Trainer beside sampler", ("", "last step", "worst", "what it is"), rows, text_columns=(0, 3))
        if rows
        else "",
    )


def value_model(metrics: Metrics) -> str:
    """Show whether the value model is of use; nothing for algorithms without one."""
    last = metrics.last("explained_variance")
    words = (
        ""
        if last is None
        else f"At the last step the value model explains {last:.2f} of the variance of returns: "
        + ("it helps." if last > 0 else "a constant would do as well or better.")
    )
    return _panels_section(
        metrics,
        run_figures.VALUES,
        "values",
        "Value model",
        "Explained variance: 1 − variance of (reward − value) / variance of rewards, over the tokens of responses that "
        "ended, before the value model learns from them. 1 is perfect, 0 is what a constant reaches, below it the "
        "value model adds noise.",
        words,
    )


def update(metrics: Metrics) -> str:
    """Show what the policy's optimizer did."""
    return _panels_section(
        metrics,
        run_figures.UPDATE,
        "update",
        "Update",
        "Entropy: of the policy at the tokens it sampled, before the update. Clipped: share of trained tokens whose "
        "ratio a clip held. Gradient norm: before it was scaled down, mean over mini-batches.",
        "",
    )


def time(metrics: Metrics) -> str:
    """Show where the time goes."""
    pieces = []
    seconds = metrics.seconds()
    if seconds:
        totals = {stage: sum(value or 0.0 for value in column) for stage, column in seconds.items()}
        whole = sum(totals.values()) or 1.0
        ordered = sorted(totals.items(), key=lambda pair: -pair[1])
        shares = ", ".join(f"{stage} {percent(total / whole)}" for stage, total in ordered)
        pieces += [
            paragraph(f"Wall-clock seconds of each step on rank 0, by stage. Over all steps: {shares}.", "how"),
            plot("seconds-plot", stage_seconds(metrics), f"Seconds per RL step by stage: {shares}."),
        ]
    if has_any(metrics, run_figures.IDLE):
        known = [value for value in metrics.column("idle_share") if value is not None]
        words = f"Over all steps {percent(sum(known) / len(known))} of the places stood idle."
        pieces += [
            "<h3>Idle places in rollout</h3>",
            paragraph(
                "Share of (place, decode step) without a response: places whose response has ended wait until the "
                f"longest one, or the window, is done, or for a refill. {words}",
                "how",
            ),
            plot("idle-plot", step_panels(metrics, run_figures.IDLE), words),
        ]
    return section("time", "Seconds per stage", *pieces) if pieces else ""


def unreadable(metrics: Metrics) -> str:
    """Say that lines were left out; nothing where none was."""
    if not metrics.unreadable:
        return ""
    return paragraph(
        f"{plural(metrics.unreadable, 'line')} of metrics.jsonl could not be read and were left out.", "notice"
    )


def reward_in_words(metrics: Metrics) -> str:
    """Say how the reward moved; empty without one."""
    known = [value for value in metrics.column("reward") if value is not None]
    if not known:
        return ""
    if len(known) == 1:
        return f"The reward was {known[0]:.3f} in the one step that has one."
    edge = max(1, min(5, len(known) // 2))
    first, last = sum(known[:edge]) / edge, sum(known[-edge:]) / edge
    over = f"mean of the first and last {edge} steps" if edge > 1 else "first and last step"
    over += " in which responses ended" * (len(known) < len(metrics.rows))
    return f"The reward went from {first:.3f} to {last:.3f} in {plural(len(metrics.rows), 'step')} ({over})."


def balance_in_words(metrics: Metrics) -> str:
    """Say what planning made of the rank skew; empty without either."""
    pairs = zip(metrics.column("rank_skew"), metrics.column("planned_skew"), strict=True)
    both = [(static, planned) for static, planned in pairs if static is not None and planned is not None]
    if not both:
        known = [value for value in metrics.column("rank_skew") if value is not None]
        mean = f"Rank skew was {times(sum(known) / len(known))} in the mean of all steps; nothing was planned."
        return mean if known else ""
    static, planned = (sum(values) / len(both) for values in zip(*both, strict=True))
    words = f"Plans brought rank skew from {times(static)} to {times(planned)} in the mean of {_steps(len(both))}"
    totals = {name: round(sum(value or 0 for value in metrics.column(name))) for name in ("replicas", "moved_experts")}
    copies, moved = totals["replicas"], totals["moved_experts"]
    means = [f"{count(copies)} {'copy' if copies == 1 else 'copies'} of experts"] * bool(copies) + [
        plural(moved, "move")
    ] * bool(moved)
    return f"{words}, with {' and '.join(means)}." if means else f"{words}."


def alarms_in_words(metrics: Metrics) -> list[str]:
    """Say of each figure that raised alarms how often, and the latest of its sentences."""
    found: dict[str, list[tuple[int, str]]] = {}
    for step, sentences in zip(metrics.steps, metrics.texts("alarms"), strict=True):
        for sentence in sentences:
            found.setdefault(sentence.partition(" ")[0], []).append((step, sentence))
    words = []
    for raised in list(found.values())[:MAX_ALARMS]:
        steps = list(dict.fromkeys(step for step, _ in raised))
        last, sentence = raised[-1]
        often = f"Step {last}" if len(steps) == 1 else f"{_steps(len(steps))} from {steps[0]} on, at last step {last}"
        words.append(f"{often}: {sentence[:400]}.")
    return words


def _evaluations_in_words(metrics: Metrics) -> str:
    known = [value for value in metrics.nested("evaluation", "reward") if value is not None]
    if not known:
        return ""
    first = "" if len(known) == 1 else f", after {known[0]:.3f} at the first"
    return f"The last of {plural(len(known), 'evaluation')} on held-out prompts gave {known[-1]:.3f}{first}."


def _unfinished_in_words(metrics: Metrics) -> str:
    known = [value for value in metrics.column("unfinished_share") if value is not None]
    if not known or not any(known):
        return ""
    share = percent(sum(known) / len(known))
    return f"In the mean {share} of the responses under way were unfinished when their window ended."


def _panels_section(
    metrics: Metrics, panels: Sequence[Panel], identifier: str, title: str, how: str, words: str
) -> str:
    if not has_any(metrics, panels):
        return ""
    return section(
        identifier,
        title,
        paragraph(words) if words else "",
        paragraph(how, "how"),
        plot(f"{identifier}-plot", step_panels(metrics, panels), words or f"{title} over RL steps."),
    )


def _worst(metrics: Metrics, key: str) -> float:
    known = [value for value in metrics.column(key) if value is not None]
    agreement = 1.0 if key in ("ess", "weight_mean") else 0.0
    return max(known, key=lambda value: abs(value - agreement))


def _figure(value: float) -> str:
    if value == 0:
        return "0"
    return f"{value:.3f}" if 1e-3 <= abs(value) < 1e4 else f"{value:.1e}"


def _steps(number: int) -> str:
    return plural(number, "step")
