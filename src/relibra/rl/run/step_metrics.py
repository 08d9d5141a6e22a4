"""Metrics of a step: sums over ranks, for the row of metrics.jsonl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from relibra.parallel import LiveSkew
from relibra.planning.analysis.explanation import slot_memory
from relibra.planning.analysis.levers import static_skew
from relibra.planning.costs.copies import pushed_copies
from relibra.replay.replay import RouterComparison
from relibra.rl.algorithms.mismatch import MismatchSums, mismatch_metrics, router_metrics
from relibra.rl.batch.training_batch import TrainingBatch
from relibra.rl.rollout.response import Response, RolloutCost
from relibra.rl.run.ranks import gather_arrays, largest_over_ranks, sum_over_ranks
from relibra.rl.update.policy_update import PolicyUpdate
from relibra.rl.update.recompute import Comparison, Recomputed
from relibra.routing.statistics import skew
from relibra.simulation import ModelShape


def rollout_metrics(responses: Sequence[Response], cost: RolloutCost) -> dict[str, Any]:
    """Return the metrics of the responses of all ranks and of the cost to sample them; collective.

    Rewards and lengths are those of responses that finished in this step; None if there are none.
    """
    own = [
        (
            response.finish_reason is not None,
            np.nan if response.reward is None else response.reward,
            response.length,
            response.finish_reason == "length",
            len(response.tokens_n),
            response.window_length,
        )
        for response in responses
    ]
    rows = np.concatenate(gather_arrays(np.array(own, dtype=np.float64).reshape(-1, 6)))
    finished = rows[rows[:, 0] > 0]
    slots, busy, prefilled, mixed = sum_over_ranks(
        torch.tensor([cost.slot_steps, cost.busy_slot_steps, cost.prefilled_tokens, cost.mixed_tokens])
    ).tolist()
    lengths, rewards = finished[:, 2], finished[~np.isnan(finished[:, 1]), 1]
    return {
        "reward": float(rewards.mean()) if len(rewards) else None,
        "reward_std": float(rewards.std()) if len(rewards) else None,
        "failed_rewards": len(finished) - len(rewards),
        "response_length": float(lengths.mean()) if len(finished) else None,
        "response_length_p95": float(np.percentile(lengths, 95)) if len(finished) else None,
        "response_length_max": int(lengths.max()) if len(finished) else None,
        "cut_share": float(finished[:, 3].mean()) if len(finished) else None,
        "finished": len(finished),
        "unfinished_share": float(1 - rows[:, 0].mean()),
        "tokens": int(rows[:, 4].sum()),
        "sampled_tokens": int(rows[:, 5].sum()),
        "prefilled_tokens": int(prefilled),
        "mixed_tokens": int(mixed),
        "decode_steps": largest_over_ranks(cost.decode_steps),
        "passes": None if cost.passes is None else largest_over_ranks(cost.passes),
        "idle_share": float(1 - busy / slots) if slots else 0.0,
    }


def ahead_metrics(
    step: int, responses: Sequence[Response], begun: int, seconds: Mapping[str, float]
) -> dict[str, float | int | None]:
    """Return how old the tokens of a step are that were sampled while other steps trained; collective.

    begun     samples of later steps that have begun
    returns   age_mean, age_max: of the weights that sampled the tokens of the last windows, in steps; mixed_share: of
              these, the share sampled by older weights, perhaps routed by newer; waited_rollout, waited_plan: seconds
              that the step waited; begun: as given
    """
    ages = [step - response.versions_r[response.in_window_r] for response in responses]
    mixed = sum(int(response.mixed_r[response.in_window_r].sum()) for response in responses)
    own = [sum(map(len, ages)), sum(int(age.sum()) for age in ages), mixed]
    tokens, total, mixed = sum_over_ranks(torch.tensor(own)).tolist()
    return {
        "age_mean": total / tokens if tokens else None,
        "age_max": largest_over_ranks(max((int(age.max(initial=0)) for age in ages), default=0)),
        "mixed_share": mixed / tokens if tokens else None,
        "waited_rollout": round(seconds["rollout"], 4),
        "waited_plan": round(seconds["plan"], 4),
        "begun": begun,
    }


def mismatch_metrics_of_ranks(compared: Comparison) -> dict[str, Any]:
    """Return the metrics of trainer compared with sampler over all ranks; collective."""
    largest = max(float(piece[0]) for piece in gather_arrays(np.array([compared.mismatch.largest])))
    sums = MismatchSums(sums=sum_over_ranks(compared.mismatch.sums), largest=largest)
    counts = sum_over_ranks(torch.tensor(astuple(compared.routers))).tolist()
    entropy, tokens = sum_over_ranks(torch.tensor([compared.entropy, compared.tokens], dtype=torch.float64)).tolist()
    found = {**mismatch_metrics(sums), **router_metrics(RouterComparison(*counts))}
    return {**found, "entropy": entropy / tokens if tokens else None}


_OF_LOSSES = ("clip_fraction", "masked_fraction", "reference_kl", "reference_kl_limited")
"""Names of sums that losses of presets return, and of the fields with their means over tokens."""


def update_metrics(update: PolicyUpdate, names: Sequence[str]) -> dict[str, Any]:
    """Return the metrics of the update over all ranks; collective.

    names   of the sums that the loss returns
    """
    norms = update.grad_norms
    own = [update.sums.get(name, 0.0) for name in ("loss", "tokens", "at_ratio_1", *names)]
    loss, tokens, at_ratio_1, *sums = sum_over_ranks(torch.tensor(own, dtype=torch.float64)).tolist()
    counts = [tokens - at_ratio_1 if name == "clip_fraction" else tokens for name in names]
    means = {name: total / count if count else None for name, total, count in zip(names, sums, counts, strict=True)}
    return {
        "loss": loss / len(norms) if norms else None,
        "grad_norm": float(np.mean(norms)) if norms else None,
        "skipped_updates": update.skipped,
        "trained_tokens": int(tokens),
        **{name: means.pop(name, None) for name in _OF_LOSSES},
        "loss_metrics": means or None,
    }


def prompt_metrics(batch: TrainingBatch) -> dict[str, Any]:
    """Return the tokens that a pass over the step feeds, and what is known of the prompts that are shared; collective.

    fed_tokens                a prompt that responses share counts once
    prompt_routes_differing   share of (token, layer) of such prompts where a response has other experts than the first
                              one, whose experts are replayed; None: nothing is shared, or no routes are replayed
    """
    fed = sum(one.tokens_1T.numel() for one in batch.micro_batches if one.num_responses)
    fed, pairs, differing = sum_over_ranks(torch.tensor([fed, *batch.prompt_pairs])).tolist()
    return {"fed_tokens": fed, "prompt_routes_differing": differing / pairs if pairs else None}


def route_bytes(batch: TrainingBatch, *, routed: int, traced: int) -> dict[str, int]:
    """Return the bytes that routes take on their way through a step, all ranks together; collective.

    routed    of the routes that this rank got from its engine and trains on
    traced    of the shards that this rank wrote
    returns   rollout: of the routes; trace: on disk; plan: of the counts per expert, all that the planner gets;
              exchange: of responses with their routes that went to other ranks
    """
    counts = 0
    if batch.demand is not None:
        _, L, _, E = batch.demand.tokens_MLRE.shape
        counts = len(batch.schedule.rank_S) * L * E * 4
    rollout, trace, exchange = sum_over_ranks(torch.tensor([routed, traced, batch.sent_bytes])).tolist()
    return {"rollout": rollout, "trace": trace, "plan": counts, "exchange": exchange}


def balance_metrics(
    batch: TrainingBatch,
    recomputed: Recomputed,
    update: PolicyUpdate,
    shape: ModelShape | None,
    live_skews: Mapping[str, LiveSkew],
) -> dict[str, Any]:
    """Return the skew of expert loads before and after planning or live balancing; the same on all ranks.

    shape        of the model; None: it has no experts
    live_skews   of the passes that balanced live
    """
    pass_skews: dict[str, Sequence[float]] = dict(live_skews)
    found: dict[str, Any] = dict.fromkeys(
        (
            *("rank_skew", "expert_skew", "planned_skew", "plan_bound", "replicas", "pushes", "moved_experts", "slots"),
            *("plan_seconds", "expected_seconds", "expected_static_seconds", "expected_moving_seconds", "ran_at_home"),
        )
    )
    if batch.demand is not None and len(batch.demand.load_MLE):
        static, load_MLE = static_skew(batch.demand, dist.get_world_size()), batch.demand.load_MLE
        found |= {"rank_skew": static, "expert_skew": float(skew(load_MLE).mean())}
    live = update.live or recomputed.live
    if live is not None and batch.micro_batches:
        before, after = live.skew()
        if found["rank_skew"] is None:  # routes are not known: the skew of what the pass ran
            found["rank_skew"] = before
        found |= {"planned_skew": after, "replicas": live.num_copies, "pushes": live.num_copies}
    if batch.plan is not None and batch.demand is not None and shape is not None:
        scheduled = batch.plan.scheduled(batch.demand)
        total = batch.plan.predicted.get("total")
        found |= {
            "rank_skew": static_skew(batch.demand, batch.plan.num_ranks),
            "planned_skew": batch.plan.skew(scheduled),
            "plan_bound": batch.plan.bound(scheduled),
            "replicas": batch.plan.num_copies,
            "pushes": int(pushed_copies(batch.plan)[0].sum()),
            "moved_experts": batch.plan.num_moved,
            "slots": slot_memory(batch.plan, shape.expert)._asdict(),
            "plan_seconds": batch.plan.plan_seconds,
            "expected_seconds": None if total is None else total - batch.plan.predicted["relocation"],
            "expected_moving_seconds": batch.plan.predicted.get("relocation"),
            "expected_static_seconds": batch.static_seconds,
            "ran_at_home": recomputed.ran_at_home + update.ran_at_home,
        }
        planned = (found["rank_skew"], found["planned_skew"])
        ran = [any(one is not None for one in recomputed.log_probs), bool(update.grad_norms or update.skipped)]
        names = [name for name, is_run in zip(("recompute", "update"), ran, strict=True) if is_run]
        pass_skews = {**dict.fromkeys(names, planned), **pass_skews}
    return {**found, "pass_skews": {name: list(skews) for name, skews in pass_skews.items()}}
