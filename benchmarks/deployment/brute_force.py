"""Every plan of a space, tried one after the other: the slow reference of `search`, for small spaces."""

from __future__ import annotations

from relibra.planning.deployment.accelerator import Accelerator
from relibra.planning.deployment.deployment_plan import DeploymentPlan, Pool
from relibra.planning.deployment.performance import Efficiency
from relibra.planning.deployment.search import SearchSpace, balanced_nodes, value
from relibra.planning.deployment.served_model import BYTES, ServedModel
from relibra.planning.deployment.service_level import ServiceLevel


def brute_force(
    model: ServedModel,
    level: ServiceLevel,
    pair: tuple[Accelerator, Accelerator],
    space: SearchSpace,
    efficiency: Efficiency,
) -> DeploymentPlan | None:
    """Return the best of all plans with every number of requests that fits memory; None: none is fast enough."""
    best = None
    for plan in every_plan(model, level, pair, space, efficiency):
        if plan.iteration_seconds > level.seconds_per_token:
            continue
        if best is None or value(plan, space.objective) > value(best, space.objective):
            best = plan
    return best


def every_plan(
    model: ServedModel,
    level: ServiceLevel,
    pair: tuple[Accelerator, Accelerator],
    space: SearchSpace,
    efficiency: Efficiency,
) -> list[DeploymentPlan]:
    """Return every plan of a space that fits memory, fast enough or not."""
    gpu, expert_gpu = pair
    found = []
    for expert_ways in space.ways:
        for ways in space.ways:
            for per_node in space.per_node_of(model.experts):
                if expert_ways > expert_gpu.node_size or ways > gpu.node_size:
                    continue
                if (
                    2 * model.expert_values * per_node
                    >= efficiency.usable_memory * expert_gpu.memory_bytes * expert_ways
                ):
                    continue
                node, expert_node = Pool(gpu, ways, 1), Pool(expert_gpu, expert_ways, 1)
                sides = node.node(model, efficiency), expert_node.node(model, efficiency)
                balance = balanced_nodes(*sides, per_node, level)
                for nodes in {max(1, int(balance)), max(1, -int(-balance // 1)), *space.node_counts}:
                    attention, experts = (
                        Pool(gpu, ways, nodes),
                        Pool(expert_gpu, expert_ways, -(-model.experts // per_node)),
                    )
                    if space.most_gpus and attention.gpus + experts.gpus > space.most_gpus:
                        continue
                    for micro_batches in space.micro_batches:
                        rows = 1
                        while _cached(model, level, ways, micro_batches, rows) <= _room(model, gpu, ways, efficiency):
                            found.append(
                                DeploymentPlan(
                                    model=model, level=level, efficiency=efficiency, attention=attention,
                                    experts=experts, experts_per_node=per_node, micro_batches=micro_batches, rows=rows,
                                )
                            )  # fmt: skip
                            rows += 1
    return found


def _room(model: ServedModel, gpu: Accelerator, ways: int, efficiency: Efficiency) -> float:
    """Return the bytes of one GPU beside its part of the attention weights."""
    return efficiency.usable_memory * gpu.memory_bytes - BYTES * model.attention_values / ways


def _cached(model: ServedModel, level: ServiceLevel, ways: int, micro_batches: int, rows: int) -> float:
    """Return the bytes of keys and values on one GPU."""
    return micro_batches * rows * model.cache_bytes(level.context) / min(ways, model.cache_ways)
