"""What is checked before a plan is executed: that ranks agree, that the plan is legal, and that it fits the model."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
import torch.distributed as dist

from relibra.cluster import cluster_preset
from relibra.errors import EngineError, PlanError
from relibra.parallel.balanced import BalancedEP
from relibra.parallel.rows.exchange import gathered
from relibra.parallel.rows.rank_tables import Place
from relibra.planning.plan import StepPlan
from relibra.routing.demand import Demand


def disagreement(
    plan: StepPlan,
    demand: Demand | PlanError,
    layers: list[BalancedEP],
    modes: str,
    group: dist.ProcessGroup,
    device: torch.device,
) -> str | None:
    """Compare what ranks are about to do, and say why they cannot follow a plan together; collective.

    demand   under the schedule of the plan, or why this rank cannot have it
    modes    what else has to be the same: sums, pool
    raises   EngineError on all ranks where running at home would not help: other homes, other modes
    """
    homes = np.stack([layer.physical_to_logical_E for layer in layers]).astype("<i8").tobytes()
    usable = not isinstance(demand, PlanError)
    tokens = b"" if isinstance(demand, PlanError) else np.ascontiguousarray(demand.tokens_MLRE).tobytes()
    parts = [hashlib.sha256(part).digest() for part in (homes, modes.encode(), plan.digest().encode() + tokens)]
    own = torch.frombuffer(bytearray(bytes([usable]) + b"".join(parts)), dtype=torch.uint8).to(device)
    everyone = gathered(own, group, "the agreement on the plan", Place(dist.get_rank(group), -1, -1))
    told_R = [bytes(other.tolist()) for other in everyone]

    def differing(part: slice) -> list[int]:
        return [rank for rank, told in enumerate(told_R) if told[part] != told_R[0][part]]

    if ranks := differing(slice(1, 33)):
        raise EngineError(
            f"ranks {ranks} have experts at other homes than rank 0, so weights are mixed up: relocate on all ranks "
            "alike, and resume from the last checkpoint"
        )
    if ranks := differing(slice(33, 65)):
        raise EngineError(
            f"ranks {ranks} execute with other sums than rank 0, or with a pool where it has none or the reverse: pass "
            "the same to execute_plan on all ranks"
        )
    if unusable := [rank for rank, told in enumerate(told_R) if not told[0]]:
        own_reason = f" ({demand})" if isinstance(demand, PlanError) else ""
        return f"ranks {unusable} hold a demand that the plan was not made for{own_reason}"
    if ranks := differing(slice(65, None)):
        return (
            f"ranks {ranks} hold another plan or demand than rank 0: make the plan on one rank and send it to the "
            "others, or plan with the same demand and version everywhere and without a deadline"
        )
    return None


def broken_rule(plan: StepPlan, demand: Demand) -> str | None:
    """Say which rule the plan breaks; None: it is legal."""
    try:
        plan.validate(cluster_preset("h100x8", plan.num_ranks, plan.ranks_per_node), demand)  # only its shape counts
    except PlanError as error:
        return str(error)
    return None


def check_fit(plan: StepPlan, layers: dict[int, BalancedEP]) -> None:
    """Hold layers, ranks, experts and homes of the plan against those of the model; all ranks see the same."""
    first = next(iter(layers.values()))
    num_ranks, per_rank = first.ep_mesh.size(), first.num_local_experts
    for what, ours, theirs in (
        ("layers", plan.layer_ids.tolist(), list(layers)),
        ("ranks", plan.num_ranks, num_ranks),
        ("experts", plan.num_experts, num_ranks * per_rank),
    ):
        if ours != theirs:
            raise EngineError(f"the plan is for {what} {ours}, the model has {theirs}: plan for this very model")
    homes_LE = np.stack([layer.physical_to_logical_E for layer in layers.values()])
    elsewhere_L = (plan.physical_to_logical_map != homes_LE).any(axis=1)
    if elsewhere_L.any():
        raise EngineError(
            f"the plan has other homes than the model in layers {plan.layer_ids[elsewhere_L].tolist()}: call "
            "relocate(model, plan.physical_to_logical_map, optimizer) first, or plan with Budget(move_homes=False)"
        )
