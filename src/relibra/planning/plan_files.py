"""Plan files: a `StepPlan` in one `.safetensors` file, with the digest that ranks compare before execution."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy import ndarray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from relibra.cluster import Dispatch
from relibra.errors import PlanError
from relibra.planning.placement import Considered, Scope
from relibra.planning.plan import FORMAT_VERSION, StepPlan
from relibra.routing.array_sizes import check_model_size
from relibra.routing.tensor_files import TensorFormat, check_arrays, read_tensors, write_tensors

FORMAT = TensorFormat(
    name="relibra.step-plan",
    version=FORMAT_VERSION,
    older=frozenset({2}),
    noun="a step plan",
    axes={
        "layer_ids": "L",
        "micro_batch_S": "S",
        "rank_S": "S",
        "physical_to_logical_map": "LE",
        "previous_map": "LE",
        "replica_MLRB": "MLRB",
        "quota_MLRB": "MLRB",
        "bound_ML": "ML",
        "group_M": "M",
    },
    dtypes={
        "layer_ids": np.int32,
        "micro_batch_S": np.int32,
        "rank_S": np.int32,
        "physical_to_logical_map": np.int16,
        "previous_map": np.int16,
        "replica_MLRB": np.int16,
        "quota_MLRB": np.int32,
        "bound_ML": np.int64,
        "group_M": np.int32,
    },
    optional=frozenset({"group_M"}),
    may_be_0="SMB",
    error=PlanError,
)

_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=1, le=1 << 16)]


class _Facts(BaseModel):
    """Fields of a plan other than arrays."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    balancer: str
    num_nodes: _Count
    ranks_per_node: _Count
    resident: bool
    scope: Scope
    dispatch: Dispatch = "flat"
    predicted: dict[str, _Seconds]
    plan_seconds: _Seconds
    assumed_model: str = ""
    considered: tuple[Considered, ...] = ()
    demand_digest: str
    digest: str


def write_plan(path: Path | str, plan: StepPlan) -> None:
    """Write a plan.

    raises    PlanError for values out of range
    """
    facts = {name: getattr(plan, name) for name in _Facts.model_fields if name not in ("digest", "predicted")}
    arrays = {name: array for name in FORMAT.axes if (array := getattr(plan, name)) is not None}
    check_arrays(FORMAT, arrays)
    checked = _check_facts(f"plan of {plan.balancer!r}", {**facts, "predicted": dict(plan.predicted), "digest": ""})
    _check_values(f"plan of {plan.balancer!r}", plan)
    write_tensors(Path(path), FORMAT, arrays, {**checked.model_dump(), "digest": plan.digest()})


def read_plan(path: Path | str) -> StepPlan:
    """Read a plan written by `write_plan`; `validate_plan` checks it against a machine and a load.

    raises    PlanError when the file is missing, of another format or version, damaged, or has values out of range
    """
    arrays, body = read_tensors(Path(path), FORMAT)
    resident_slots = body.get("resident_slots")
    if resident_slots is not None:
        body = _from_version_2(str(path), body, arrays["replica_MLRB"].shape[-1])
    facts = _check_facts(str(path), body)
    plan = StepPlan(**arrays, **facts.model_dump(exclude={"digest"}))
    _check_values(str(path), plan)
    digest = plan.digest()
    if resident_slots is not None:
        digest = plan.digest_under(2, plan.num_nodes, plan.ranks_per_node, resident_slots, plan.scope)
    if digest != facts.digest:
        raise PlanError(f"{path} is damaged: its digest is {digest[:12]}, recorded is {facts.digest[:12]!r}")
    return plan


def _from_version_2(where: str, body: dict[str, Any], slots: int) -> dict[str, Any]:
    """Return the facts of a version-2 file as those of today.

    raises    PlanError for slots of two lifetimes, and for static rows
    """
    resident_slots, static_rows = body["resident_slots"], body.get("static_rows", False)
    if resident_slots not in (0, slots) or static_rows is not False:
        what = "static rows" if static_rows else f"{resident_slots} resident slots of {slots}"
        raise PlanError(f"{where} has {what}, and all slots of a plan now have one lifetime: plan the step again")
    gone = ("resident_slots", "static_rows", "objective", "cut_short")
    facts = {name: value for name, value in body.items() if name not in gone}
    return {**facts, "resident": resident_slots > 0}


def _check_facts(where: str, body: dict[str, object]) -> _Facts:
    try:
        return _Facts.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        raise PlanError(f"{where}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def _check_values(where: str, plan: StepPlan) -> None:
    """Raise PlanError for indices out of range; the load is not checked."""
    M, _, R, _ = plan.replica_MLRB.shape
    E = plan.num_experts
    check_model_size(f"{where}: it", len(plan.layer_ids), E, PlanError)
    if plan.num_ranks != R or E % R:
        raise PlanError(
            f"{where}: {plan.num_nodes} nodes x {plan.ranks_per_node} ranks do not fit its {R} ranks and {E} experts: "
            "the numbers of ranks must be equal, and each rank is home of equally many experts"
        )
    fed_S = plan.rank_S[plan.micro_batch_S >= 0]
    _check_range(where, "micro_batch_S", plan.micro_batch_S, -1, M - 1)
    _check_range(where, "rank_S of samples that run", fed_S, 0, R - 1)
    _check_range(where, "layer_ids", plan.layer_ids, 0, np.iinfo(np.int32).max)
    _check_range(where, "replica_MLRB", plan.replica_MLRB, -1, E - 1)
    _check_range(where, "quota_MLRB", plan.quota_MLRB, 0, np.iinfo(np.int32).max)
    _check_range(where, "bound_ML", plan.bound_ML, 0, np.iinfo(np.int64).max)
    if plan.group_M is not None and (np.diff(plan.group_M, prepend=0) < 0).any():
        raise PlanError(f"{where}: groups {plan.group_M.tolist()} of micro-batches must not fall, from 0")
    _check_range(where, "quota_MLRB of empty slots", plan.quota_MLRB[plan.replica_MLRB < 0], 0, 0)
    if (np.diff(plan.layer_ids) <= 0).any():
        raise PlanError(f"{where}: layer ids {plan.layer_ids.tolist()} must rise")
    for name in ("physical_to_logical_map", "previous_map"):
        wrong = np.flatnonzero((np.sort(getattr(plan, name), axis=1) != np.arange(E)).any(axis=1))
        if len(wrong):
            raise PlanError(
                f"{where}: {name} of layer {plan.layer_ids[wrong[0]]} must hold each of the {E} experts exactly once"
            )


def _check_range(where: str, name: str, array: ndarray, low: int, high: int) -> None:
    if array.size and (array.min() < low or array.max() > high):
        raise PlanError(f"{where}: {name} holds {array.min()}..{array.max()}: allowed are {low}..{high}")
