"""Values of run.html, from metrics.jsonl. Any row may lack any key: what has no numbers is empty."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from relibra.reporting.data.iteration_stages import measured_stages, stage_table
from relibra.reporting.data.metrics import Metrics
from relibra.reporting.data.number_format import percent
from relibra.reporting.html.run_figures import TITLES, section_figures, stage_seconds
from relibra.simulation.training_passes import PredictedIteration

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
    ("known_rows", "", "token-slots whose rank is known before the step, mean", ".1%"),
    ("wait_seconds", "counts", "seconds per step that live layers wait for counts, mean (measured)", ".3f"),
    ("wait_seconds", "solve", "seconds per step that live layers wait for replicas and rows, mean (measured)", ".3f"),
    ("replicas", "", "replicas of experts per step, mean", ",.0f"),
    ("moved_experts", "", "moves of experts per step, mean", ",.1f"),
    ("explained_variance", "", "variance explained by the value model, last step", ".2f"),
    ("k3_kl", "", "k3 divergence of rollout and trainer, mean (nats)", ".2e"),
    ("idle_share", "", "idle share of the rollout batch, mean", ".1%"),
)
"""Key, part, meaning with unit, form; "first" or "last" in a meaning chooses the step, else the mean is shown."""

ROUTE_BYTES = {
    "rollout": "from the engines",
    "trace": "on disk",
    "plan": "counts per expert, all that the planner gets",
    "exchange": "sent to the ranks that train them, with their responses",
}


def run_values(metrics: Metrics, predicted: PredictedIteration | None = None) -> dict[str, Any]:
    """Return the values of run.html.

    predicted   iteration of the run's last recorded step
    """
    stages = stage_table(predicted, measured_stages(metrics)) if metrics.seconds() else {}
    kinds = ("measured", "predicted") if predicted else ("measured",)
    routes = {name: found for name in ROUTE_BYTES if (found := metrics.known("bytes", name))}
    return {
        "titles": TITLES,
        "panels": section_figures([("", metrics)]),
        "figures": key_figures([metrics]),
        "mismatch": [
            [name, _format(last), _format(_worst(metrics, key)), meaning]
            for key, name, meaning in MISMATCH_ROWS
            if (last := metrics.last(key)) is not None
        ],
        "alarms": _alarms(metrics),
        "seconds": [
            [name, *(_or_dash(row[f"{kind}_{what}"], what) for kind in kinds for what in ("seconds", "share"))]
            for name, row in stages.items()
        ],
        "kinds": kinds,
        "seconds_figure": stage_seconds(metrics) if metrics.seconds() else None,
        "routes": [[name, f"{fmean(found) / 1e6:,.1f}", ROUTE_BYTES[name]] for name, found in routes.items()]
        if any(map(any, routes.values()))
        else [],
        "idle_share": fmean(metrics.known("idle_share") or [0.0]),
        "unreadable": metrics.unreadable,
    }


def key_figures(runs: Sequence[Metrics]) -> list[list[str]]:
    """Return the key figures of runs beside each other."""
    rows = []
    for key, part, meaning, form in FIGURES:
        known = [metrics.known(key, part) for metrics in runs]
        if any(known):
            rows.append([meaning, *(format(_chosen(found, meaning), form) if found else "–" for found in known)])
    seconds = [sum(sum(metrics.known("seconds", stage)) for stage in metrics.seconds()) for metrics in runs]
    if any(seconds):
        means = [total / max(1, len(metrics.rows)) for total, metrics in zip(seconds, runs, strict=True)]
        rows.append(["seconds per step, mean (measured)", *(f"{mean:.2f}" if mean else "–" for mean in means)])
    return rows


def _chosen(known: Sequence[float], meaning: str) -> float:
    return known[-1] if "last" in meaning else known[0] if "first" in meaning else fmean(known)


def _alarms(metrics: Metrics) -> list[list[str]]:
    """Return, for each figure that raised alarms, number of steps, last step and latest text."""
    found: dict[str, list[tuple[int, str]]] = {}
    for step, texts in zip(metrics.steps, metrics.texts("alarms"), strict=True):
        for text in texts:
            found.setdefault(text.partition(" ")[0], []).append((step, text))
    latest = [(len({step for step, _ in raised}), *raised[-1]) for raised in list(found.values())[:MAX_ALARMS]]
    return [[str(number), str(step), text[:400]] for number, step, text in latest]


def _worst(metrics: Metrics, key: str) -> float:
    """Return the value furthest from agreement, which is 1 for shares and weights, else 0."""
    agreement = 1.0 if key in ("ess", "weight_mean") else 0.0
    return max(metrics.known(key), key=lambda value: abs(value - agreement))


def _or_dash(value: float | None, what: str) -> str:
    return "–" if value is None else percent(value) if what == "share" else f"{value:.2f}"


def _format(value: float) -> str:
    if value == 0:
        return "0"
    return f"{value:.3f}" if 1e-3 <= abs(value) < 1e4 else f"{value:.1e}"
