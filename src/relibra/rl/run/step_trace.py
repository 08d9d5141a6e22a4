"""The routes of a step on disk: one shard per rank, and one index over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from relibra.rl.model.policy import Policy
from relibra.rl.rollout.response import Response, trace_of
from relibra.rl.run.ranks import gather_json
from relibra.rl.run.run_folder import trace_folder
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
