"""The routes of a step on disk: a shard per rank, and one index over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from relibra.rl.config.run_config import RunConfig
from relibra.rl.model.policy import Policy
from relibra.rl.rollout.response import Response, trace_of
from relibra.rl.run.ranks import gather_json
from relibra.rl.run.run_folder import trace_folder
from relibra.routing.trace_files import ShardEntry, TraceWriter, index_of, write_index


def write_step_trace(run: Path, step: int, responses: Sequence[Response], policy: Policy, config: RunConfig) -> None:
    """Write the routes of all ranks' responses; nothing where the engine reports none; collective."""
    asked = config.rollout.engine == "embedded" or config.algorithm.replay == "R3"
    if not policy.layer_ids or not asked:
        return
    folder = trace_folder(run, step)
    writer = TraceWriter(folder, shard_prefix=f"rank-{dist.get_rank():03d}")
    trace = None
    if responses:
        source = f"rollout of step {step}"
        trace = trace_of(responses, num_experts=policy.num_experts, layer_ids=policy.layer_ids, source=source)
        writer.append(trace)
    entries = gather_json([entry.model_dump() for entry in writer.shards])
    if dist.get_rank() == 0:
        assert trace is not None, "rank 0 has the first response of every step"
        shards = [ShardEntry(**entry) for of_rank in entries for entry in of_rank]
        write_index(folder, index_of(trace, shards))
