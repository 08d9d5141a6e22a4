"""A step for a dry run: the longest responses that a micro-batch can have, with routes of all ranks, and a plan."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy import ndarray

from relibra.cluster import Cluster
from relibra.planning.planner import plan_step
from relibra.replay import BatchRoutes
from relibra.rl.batch.plan_budget import plan_budget
from relibra.rl.batch.schedule import Schedule
from relibra.rl.batch.token_batch import TokenBatch, make_token_batch
from relibra.rl.batch.training_batch import TrainingBatch
from relibra.rl.config.run_config import RunConfig
from relibra.rl.model.policy import ModelStructure
from relibra.rl.rollout.response import Response, Window, new_response
from relibra.routing.demand import Demand, ScheduledDemand, count_token_slots

MINI_BATCH_M = (0, 1, 1)
"""Mini-batch of each micro-batch: mini-batch 0 makes the moments, mini-batch 1 adds up gradients beside them."""
MICRO_BATCHES, MINI_BATCHES = len(MINI_BATCH_M), 2
_SKEW = 0.8
"""Standard deviation of the log of how often experts are chosen."""


def response_lengths(config: RunConfig) -> list[tuple[int, int]]:
    """Return (prompt tokens, response tokens) of each response of the largest possible micro-batch.

    A response longer than `update.micro_batch_tokens` is a micro-batch by itself; shorter ones fill it.
    """
    prompt, response = config.rollout.max_prompt, config.rollout.max_response
    fed, limit = prompt + response - 1, config.update.micro_batch_tokens
    lengths = [(prompt, response)] * max(1, limit // fed)
    rest = limit - len(lengths) * fed
    return [*lengths, (rest - rest // 2 + 1, rest // 2)] if rest > 1 else lengths


def make_up_step(
    config: RunConfig, structure: ModelStructure, cluster: Cluster, *, vocabulary: int, rank: int = 0
) -> tuple[TrainingBatch, dict[tuple[int, int], BatchRoutes]]:
    """Return what a rank trains, and the routes of all ranks by micro-batch and rank.

    It has routes if the run replays them, and a plan, with no memory for slots of layers, if it follows one.
    """
    lengths, ranks, micro_batches = response_lengths(config), cluster.num_ranks, MICRO_BATCHES
    rng = np.random.default_rng(rank)
    responses = [_response(s, *one, vocabulary, rng) for s, one in enumerate(lengths * micro_batches)]
    per_batch = len(lengths)
    batches = [
        _filled(make_token_batch(responses, range(m * per_batch, (m + 1) * per_batch)), config)
        for m in range(micro_batches)
    ]
    schedule = Schedule(
        mini_batch_M=np.array(MINI_BATCH_M, np.int32),
        micro_batch_S=np.repeat(np.arange(micro_batches, dtype=np.int32), per_batch),
        rank_S=np.full(len(responses), rank, np.int32),
    )
    batch = TrainingBatch(responses=responses, micro_batches=batches, schedule=schedule, demand=None, plan=None)
    if not structure.layer_ids or config.algorithm.replay == "off":
        return batch, {}
    routes, counts_BRLE = _make_routes(lengths, ranks, structure)
    of_ranks = {(m, r): routes[r] for m in range(micro_batches) for r in range(ranks)}
    demand = _demand(counts_BRLE, structure, ranks, schedule.mini_batch_M)
    batch = replace(batch, micro_batches=[replace(one, routes=routes[rank]) for one in batches], demand=demand)
    if not config.follows_plans or config.plan.live or not structure.num_experts:
        return batch, of_ranks
    assert structure.shape is not None, "a model with experts has sizes"
    budget = replace(plan_budget(config.plan, 0.0), pack_samples=False, move_homes=False)
    plan = plan_step(demand, cluster, budget, config.plan.balancer, expert=structure.shape.expert)
    return replace(batch, plan=plan), of_ranks


def _response(sample: int, prompt: int, length: int, vocabulary: int, rng: np.random.Generator) -> Response:
    window = Window(
        tokens_w=rng.integers(0, vocabulary, length),
        log_probs_w=np.zeros(length, np.float32),
        experts_mLK=None,
        stopped=False,
    )
    begun = new_response(sample, sample, rng.integers(0, vocabulary, prompt).tolist())
    return begun.extended(window, weight_version=0, max_response=max(1, length))


def _filled(batch: TokenBatch, config: RunConfig) -> TokenBatch:
    """Return a batch with all that the losses read; every response token trains."""
    X = len(batch.row_X)
    of_reference = torch.zeros(X) if config.algorithm.kl_coefficient else None
    return replace(
        batch,
        old_log_probs_X=torch.zeros(X),
        loss_mask_X=torch.ones(X, dtype=torch.bool),
        advantages_X=torch.ones(X),
        positive_B=torch.ones(batch.num_responses, dtype=torch.bool),
        ref_log_probs_X=of_reference,
        old_values_X=torch.zeros(X) if config.algorithm.advantage == "gae" else None,
        returns_X=torch.zeros(X) if config.algorithm.advantage == "gae" else None,
    )


def _make_routes(
    lengths: list[tuple[int, int]], ranks: int, structure: ModelStructure
) -> tuple[list[BatchRoutes], ndarray]:
    """Return routes of each rank, which are those of every micro-batch, and their counts `[B, R, L, E]`.

    All layers choose alike, so that none is an exception from which the others would be extrapolated.
    """
    E, K, L = structure.num_experts, structure.top_k, len(structure.layer_ids)
    rng = np.random.default_rng(1)
    weight_E = np.exp(_SKEW * rng.normal(size=E)).astype(np.float32)
    routes, counts_BRLE = [], np.zeros((len(lengths), ranks, L, E), np.int32)
    for rank in range(ranks):
        rows = []
        for b, (prompt, response) in enumerate(lengths):
            fed = prompt + response - 1
            order_mE = rng.standard_exponential((fed, E), dtype=np.float32) / weight_E
            experts_mK = np.argpartition(order_mE, K - 1, axis=1)[:, :K].astype(np.uint8 if E <= 256 else np.int32)
            rows.append(np.repeat(experts_mK[:, None], L, axis=1))
            [counts_BRLE[b, rank]] = count_token_slots(rows[-1], np.ones(fed, bool), np.array([0, fed]), E)
        routes.append(
            BatchRoutes.of_rows(
                rows,
                num_experts=E,
                layer_ids=structure.layer_ids,
                sample_ids=list(range(len(lengths))),
                weight_versions=[0] * len(lengths),
            )
        )
    return routes, counts_BRLE


def _demand(counts_BRLE: ndarray, structure: ModelStructure, ranks: int, mini_batch_M: ndarray) -> ScheduledDemand:
    """Return the demand of all ranks; every micro-batch has the same routes."""
    per_batch, micro_batches = len(counts_BRLE), len(mini_batch_M)
    L, E = counts_BRLE.shape[2:]
    counts_SLE = np.broadcast_to(counts_BRLE, (micro_batches, *counts_BRLE.shape)).reshape(-1, L, E).copy()
    places = np.indices((micro_batches, per_batch, ranks)).reshape(3, -1).astype(np.int32)
    demand = Demand(
        counts_SLE=counts_SLE,
        layer_ids=np.array(structure.layer_ids, np.int32),
        sample_ids=np.arange(len(counts_SLE)),
        top_k=structure.top_k,
    )
    scheduled = demand.with_schedule(places[0], places[2], ranks, micro_batches)
    return replace(scheduled, group_M=mini_batch_M)
