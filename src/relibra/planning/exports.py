"""Files for others: the decisions of a plan for a trainer, and its homes and replicas as slot maps for serving engines.

A trainer's file has everything (`write_trainer_npz`). An engine's file holds one placement for the whole step, and the
engine shares tokens over copies by its own rule, so quotas and replicas per micro-batch are lost; `physical_maps` says
which replicas are kept. Engines have no empty slots: in files they are filled (`filled_map`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from relibra.errors import PlanError
from relibra.files import atomic_path, write_text
from relibra.planning.plan import StepPlan
from relibra.routing.demand import Demand

MAX_MAP_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True, eq=False)
class PhysicalMaps:
    """Locations of experts, in the three arrays of vLLM, SGLang and DeepSeek's EPLB.

    physical_to_logical_map   expert in each slot, -1: empty; slot p is on rank p // (P / R)
    logical_to_physical_map   slots of each expert, its home first, then by slot; padded with -1
    logical_replica_count     copies of each expert, its home included
    """

    physical_to_logical_map: Int64[ndarray, "L P"]
    logical_to_physical_map: Int64[ndarray, "L E X"]
    logical_replica_count: Int64[ndarray, "L E"]


def physical_maps(plan: StepPlan, micro_batch: int | None = None) -> PhysicalMaps:
    """Return homes and replicas in P = R x (E / R + B) slots: on each rank its homes, then its spare slots.

    micro_batch   whose replicas are returned. None: for each layer and rank the B experts whose replicas there compute
                  most token-slots over the step (ties: lower id), largest first
    raises        PlanError for an unknown micro-batch
    """
    M, L, R, _ = plan.replica_MLRB.shape
    if micro_batch is None:
        replica_LRB = _step_replicas(plan)
    elif 0 <= micro_batch < M:
        replica_LRB = plan.replica_MLRB[micro_batch].astype(np.int64)
    else:
        raise PlanError(f"micro-batch {micro_batch} is not in the plan: allowed are 0..{M - 1}, or None for the step")
    home_LRP = plan.physical_to_logical_map.reshape(L, R, -1).astype(np.int64)
    return _with_inverse(np.concatenate([home_LRP, replica_LRB], axis=2).reshape(L, -1), plan)


def _step_replicas(plan: StepPlan) -> Int64[ndarray, "L R B"]:
    _, L, R, B = plan.replica_MLRB.shape
    m_X, layer_X, rank_X, slot_X = np.nonzero(plan.replica_MLRB >= 0)
    expert_X = plan.replica_MLRB[m_X, layer_X, rank_X, slot_X]
    tokens_LRE = np.full((L, R, plan.num_experts), -1, dtype=np.int64)  # -1: never a replica here
    tokens_LRE[layer_X, rank_X, expert_X] = 0
    np.add.at(tokens_LRE, (layer_X, rank_X, expert_X), plan.quota_MLRB[m_X, layer_X, rank_X, slot_X])
    best_LRB = np.argsort(-tokens_LRE, axis=2, kind="stable")[:, :, :B]
    replica_LRB = np.full((L, R, B), -1, dtype=np.int64)
    found = best_LRB.shape[2]  # below B where a rank has more slots than there are experts
    replica_LRB[:, :, :found] = np.where(np.take_along_axis(tokens_LRE, best_LRB, axis=2) >= 0, best_LRB, -1)
    return replica_LRB


def _with_inverse(map_LP: Int64[ndarray, "L P"], plan: StepPlan) -> PhysicalMaps:
    """Add the two arrays by expert: its slots, and their number."""
    L, E = plan.physical_to_logical_map.shape
    P = map_LP.shape[1]
    layer_X, slot_X = np.nonzero(map_LP >= 0)
    expert_X = map_LP[layer_X, slot_X]
    is_spare_X = slot_X % (P // plan.num_ranks) >= E // plan.num_ranks
    order = np.lexsort((slot_X, is_spare_X, expert_X, layer_X))
    layer_X, slot_X, expert_X = layer_X[order], slot_X[order], expert_X[order]
    count_LE = np.zeros((L, E), dtype=np.int64)
    np.add.at(count_LE, (layer_X, expert_X), 1)
    first_LE = np.concatenate([[0], np.cumsum(count_LE.ravel())[:-1]]).reshape(L, E)
    slots_LEX = np.full((L, E, int(count_LE.max())), -1, dtype=np.int64)
    slots_LEX[layer_X, expert_X, np.arange(len(slot_X)) - first_LE[layer_X, expert_X]] = slot_X
    return PhysicalMaps(
        physical_to_logical_map=map_LP, logical_to_physical_map=slots_LEX, logical_replica_count=count_LE
    )


def filled_map(plan: StepPlan, demand: Demand, micro_batch: int | None = None) -> Int64[ndarray, "L P"]:
    """Return the slot map with an expert in every slot, as serving engines need it.

    An empty slot gets, of the experts that its rank lacks, the one with the highest load per copy (ties: lower id). If
    the rank lacks none, the slot gets a second copy of one and is wasted.

    demand       load of the experts (`counts_SLE`)
    micro_batch  see `physical_maps`
    raises       PlanError when demand and plan differ in layers or experts
    """
    maps = physical_maps(plan, micro_batch)
    load_LE = demand.counts_SLE.sum(axis=0, dtype=np.float64)
    if load_LE.shape != plan.physical_to_logical_map.shape:
        raise PlanError(
            f"plan of (layers, experts) {plan.physical_to_logical_map.shape} for a demand of {load_LE.shape}: "
            "pass the demand it was made for"
        )
    map_LP, copies_LE = maps.physical_to_logical_map.copy(), maps.logical_replica_count.copy()
    per_rank = map_LP.shape[1] // plan.num_ranks
    for layer, slot in np.argwhere(map_LP < 0):
        start = slot // per_rank * per_rank
        per_copy_E = load_LE[layer] / copies_LE[layer]
        held = map_LP[layer, start : start + per_rank]
        per_copy_E[held[held >= 0]] = -1
        expert = int(np.argmax(per_copy_E))
        map_LP[layer, slot] = expert
        copies_LE[layer, expert] += 1
    return map_LP


def write_trainer_npz(path: Path | str, plan: StepPlan, demand: Demand) -> None:
    """Write homes, schedule, replicas and quotas as an `.npz`; docs/plan-format.md describes the arrays.

    demand    that the plan was made for
    raises    PlanError when it was made for another one
    """
    M = len(plan.bound_ML)
    home_quota_MLE = plan.scheduled(demand).load_MLE.copy()
    m_X, layer_X, rank_X, slot_X = np.nonzero(plan.replica_MLRB >= 0)
    where_X = m_X, layer_X, plan.replica_MLRB[m_X, layer_X, rank_X, slot_X]
    np.subtract.at(home_quota_MLE, where_X, plan.quota_MLRB[m_X, layer_X, rank_X, slot_X])
    with atomic_path(Path(path)) as temporary, temporary.open("wb") as file:
        np.savez(
            file,
            sample_ids=np.asarray(demand.sample_ids),
            micro_batch_S=plan.micro_batch_S,
            rank_S=plan.rank_S,
            mini_batch_M=np.zeros(M, dtype=np.int32) if plan.group_M is None else plan.group_M,
            layer_ids=plan.layer_ids,
            home_LE=plan.home_LE,
            previous_home_LE=plan.previous.home_LE,
            replica_MLRB=plan.replica_MLRB,
            quota_MLRB=plan.quota_MLRB,
            home_quota_MLE=home_quota_MLE,
            resident=plan.resident,
            dispatch=plan.dispatch,
            digest=plan.digest(),
            demand_digest=plan.demand_digest,
        )


def write_sglang_json(
    path: Path | str,
    plan: StepPlan,
    demand: Demand,
    *,
    micro_batch: int | None = None,
    num_hidden_layers: int | None = None,
) -> None:
    """Write a file for SGLang's `--init-expert-location`; start it with `--ep-num-redundant-experts` = P - E.

    Its layer axis is all hidden layers: rows of layers without experts hold slot p -> expert p % E. Empty slots are
    filled (`filled_map`). Format: `ExpertLocationMetadata` of SGLang 0.5, a single key.

    num_hidden_layers   of the model; None: up to the plan's last layer
    raises              PlanError when the plan has layers beyond
    """
    map_LP = filled_map(plan, demand, micro_batch)
    layers = int(plan.layer_ids.max()) + 1 if num_hidden_layers is None else num_hidden_layers
    if layers <= plan.layer_ids.max():
        raise PlanError(f"a model of {layers} hidden layers has no layer {plan.layer_ids.max()} of the plan")
    rows = np.tile(np.arange(map_LP.shape[1]) % plan.num_experts, (layers, 1))
    rows[plan.layer_ids] = map_LP
    write_text(Path(path), json.dumps({"physical_to_logical_map": rows.tolist()}) + "\n")


def write_vllm_json(path: Path | str, plan: StepPlan, demand: Demand, *, micro_batch: int | None = None) -> None:
    """Write a file for relibra's plug-in of vLLM (RELIBRA_EPLB=FILE): expert of each slot, MoE layers only.

    Start the engine with `num_redundant_experts` = P - E. Empty slots are filled (`filled_map`).
    """
    map_LP = filled_map(plan, demand, micro_batch)
    write_text(Path(path), json.dumps({"physical_to_logical_map": map_LP.tolist()}) + "\n")


def read_vllm_json(path: Path) -> Int64[ndarray, "L P"]:
    """Read a file of `write_vllm_json`.

    raises    PlanError for another kind of file, or one whose layers lack an expert
    """
    try:
        if path.stat().st_size > MAX_MAP_BYTES:
            raise PlanError(f"{path} has {path.stat().st_size} bytes: a placement has at most {MAX_MAP_BYTES}")
        map_LP = np.array(json.loads(path.read_bytes())["physical_to_logical_map"])
    except OSError as error:
        raise PlanError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise PlanError(f"{path} is no placement for vLLM: write one by relibra plan --export vllm=FILE") from error
    if map_LP.ndim != 2 or map_LP.dtype.kind != "i" or not map_LP.size or map_LP.min() < 0:
        raise PlanError(f"{path} holds no table of expert ids by layer and slot: write it again by relibra plan")
    experts = int(map_LP.max()) + 1
    if experts > map_LP.shape[1] or any(len(np.unique(map_P)) != experts for map_P in map_LP):
        raise PlanError(f"{path}: some layer does not hold each of {experts} experts; write it again by relibra plan")
    return map_LP.astype(np.int64)


def write_vllm_ascend_json(path: Path | str, plan: StepPlan, demand: Demand, *, micro_batch: int | None = None) -> None:
    """Write a file for vllm-ascend's `expert_map_path`: per MoE layer (counted from 0) and device its experts.

    Empty slots are filled (`filled_map`).
    """
    R = plan.num_ranks
    experts_LRP = filled_map(plan, demand, micro_batch).reshape(len(plan.layer_ids), R, -1).tolist()
    layer_list = [
        {
            "layer_id": layer,
            "device_count": R,
            "device_list": [{"device_id": rank, "device_expert": experts} for rank, experts in enumerate(devices)],
        }
        for layer, devices in enumerate(experts_LRP)
    ]
    write_text(Path(path), json.dumps({"moe_layer_count": len(layer_list), "layer_list": layer_list}) + "\n")


def write_tensorrt_llm_yaml(
    path: Path | str, plan: StepPlan, demand: Demand, *, micro_batch: int | None = None
) -> None:
    """Write a file for TensorRT-LLM's `moe_config.load_balancer`: decoder layer -> expert per slot, never updated.

    Empty slots are filled (`filled_map`).
    """
    map_LP = filled_map(plan, demand, micro_batch)
    rows = [f"  {layer}: {experts}" for layer, experts in zip(plan.layer_ids.tolist(), map_LP.tolist(), strict=True)]
    lines = [f"num_slots: {map_LP.shape[1]}", "layer_updates_per_iter: 0", "initial_global_assignments:", *rows]
    write_text(Path(path), "\n".join(lines) + "\n")
