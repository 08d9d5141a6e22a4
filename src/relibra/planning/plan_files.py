"""Plan files: a `StepPlan` in one `.safetensors` file, with the digest that ranks compare before execution."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
from numpy import ndarray
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from relibra.cluster import Dispatch
from relibra.errors import PlanError
from relibra.planning.costs.expert_shape import GradientWire
from relibra.planning.placement import Considered, ConsideredLayers, Scope
from relibra.planning.plan import FORMAT_VERSION, StepPlan
from relibra.routing.array_sizes import check_model_size
from relibra.routing.tensor_files import TensorFormat, check_arrays, read_tensors, write_tensors

_ARRAYS: dict[str, tuple[str, type[np.generic]]] = {
    "layer_ids": ("L", np.int32),
    "micro_batch_S": ("S", np.int32),
    "rank_S": ("S", np.int32),
    "physical_to_logical_map": ("LE", np.int16),
    "previous_map": ("LE", np.int16),
    "replica_MLRB": ("MLRB", np.int16),
    "quota_MLRB": ("MLRB", np.int32),
    "bound_ML": ("ML", np.int64),
    "group_M": ("M", np.int32),
}
FORMAT = TensorFormat(
    name="relibra.step-plan",
    version=FORMAT_VERSION,
    older=frozenset({2}),
    noun="a step plan",
    axes={name: axes for name, (axes, _) in _ARRAYS.items()},
    dtypes={name: dtype for name, (_, dtype) in _ARRAYS.items()},
    optional=frozenset({"group_M"}),
    may_be_0="SMB",
    error=PlanError,
)

T = TypeVar("T")

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
    gradient_wire: GradientWire
    predicted: dict[str, _Seconds]
    plan_seconds: _Seconds
    assumed_model: str = ""
    considered: list[dict[str, Any]] = []
    considered_layers: list[dict[str, Any]] = []
    demand_digest: str
    digest: str


_CONSIDERED: dict[str, TypeAdapter[Any]] = {
    "considered": TypeAdapter(tuple[Considered, ...]),
    "considered_layers": TypeAdapter(tuple[ConsideredLayers, ...]),
}


def write_plan(path: Path | str, plan: StepPlan) -> None:
    """Write a plan.

    raises    PlanError for values out of range
    """
    arrays, facts = plan_to_tensors(plan)
    write_tensors(Path(path), FORMAT, arrays, facts)


def plan_to_tensors(plan: StepPlan) -> tuple[dict[str, ndarray], dict[str, Any]]:
    """Return the arrays of a plan, and its other fields as JSON values; raises PlanError for values out of range."""
    where = f"plan of {plan.balancer!r}"
    names = (name for name in _Facts.model_fields if name not in ("digest", "predicted", *_CONSIDERED))
    facts = {name: getattr(plan, name) for name in names}
    arrays = {name: array for name in FORMAT.axes if (array := getattr(plan, name)) is not None}
    check_arrays(FORMAT, arrays)
    facts |= {name: [asdict(choice) for choice in getattr(plan, name)] for name in _CONSIDERED}
    facts |= {"predicted": dict(plan.predicted), "digest": plan.digest()}
    _check_values(where, plan)
    return arrays, _check(where, _Facts.model_validate, facts).model_dump(mode="json")


def plan_from_tensors(where: str, arrays: dict[str, ndarray], facts: dict[str, Any]) -> StepPlan:
    """Return the plan of arrays and facts; raises PlanError when they do not belong together or are out of range."""
    resident_slots = facts.get("resident_slots")  # of version 2 only
    facts_now = facts if resident_slots is None else _from_version_2(where, facts, arrays)
    checked = _check(where, _Facts.model_validate, facts_now)
    fields: dict[str, Any] = {**arrays, **checked.model_dump(exclude={"digest", *_CONSIDERED})}
    fields |= {name: _check(where, kind.validate_python, facts.get(name, [])) for name, kind in _CONSIDERED.items()}
    plan = StepPlan(**fields)
    _check_values(where, plan)
    digest = plan.digest()
    if resident_slots is not None:
        digest = plan.digest_under(2, plan.num_nodes, plan.ranks_per_node, resident_slots, plan.scope)
    if digest != checked.digest:
        raise PlanError(f"{where} is damaged: its digest is {digest[:12]}, recorded is {checked.digest[:12]!r}")
    return plan


def read_plan(path: Path | str) -> StepPlan:
    """Read a plan written by `write_plan`; `validate_plan` checks it against a machine and a load.

    raises    PlanError when the file is missing, of another format or version, damaged, or has values out of range
    """
    return plan_from_tensors(str(path), *read_tensors(Path(path), FORMAT))


def _from_version_2(where: str, body: dict[str, Any], arrays: dict[str, ndarray]) -> dict[str, Any]:
    """Return the facts of a version-2 file as those of today.

    raises    PlanError for slots of two lifetimes, and for static rows
    """
    slots = arrays["replica_MLRB"].shape[-1]
    resident_slots, static_rows = body["resident_slots"], body.get("static_rows", False)
    if resident_slots not in (0, slots) or static_rows is not False:
        what = "static rows" if static_rows else f"{resident_slots} resident slots of {slots} (two lifetimes)"
        raise PlanError(f"{where} has {what}, which plans no longer have: plan the step again")
    gone = ("resident_slots", "static_rows", "objective", "cut_short")
    facts = {name: value for name, value in body.items() if name not in gone}
    return {**facts, "resident": resident_slots > 0, "gradient_wire": "float32" if resident_slots else "model"}


def _check(where: str, validate: Callable[[Any], T], value: Any) -> T:
    """Return the validated value; raises PlanError with the first mistake."""
    try:
        return validate(value)
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
        raise PlanError(f"{where}: groups {plan.group_M.tolist()} of micro-batches must be 0 or more and never fall")
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
