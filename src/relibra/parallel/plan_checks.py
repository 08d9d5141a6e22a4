"""What is checked before a plan is executed: that ranks agree, that the plan is legal, and that it fits the model."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
import torch.distributed as dist

from relibra.cluster import cluster_preset
from relibra.errors import EngineError, PlanError
from relibra.parallel.balanced import BalancedEP
from relibra.parallel.exchange import Place, waiting
from relibra.planning.plan import StepPlan
from relibra.routing.demand import Demand


def disagreement(
    plan: StepPlan,
    demand: Demand,
    layers: list[BalancedEP],
    sums: str,
    group: dist.ProcessGroup,
    device: torch.device,
) -> str | None:
    """Compare what ranks are about to do: if they did different things they would wait for each other; collective."""
    assert demand.tokens_MLRE is not None, "plan.scheduled gives a schedule"
    digest = hashlib.sha256(f"{sums} {plan.digest()}".encode() + np.ascontiguousarray(demand.tokens_MLRE).tobytes())
    for layer in layers:
        digest.update(layer.physical_to_logical_E.astype("<i8").tobytes())
    own = torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8).to(device)
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    with waiting("the agreement on the plan", Place(dist.get_rank(group), -1, -1), range(len(everyone))):
        dist.all_gather(everyone, own, group=group)
    differing = [rank for rank, other in enumerate(everyone) if not torch.equal(other, everyone[0])]
    if not differing:
        return None
    return (
        f"ranks {differing} hold another plan, demand, homes or mode of sums than rank 0: make the plan on one rank "
        "and send it to the others, or plan with the same demand and version everywhere and without a deadline"
    )


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
