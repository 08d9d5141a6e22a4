"""Generation batches of TRL: the routes of their samples, and which micro-batch and rank each sample runs on.

TRL samples once for `steps_per_generation` micro-batches of every rank, and runs them `num_iterations` times. Routes
are recorded in a forward pass of the trainer, or are those of the engine that sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Int, Int32, Integer
from numpy import ndarray
from torch import Tensor, nn

from relibra.errors import EngineError, TraceError
from relibra.replay import find_routers, record_routing
from relibra.routing.demand import Demand, ScheduledDemand
from relibra.routing.trace import RoutingTrace

EngineRoutes = Callable[[list[list[int]]], Sequence[ndarray]]
"""Given the n tokens of each sample of this rank (prompt, completion), returns its routes `[n or n - 1, L, K]`."""


def record_routes(
    model: nn.Module, input_ids_BN: Integer[Tensor, "B N"], mask_BN: Integer[Tensor, "B N"], rows_at_once: int
) -> RoutingTrace:
    """Return the routes that the model takes now, by a forward pass without gradients; collective.

    rows_at_once   samples per pass
    """
    training = model.training
    model.eval()  # no dropout, and no activation checkpointing, which would warn without gradients
    try:
        with torch.no_grad(), record_routing(model) as recorder:
            for ids, mask in zip(input_ids_BN.split(rows_at_once), mask_BN.split(rows_at_once), strict=True):
                model(input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=1)
            return recorder.take_trace(input_ids_BN, mask_BN, source="TRL, a pass before training")
    finally:
        model.train(training)


def read_engine_routes(
    engine: EngineRoutes,
    model: nn.Module,
    input_ids_BN: Integer[Tensor, "B N"],
    mask_BN: Integer[Tensor, "B N"],
    *,
    cut: bool,
) -> RoutingTrace:
    """Return the routes of the engine that sampled, checked against the model and the tokens.

    cut      drop rows beyond the tokens: TRL masks truncated completions, whose routes the engine returns
    raises   TraceError when rows do not fit the tokens, or ids are illegal
    """
    sites = find_routers(model)
    tokens = [ids[mask != 0].tolist() for ids, mask in zip(input_ids_BN.cpu(), mask_BN.cpu(), strict=True)]
    arrays = [np.asarray(experts) for experts in engine(tokens)]
    if len(arrays) != len(tokens):
        raise TraceError(f"engine_routes returned routes of {len(arrays)} samples for {len(tokens)}: one array each")
    for s, (experts, own) in enumerate(zip(arrays, tokens, strict=True)):
        most = len(experts) if cut else len(own)
        if experts.ndim != 3 or not len(own) - 1 <= len(experts) <= most:
            raise TraceError(
                f"engine_routes returned an array of shape {experts.shape} for sample {s} of {len(own)} tokens: "
                f"[rows, layers, choices] with {len(own) - 1} rows (all tokens but the last) or {len(own)}"
            )
    arrays = [experts[: len(own)] for experts, own in zip(arrays, tokens, strict=True)]
    return RoutingTrace.from_samples(
        arrays,
        num_experts=sites[0].num_experts,
        layer_ids=[site.layer_id for site in sites],
        tokens=[np.array(own[: len(experts)]) for experts, own in zip(arrays, tokens, strict=True)],
        source="TRL, engine_routes",
    )


def mini_batches(micro_batches: int, iterations: int, accumulation: int) -> Int32[ndarray, " M"]:
    """Return the mini-batch of each micro-batch of a generation batch; no optimizer step falls inside a mini-batch.

    Where places of optimizer steps differ between generation batches, every micro-batch is a mini-batch of its own.

    micro_batches   of a rank in a generation batch (`steps_per_generation`)
    iterations      runs over them (`num_iterations`)
    accumulation    micro-batches per optimizer step (`gradient_accumulation_steps`)

    >>> mini_batches(4, 1, 2).tolist(), mini_batches(2, 2, 4).tolist(), mini_batches(4, 1, 3).tolist()
    ([0, 0, 1, 1], [0, 0], [0, 1, 2, 3])
    """
    passes = micro_batches * iterations
    if accumulation % passes == 0:
        return np.zeros(micro_batches, dtype=np.int32)
    if passes % accumulation:
        return np.arange(micro_batches, dtype=np.int32)
    ends_M = np.zeros(micro_batches, dtype=np.int32)
    ends_M[np.arange(accumulation - 1, passes, accumulation) % micro_batches] = 1
    return (np.cumsum(ends_M) - ends_M).astype(np.int32)


def schedule_samples(
    counts_SLE: Int32[ndarray, "S L E"],
    *,
    layer_ids: Sequence[int],
    top_k: int,
    world_size: int,
    num_ranks: int,
    mini_batch_M: Int[ndarray, " M"],
) -> ScheduledDemand:
    """Return the demand of a generation batch under TRL's schedule.

    Several expert-parallel groups, which hold the same experts, are planned together (`ScheduledDemand.of_groups`).

    counts_SLE     token-slots of the samples of all ranks: rank by rank, and there in the order of training
    world_size     ranks that train; ranks 0 to R-1 are the first expert-parallel group
    num_ranks      of one group, `R`
    mini_batch_M   of each micro-batch of a rank
    raises         EngineError when samples do not fill the micro-batches of all ranks evenly
    """
    samples, micro_batches = len(counts_SLE), len(mini_batch_M)
    if samples == 0 or samples % (world_size * micro_batches):
        raise EngineError(
            f"a generation batch has {samples} samples, which do not fill {micro_batches} micro-batches of "
            f"{world_size} ranks evenly: use TRL's own sampler, which drops incomplete batches"
        )
    rank_S, place_S = np.divmod(np.arange(samples), samples // world_size)
    group_S, rank_S = np.divmod(rank_S, num_ranks)
    micro_batch_S = group_S * micro_batches + place_S // (samples // (world_size * micro_batches))
    groups = world_size // num_ranks
    demand = Demand(
        counts_SLE=counts_SLE, layer_ids=np.array(layer_ids, dtype=np.int32), sample_ids=np.arange(samples), top_k=top_k
    ).with_schedule(micro_batch_S, rank_S, num_ranks, groups * micro_batches)
    first_mini_batch = np.arange(groups) * (int(mini_batch_M[-1]) + 1)
    return replace(demand, group_M=(first_mini_batch[:, None] + mini_batch_M).ravel().astype(np.int32))
