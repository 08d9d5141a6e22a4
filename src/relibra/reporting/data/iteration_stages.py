"""Where an iteration's time goes: stages as a run logged them, beside those predicted for its last recorded step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import fmean

import numpy as np

from relibra.reporting.data.compared_plans import ComparedStep
from relibra.reporting.data.metrics import Metrics
from relibra.reporting.data.recording import Recording
from relibra.routing.readers import open_trace
from relibra.simulation.training_passes import Activations, Iteration, Levers, PredictedIteration, simulate_passes

STAGES = (
    *("rollout", "tail", "reward", "trace", "plan", "relocate", "recompute", "reference", "values", "update values"),
    *("update", "sync", "waits"),
)
"""In the order of a step; tail: the share of the rollout in which places are idle, as their response has ended."""


def levers_of(recording: Recording) -> Levers:
    """Return the levers of a run; what its configuration does not say is as in a plain GRPO run."""
    ahead, kl = recording.setting("rollout", "ahead"), recording.setting("algorithm", "kl_coefficient")
    old, replay, preset = (recording.setting("algorithm", name) for name in ("old_log_probs", "replay", "preset"))
    before = recording.is_run and old is None  # a run of a version that had no such setting
    all_recomputed = before or old == "recompute" or replay == "R2"
    kinds: dict[str, Activations] = {"keep": "kept", "plan": "chosen"}
    return Levers(
        old_log_probs="all" if all_recomputed else "none" if old == "sampler" else "later",
        activations=kinds.get(str(recording.setting("update", "activations")), "recomputed"),
        ahead=ahead if isinstance(ahead, int) else 0,
        reference=isinstance(kl, int | float) and kl > 0,
        values=preset in ("ppo", "tppo"),
    )


def predict_run(recording: Recording, step: ComparedStep) -> PredictedIteration | None:
    """Return the iteration of a run's last recorded step under the plan of its page; None: no run, or no load."""
    demand, mini_batches = step.after.demand, recording.setting("update", "mini_batches")
    if not recording.is_run or not demand.load_MLE.any():
        return None
    M, number = len(demand.tokens_MLRE), mini_batches if isinstance(mini_batches, int) else 1
    in_mini_batches = replace(demand, group_M=(np.arange(M) * max(1, min(number, M)) // M).astype(np.int32))
    trace = open_trace(recording.traces[-1][1], recording.num_experts)
    reward = measured_stages(recording.metrics).get("reward", 0.0)
    passes = simulate_passes(step.after.plan, in_mini_batches, step.cluster, step.model, distinct=step.after.rows)
    iteration = Iteration.of_lengths(trace.rows_per_sample, trace.prompt_lengths, step.cluster, step.model, reward)
    return iteration.predict(passes, levers_of(recording))


def measured_stages(metrics: Metrics) -> dict[str, float]:
    """Return the mean seconds of a step by stage, on rank 0; {} without any.

    The tail is the rollout's seconds x its idle share of places.
    """
    found = {stage: fmean(metrics.known("seconds", stage)) for stage in metrics.seconds()}
    if metrics.known("ahead", "waited_rollout"):  # the rollout is beside the step
        found["waits"] = found.pop("rollout", 0.0)
    elif "rollout" in found:
        tail = fmean(metrics.known("idle_share") or [0.0]) * found["rollout"]
        found |= {"rollout": found["rollout"] - tail, "tail": tail}
    return found


def stage_table(
    predicted: PredictedIteration | None, measured: Mapping[str, float]
) -> dict[str, dict[str, float | None]]:
    """Return seconds and share of each stage, predicted and measured; None for the one that lacks the stage."""
    expected = {} if predicted is None else {**predicted.stages, **predicted.beside}
    whole = {"predicted": 0.0 if predicted is None else predicted.seconds, "measured": sum(measured.values())}
    names = [*STAGES, *(name for name in measured if name not in STAGES)]
    return {
        name: {
            f"{kind}_{what}": table.get(name) and table[name] / of
            for kind, table in (("predicted", expected), ("measured", measured))
            for what, of in (("seconds", 1.0), ("share", whole[kind] or 1.0))
        }
        for name in names
        if expected.get(name) or measured.get(name)
    }
