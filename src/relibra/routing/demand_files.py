"""Demand files: a `Demand` in one `.safetensors` file, with its schedule and pairs if it has them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from relibra.errors import TraceError
from relibra.routing.array_sizes import memory_errors
from relibra.routing.demand import Demand, ScheduledDemand
from relibra.routing.tensor_files import TensorFormat, check_arrays, read_tensors, write_tensors

_SCHEDULE = ("tokens_MLRE", "micro_batch_S", "rank_S")
FORMAT = TensorFormat(
    name="relibra.demand",
    version=1,
    noun="a demand",
    axes={"counts_SLE": "SLE", "layer_ids": "L", "sample_ids": "S", "tokens_MLRE": "MLRE", "micro_batch_S": "S",
          "rank_S": "S", "group_M": "M", "pairs_LEE": "LEE", "attended_S": "S", "piece_S": "S"},
    dtypes={"counts_SLE": np.int32, "layer_ids": np.int32, "sample_ids": np.int64, "tokens_MLRE": np.int32,
            "micro_batch_S": np.int32, "rank_S": np.int32, "group_M": np.int32, "pairs_LEE": np.int64,
            "attended_S": np.int64, "piece_S": np.int64},
    optional=frozenset({*_SCHEDULE, "group_M", "pairs_LEE", "attended_S", "piece_S"}),
    may_be_0="SM",
    error=TraceError,
)  # fmt: skip


def write_demand(path: Path | str, demand: Demand) -> None:
    """Write a demand; raises TraceError when it is not valid."""
    arrays = {name: array for name in FORMAT.axes if (array := getattr(demand, name, None)) is not None}
    arrays["layer_ids"] = demand.layer_ids.astype(np.int32)  # callers may hold ids in any integer type
    arrays["sample_ids"] = demand.sample_ids.astype(np.int64)
    check_arrays(FORMAT, arrays)
    _check(demand)
    write_tensors(Path(path), FORMAT, arrays, {"top_k": demand.top_k})


def read_demand(path: Path | str) -> Demand:
    """Read a demand written by `write_demand`; a `ScheduledDemand` if the file holds a schedule.

    raises    TraceError when the file is missing, of another format, damaged, or holds impossible counts
    """
    arrays, facts = read_tensors(Path(path), FORMAT)
    top_k = facts.get("top_k")
    if set(facts) != {"top_k"} or isinstance(top_k, bool) or not isinstance(top_k, int | None):
        raise TraceError(f"{path} is damaged: its only fact must be top_k, a whole number or null")
    present = [name for name in _SCHEDULE if name in arrays]
    if present and len(present) < len(_SCHEDULE):
        raise TraceError(f"{path}: demand holds only {', '.join(present)}: a schedule is {', '.join(_SCHEDULE)}")
    if not present:
        arrays.pop("group_M", None)  # without micro-batches there is nothing to group
    demand = ScheduledDemand(**arrays, top_k=top_k) if present else Demand(**arrays, top_k=top_k)
    try:
        with memory_errors("its check", TraceError):
            _check(demand)
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from error
    return demand


def read_scheduled_demand(path: Path | str) -> ScheduledDemand:
    """Read a demand that was written with its schedule; raises TraceError as `read_demand`, and without a schedule."""
    demand = read_demand(path)
    if not isinstance(demand, ScheduledDemand):
        raise TraceError(f"the demand in {path} has no schedule: write one that `Demand.with_schedule` returned")
    return demand


def _check(demand: Demand) -> None:
    """Check the demand, and that its ids, pairs and schedule agree."""
    demand.validate()
    if (demand.layer_ids[:1] < 0).any() or (np.diff(demand.layer_ids) <= 0).any():
        raise TraceError(f"demand has layer ids {demand.layer_ids}: they must rise from 0 or more")
    if demand.top_k is not None and not 1 <= demand.top_k <= demand.num_experts:
        raise TraceError(f"demand has top_k {demand.top_k}: allowed are 1 to its {demand.num_experts} experts")
    if demand.pairs_LEE is not None and (demand.pairs_LEE < 0).any():
        raise TraceError("demand holds negative co-routing pairs")
    if not isinstance(demand, ScheduledDemand):
        return
    M, _, R, _ = demand.tokens_MLRE.shape
    if (demand.micro_batch_S < -1).any() or (demand.micro_batch_S >= M).any():
        raise TraceError(f"demand has samples outside its {M} micro-batches: allowed are -1 (left out) to {M - 1}")
    rank_S = demand.rank_S[demand.micro_batch_S >= 0]
    if (rank_S < 0).any() or (rank_S >= R).any():
        raise TraceError(f"demand has samples fed from outside its {R} ranks: allowed are 0..{R - 1}")
    recounted = demand.with_schedule(demand.micro_batch_S, demand.rank_S, R, M)
    if not np.array_equal(recounted.tokens_MLRE, demand.tokens_MLRE):
        raise TraceError("demand has token-slots per rank that are not those of its samples under its schedule")
