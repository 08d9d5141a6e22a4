"""Read the schedule of a trainer: which sample is in which micro-batch, on which rank, from arrays in an `.npz`.

micro_batch_S [S]            micro-batch of each sample, from 0; -1: the sample is left out
rank_S [S]                   rank that trains it
mini_batch_M [M]             optional: mini-batch of each micro-batch; samples never change their mini-batch
sample_ids [S]               optional: ids of the trace, in the order of the arrays; else the order of the trace
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from relibra.errors import TraceError
from relibra.routing.demand import Demand, ScheduledDemand
from relibra.routing.readers.npz_arrays import load_arrays
from relibra.routing.statistics import co_activation
from relibra.routing.trace import RoutingTrace

NAMES = ("micro_batch_S", "rank_S", "mini_batch_M", "sample_ids")


@dataclass(frozen=True, kw_only=True, eq=False)
class GivenSchedule:
    """Arrays of a schedule as they were read; `schedule_of` checks them against a trace."""

    path: Path
    micro_batch_S: Int64[ndarray, " S"]
    rank_S: Int64[ndarray, " S"]
    mini_batch_M: Int64[ndarray, " M"] | None = None
    sample_ids: Int64[ndarray, " S"] | None = None


def read_schedule(path: Path | str, *, required: bool = True) -> GivenSchedule | None:
    """Read the arrays of a schedule from an `.npz`; other arrays in it are ignored.

    required   False: `path` is a trace, which may hold a schedule in its own order; returns None where it holds none
    raises     TraceError for a file that cannot be read, or a missing or impossible array
    """
    path = Path(path)
    if path.suffix != ".npz" or not path.is_file():
        if not required:
            return None
        raise TraceError(
            f"{path} {'is not a schedule' if path.exists() else 'does not exist'}: expected an .npz with micro_batch_S "
            "and rank_S"
        )
    arrays = load_arrays(path, NAMES if required else NAMES[:3])
    if not required and not {"micro_batch_S", "rank_S"} & set(arrays):
        return None
    if missing := [name for name in NAMES[:2] if name not in arrays]:
        raise TraceError(f"{path} has no array {missing[0]}: a schedule needs micro_batch_S and rank_S")
    for name, array in arrays.items():
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise TraceError(f"{path}: {name} is {array.dtype} {array.shape}: expected a vector of whole numbers")
        if array.size and not -1 <= array.min() <= array.max() < 1 << 31 and name != "sample_ids":
            raise TraceError(f"{path}: {name} holds {array.min()}..{array.max()}: allowed are -1 to 2^31 - 1")
    per_sample = [name for name in ("micro_batch_S", "rank_S", "sample_ids") if name in arrays]
    if len({len(arrays[name]) for name in per_sample}) > 1:
        counts = ", ".join(f"{name} has {len(arrays[name])}" for name in per_sample)
        raise TraceError(f"{path}: {counts} entries: give one of each per sample")
    return GivenSchedule(path=path, **{name: array.astype(np.int64) for name, array in arrays.items()})


def schedule_of(
    trace: RoutingTrace, given: GivenSchedule, num_ranks: int, rank_tokens: int | None = None
) -> ScheduledDemand:
    """Return the demand of a trace under a given schedule.

    rank_tokens   most tokens of a rank in a micro-batch; a sample alone there may be longer; None: no limit
    raises        TraceError when the schedule does not fit the trace, the ranks or the limit
    """
    path, micro_batch_S, rank_S = given.path, given.micro_batch_S, given.rank_S
    if len(micro_batch_S) != trace.num_samples:
        raise TraceError(
            f"{path}: micro_batch_S has {len(micro_batch_S)} entries for {trace.num_samples} samples of the trace: "
            "give one for each, micro-batch -1 for samples that are left out"
        )
    if given.sample_ids is not None:
        order = _order_of(path, trace.sample_ids.tolist(), given.sample_ids.tolist())
        micro_batch_S, rank_S = micro_batch_S[order], rank_S[order]
    used = micro_batch_S >= 0
    if not used.any():
        raise TraceError(f"{path}: micro_batch_S is -1 everywhere: no sample is left to plan")
    if rank_S[used].min() < 0 or rank_S[used].max() >= num_ranks:
        raise TraceError(
            f"{path}: rank_S holds {rank_S[used].min()}..{rank_S[used].max()}: with {num_ranks} ranks allowed are 0 to "
            f"{num_ranks - 1}"
        )
    mini_batch_M, named = given.mini_batch_M, np.unique(micro_batch_S[used])
    M = int(named[-1]) + 1 if mini_batch_M is None else len(mini_batch_M)
    if named[-1] >= M:
        raise TraceError(f"{path}: micro_batch_S names micro-batch {named[-1]}: mini_batch_M has only {M}")
    if len(named) < M:  # M may be large: an array of all numbers would be as large
        empty = int(np.argmax(np.append(named != np.arange(len(named)), True)))
        raise TraceError(f"{path}: micro-batch {empty} has no samples: number micro-batches from 0, without gaps")
    demand = replace(Demand.from_trace(trace), pairs_LEE=co_activation(trace))
    scheduled = demand.with_schedule(micro_batch_S, rank_S, num_ranks, M)
    if mini_batch_M is not None:
        if mini_batch_M[0] != 0 or not np.isin(np.diff(mini_batch_M), (0, 1)).all():
            shown = f"[{', '.join(map(str, mini_batch_M[:8]))}{', ...' if M > 8 else ''}]"
            raise TraceError(f"{path}: mini_batch_M is {shown}: it must rise from 0 without gaps")
        scheduled = replace(scheduled, group_M=mini_batch_M.astype(np.int32))
    if rank_tokens is not None:
        _check_limit(path, scheduled, rank_tokens)
    return scheduled


def _order_of(path: Path, samples: Sequence[int], given: Sequence[int]) -> list[int]:
    """Return, for each sample of a trace, its place in the given order."""
    place = {sample: place for place, sample in enumerate(given)}
    if len(place) < len(samples) or len(set(samples)) < len(samples):
        raise TraceError(f"{path}: sample_ids names a sample twice: name each sample of the trace once")
    missing = [sample for sample in samples if sample not in place]
    if missing:
        raise TraceError(f"{path}: sample_ids lacks sample {missing[0]} of the trace")
    return [place[sample] for sample in samples]


def _check_limit(path: Path, demand: ScheduledDemand, rank_tokens: int) -> None:
    """Raise TraceError for a rank with several samples and more tokens than the limit."""
    tokens_MR = demand.sum_per_rank(demand.length_S)
    samples_MR = demand.sum_per_rank((demand.length_S > 0).astype(np.int64))
    over = np.argwhere((tokens_MR > rank_tokens) & (samples_MR > 1))
    if len(over):
        m, rank = over[0]
        raise TraceError(
            f"{path}: rank {rank} has {tokens_MR[m, rank]:,.0f} tokens in micro-batch {m}, above the limit of "
            f"{rank_tokens:,} per rank: choose a larger --micro-batch-tokens, or leave it out"
        )
