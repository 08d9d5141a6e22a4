"""Steps to simulate: random legal plans with a model that fits them, and machines with round figures."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from relibra.cluster import Cluster, Link
from relibra.planning.costs.expert_shape import ExpertShape
from relibra.simulation import ModelShape
from tests.planning.plans import planned_step


def machine(plan, **changes) -> Cluster:
    """A machine whose costs matter about equally much for the tiny model."""
    values = {
        "name": "made up",
        "num_nodes": plan.num_nodes,
        "ranks_per_node": plan.ranks_per_node,
        "intra": Link(latency_seconds=0.5, bytes_per_second=10),
        "inter_send": Link(latency_seconds=1, bytes_per_second=4),
        "inter_receive": Link(latency_seconds=0.25, bytes_per_second=3),
        "host": Link(latency_seconds=0.125, bytes_per_second=5),
        "memory_bytes": 10**9,
        "memory_bytes_per_second": 1000.0,
        "layer_seconds": 0.75,
        "solve_seconds": 2.0,
        "peak_flops_per_second": 720.0,
        "efficiency": 0.5,
        "source": "made up",
        "label": "model",
    }
    return Cluster(**{**values, **changes})


FREE = Link(latency_seconds=0, bytes_per_second=1e24)


def free_links(plan, **changes) -> Cluster:
    return machine(plan, intra=FREE, inter_send=FREE, inter_receive=FREE, host=FREE, layer_seconds=0.0, **changes)


def tiny_model(plan, **changes) -> ModelShape:
    values = {
        "name": "tiny",
        "moe_layers": len(plan.layer_ids),
        "hidden": 2,
        "query_heads": 2,
        "kv_heads": 1,
        "head_dim": 2,
        "experts": plan.num_experts,
        "top_k": 1,
        "expert": ExpertShape(hidden=2, width=5),
        "vocabulary": 7,
    }
    return ModelShape(**{**values, **changes})


def random_step(seed, **sizes):
    """Return (plan, scheduled demand, machine, model) with replicas, empty ranks and zero loads."""
    rng = np.random.default_rng(seed)
    sizes = {
        "nodes": int(rng.integers(1, 3)),
        "per_node": int(rng.choice([1, 2, 3])),
        "experts_per_rank": int(rng.integers(1, 3)),
        "micro_batches": int(rng.integers(1, 4)),
        "layers": int(rng.integers(1, 4)),
        "slots": int(rng.integers(0, 3)),
        "resident": bool(rng.random() < 0.3),
    } | sizes
    plan, demand = planned_step(rng, **sizes)
    table = ((2, 100.0), (8, 300.0)) if rng.random() < 0.5 else ()
    dense = {"dense_layers": 2, "dense_width": 3, "shared_width": 1} if rng.random() < 0.5 else {}
    return plan, demand, machine(plan, gemm_table=table), tiny_model(plan, **dense)


def without_idle_replicas(plan):
    """Replicas without tokens are copied all the same by the cost model; the executor leaves them out."""
    return replace(plan, replica_MLRB=np.where(plan.quota_MLRB > 0, plan.replica_MLRB, -1).astype(np.int16))
