"""The routes of a step on disk, one shard per rank and one index over all of them, and the plan made from them."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch.distributed as dist
from numpy import ndarray
from safetensors import SafetensorError

from relibra.errors import TraceError
from relibra.planning.plan import StepPlan
from relibra.planning.plan_files import write_plan
from relibra.rl.batch.schedule import cut_into_runs
from relibra.rl.batch.step_plan import routes_of
from relibra.rl.config.settings import TraceSettings
from relibra.rl.rollout.response import Response
from relibra.rl.run.ranks import gather_json, wait_for_ranks
from relibra.rl.run.run_folder import step_folders, trace_folder
from relibra.routing.demand import ScheduledDemand
from relibra.routing.demand_files import write_demand
from relibra.routing.trace import RoutingTrace, expert_dtype, hash_tokens
from relibra.routing.trace_files import SHARD_ROWS, ShardEntry, TraceWriter, index_of, write_index

KEPT_EVERY = 50
"""Steps whose number is a multiple of this keep their routes."""
_log = logging.getLogger(__name__)


class StepTraces:
    """Writes the routes of steps into a run folder, and removes those of older steps (`TraceSettings`)."""

    def __init__(self, run: Path, settings: TraceSettings, *, num_experts: int, layer_ids: Sequence[int]) -> None:
        self._run, self._settings = run, settings
        self.num_experts, self.layer_ids = num_experts, layer_ids
        self.written_bytes = 0
        """Of this rank's shards of the last step."""
        self._dropped = False

    def write(self, step: int, pieces: Iterable[RoutingTrace]) -> None:
        """Write this rank's routes of a step, if steps of this number are kept; collective.

        Where a rank cannot write, as on a full disk, the routes of the step are dropped, with a warning unless those
        before were too.

        pieces   none: this rank has no responses
        raises   TraceError where the engine reported illegal routes
        """
        self.written_bytes = 0
        if not is_kept(step, self._settings):
            for piece in pieces:
                piece.validate()
            return
        folder, problem, first = trace_folder(self._run, step), None, None
        writer = TraceWriter(folder, shard_prefix=f"rank-{dist.get_rank():03d}")
        for piece in pieces:
            first = first or piece.select([])
            try:
                writer.append(piece)
            except (OSError, SafetensorError) as error:  # pieces that follow are still validated
                problem = problem or getattr(error, "strerror", None) or str(error)
        self.written_bytes = sum(entry.size for entry in writer.shards)
        wait_for_ranks()
        gathered_R = gather_json({"shards": [entry.model_dump() for entry in writer.shards], "problem": problem})
        if dist.get_rank() != 0:
            return
        problems = [f"rank {rank}: {one['problem']}" for rank, one in enumerate(gathered_R) if one["problem"]]
        if not problems:
            assert first is not None, "rank 0 has the first response of every step"
            entries = [ShardEntry(**entry) for one in gathered_R for entry in one["shards"]]
            try:
                write_index(folder, index_of(first, entries))
            except OSError as error:
                problems = [f"rank 0: {error.strerror}"]
        if problems:
            shutil.rmtree(folder, ignore_errors=True)
        if problems and not self._dropped:
            _log.warning(
                f"cannot write the routes of a step to {folder} ({problems[0]}): training continues without them until "
                "there is room; trace.keep=0 writes none"
            )
        self._dropped = bool(problems)

    def remove_old(self, latest: int) -> None:
        """Remove routes that are no longer kept after step `latest`; rank 0 removes.

        Called once that step's metrics are written, so that a killed run has the routes of its last finished steps.
        """
        if dist.get_rank() != 0:
            return
        for number, old in step_folders(self._run / "traces"):
            if number < latest and not is_kept(number, self._settings, latest=latest):
                shutil.rmtree(old, ignore_errors=True)

    def write_plan(self, step: int, plan: StepPlan | None, demand: ScheduledDemand | None) -> None:
        """Write the plan of a step and its demand beside its routes, where these are kept, for `relibra explain`."""
        folder = trace_folder(self._run, step)
        if dist.get_rank() != 0 or plan is None or demand is None or not folder.is_dir():
            return
        try:
            write_demand(folder / "plan.demand.safetensors", demand)
            write_plan(folder / "plan.safetensors", plan)
        except OSError as error:
            _log.warning("cannot write the plan of a step to %s (%s): training continues", folder, error.strerror)


def record_routes(step: int, responses: Sequence[Response], traces: StepTraces) -> list[Response]:
    """Validate and write the routes of all ranks' responses of a step whose engine records routes; collective.

    returns   the responses, with routes of the narrowest type
    raises    TraceError where the engine reported illegal routes
    """
    source, num_experts, layer_ids = f"rollout of step {step}", traces.num_experts, traces.layer_ids
    runs = cut_into_runs([len(response.tokens_n) for response in responses], SHARD_ROWS)
    parts = ([responses[s] for s in run] for run in runs)
    traces.write(step, (trace_of(part, num_experts=num_experts, layer_ids=layer_ids, source=source) for part in parts))
    dtype = expert_dtype(num_experts)
    return [replace(one, experts_mLK=routes_of(one).astype(dtype, copy=False)) for one in responses]


def is_kept(step: int, settings: TraceSettings, latest: int | None = None) -> bool:
    """Return whether the routes of a step are on disk after step `latest`; None: after the step itself.

    >>> [step for step in range(104) if is_kept(step, TraceSettings(keep=2), latest=103)]
    [0, 50, 100, 102, 103]
    """
    recent = (step if latest is None else latest) - step < settings.keep
    return recent or (settings.keep > 0 and step % KEPT_EVERY == 0)


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
    """Return the routes of a response, checked: copying them unchecked would cast and broadcast what does not fit."""
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
