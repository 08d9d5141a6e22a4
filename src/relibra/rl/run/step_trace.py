"""The routes of a step on disk: one shard per rank, and one index over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch.distributed as dist
from numpy import ndarray

from relibra.errors import TraceError
from relibra.rl.model.policy import Policy
from relibra.rl.rollout.response import Response
from relibra.rl.run.ranks import gather_json
from relibra.rl.run.run_folder import trace_folder
from relibra.routing.trace import RoutingTrace, expert_dtype, hash_tokens
from relibra.routing.trace_files import ShardEntry, TraceWriter, index_of, write_index


def write_step_trace(run: Path, step: int, responses: Sequence[Response], policy: Policy) -> list[Response]:
    """Validate and write the routes of all ranks' responses of a step whose engine records routes; collective.

    returns   the responses; their routes are views of the array that was written
    raises    TraceError where the engine reported illegal routes
    """
    folder = trace_folder(run, step)
    writer = TraceWriter(folder, shard_prefix=f"rank-{dist.get_rank():03d}")
    trace = None
    if responses:
        source = f"rollout of step {step}"
        trace = trace_of(responses, num_experts=policy.num_experts, layer_ids=policy.layer_ids, source=source)
        writer.append(trace)
    gathered_R = gather_json([entry.model_dump() for entry in writer.shards])
    if dist.get_rank() == 0:
        assert trace is not None, "rank 0 has the first response of every step"
        write_index(folder, index_of(trace, [ShardEntry(**entry) for entries in gathered_R for entry in entries]))
    if trace is None:
        return []
    return [
        replace(response, experts_mLK=trace.experts_TLK[start:stop])
        for response, start, stop in zip(responses, trace.offsets, trace.offsets[1:] - 1, strict=False)
    ]


def trace_of(responses: Sequence[Response], *, num_experts: int, layer_ids: Sequence[int], source: str) -> RoutingTrace:
    """Return the routes of responses in one array; the last row of each is marked invalid.

    raises    TraceError for routes that are missing, of another shape, of no whole numbers, or out of range
    """
    first = responses[0].experts_mLK
    dtype, L, K = expert_dtype(num_experts), len(layer_ids), 0 if first is None else first.shape[-1]
    offsets = np.cumsum([0, *(len(response.tokens_n) for response in responses)])
    experts_TLK, valid_T = np.empty((offsets[-1], L, K), dtype), np.ones(offsets[-1], dtype=bool)
    experts_TLK[offsets[1:] - 1], valid_T[offsets[1:] - 1] = np.arange(K), False  # last tokens were not fed
    for start, stop, response in zip(offsets, offsets[1:] - 1, responses, strict=False):
        experts_TLK[start:stop] = _checked(response, (len(response.tokens_n) - 1, L, K), num_experts)
    return RoutingTrace(
        experts_TLK=experts_TLK,
        offsets=offsets,
        valid_T=valid_T,
        layer_ids=np.array(layer_ids, dtype=np.int32),
        num_experts=num_experts,
        sample_ids=np.array([response.sample_id for response in responses], dtype=np.int64),
        group_ids=np.array([response.group_id for response in responses], dtype=np.int64),
        prompt_lengths=np.array([response.prompt_length for response in responses], dtype=np.int64),
        weight_versions=np.array([response.versions_r[-1] for response in responses], dtype=np.int64),
        token_hash_T=np.concatenate([hash_tokens(response.tokens_n) for response in responses]),
        source=source,
    )


def _checked(response: Response, shape: tuple[int, ...], num_experts: int) -> ndarray:
    """Return the routes of a response; a copy into another array would cast and broadcast what does not fit."""
    routes, sample = response.experts_mLK, response.sample_id
    if routes is None or routes.shape != shape or routes.dtype.kind not in "iu":
        found = "none" if routes is None else f"{routes.dtype} of shape {routes.shape}"
        raise TraceError(f"sample {sample}: the engine's routes are {found}; expected whole numbers of shape {shape}")
    if routes.size and not 0 <= int(routes.min()) <= int(routes.max()) < num_experts:
        raise TraceError(
            f"sample {sample}: the engine's routes name experts {routes.min()} to {routes.max()}; allowed are 0 to "
            f"{num_experts - 1}"
        )
    return routes
