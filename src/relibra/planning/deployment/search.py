"""Search for the deployment of most tokens per price, watt or GPU (MegaScale-Infer, arXiv 2504.02263, Algorithm 1).

It uses `pipeline_time`, not Eq. 5, so that one or two micro-batches and slow links are priced too, and any number
of experts on a node. A larger micro-batch never gives fewer tokens per second here, because every time is a maximum of
lines `a + b rows` with `a >= 0` (measured ones nearly), so the largest one that memory and latency allow is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from jaxtyping import Float64, Int64
from numpy import ndarray

from relibra.errors import ConfigError
from relibra.planning.deployment.accelerator import NODE_SIZES, Accelerator
from relibra.planning.deployment.deployment_plan import DeploymentPlan, Objective, Pool, cache_rows, experts_fit
from relibra.planning.deployment.performance import Efficiency, Node, stage_seconds
from relibra.planning.deployment.pipeline_time import StageSeconds, drained_seconds, iteration_seconds
from relibra.planning.deployment.served_model import ServedModel
from relibra.planning.deployment.service_level import ServiceLevel

NODE_COUNTS = (*range(1, 9), 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128)
"""Numbers of attention nodes that are tried beside the balanced ones."""
ATTENTION_RANGE, EXPERT_RANGE = (256, 512), (512, 1024)
"""Rows between which the slopes of attention and expert times are taken (`k1`, `k3`)."""


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """What a search tries.

    micro_batches        numbers of micro-batches
    experts_per_node     experts of a node; empty: every divisor of the model's experts
    ways                 GPUs of a node
    node_counts          attention nodes besides `balanced_nodes` rounded down and up; empty: only those two
    most_gpus            of an instance; 0: any number
    objective            what is maximised: tokens per second / price, watts or GPUs
    """

    micro_batches: tuple[int, ...] = (1, 2, 3, 4)
    experts_per_node: tuple[int, ...] = ()
    ways: tuple[int, ...] = NODE_SIZES
    node_counts: tuple[int, ...] = NODE_COUNTS
    most_gpus: int = 0
    objective: Objective = "price"

    def per_node_of(self, experts: int) -> tuple[int, ...]:
        """Return the numbers of experts on a node that are tried."""
        return self.experts_per_node or tuple(one for one in range(1, experts + 1) if experts % one == 0)


PAPER_SPACE = SearchSpace(micro_batches=(3, 4), experts_per_node=(1,), node_counts=())
"""What Algorithm 1 of the paper tries."""


def search_pairs(
    model: ServedModel, level: ServiceLevel, gpus: Sequence[Accelerator], space: SearchSpace, efficiency: Efficiency
) -> list[DeploymentPlan]:
    """Return the best plan of every pair of accelerators that has one, best first; ties by names.

    raises    ConfigError without accelerators
    """
    if not gpus:
        raise ConfigError("no accelerators to choose from: name at least one")
    found = [search_pair(model, level, pair, space, efficiency) for pair in product(gpus, gpus)]
    plans = [plan for plan in found if plan is not None]
    return sorted(plans, key=lambda plan: (-value(plan, space.objective), _names(plan)))


def search_pair(
    model: ServedModel,
    level: ServiceLevel,
    pair: tuple[Accelerator, Accelerator],
    space: SearchSpace,
    efficiency: Efficiency,
) -> DeploymentPlan | None:
    """Return the best plan with attention on the first accelerator and experts on the second; None: none fits.

    raises    ConfigError for an empty space
    """
    if not space.micro_batches or not space.ways:
        raise ConfigError("the space of a search needs micro_batches and ways: give at least one of each")
    gpu, expert_gpu = pair
    plans = []
    for expert_ways, ways in product(_ways(space, expert_gpu), _ways(space, gpu)):
        for per_node in space.per_node_of(model.experts):
            experts = Pool(expert_gpu, expert_ways, -(-model.experts // per_node))
            if experts_fit(model, experts, per_node, efficiency):
                node = Pool(gpu, ways, 1).node(model, efficiency)
                plans.append(_best_filled(node, experts, per_node, level, space))
    found = [plan for plan in plans if plan is not None]
    return max(found, key=lambda plan: value(plan, space.objective), default=None)


def _best_filled(
    attention: Node, experts: Pool, per_node: int, level: ServiceLevel, space: SearchSpace
) -> DeploymentPlan | None:
    """Return the best plan over X pairs of (attention nodes, micro-batches), computed at once; None: none fits.

    per_node    experts of an expert node
    """
    model, efficiency, one_node = attention.model, attention.used, Pool(attention.gpu, attention.ways, 1)
    expert_node = experts.node(model, efficiency)
    balance = balanced_nodes(attention, expert_node, per_node, level)
    counts = sorted({max(1, int(balance)), max(1, int(np.ceil(balance))), *space.node_counts})
    if space.most_gpus:
        counts = [nodes for nodes in counts if one_node.gpus * nodes + experts.gpus <= space.most_gpus]
    shapes = list(product(counts, space.micro_batches))
    if not shapes:
        return None
    nodes_X, micro_X = np.array(shapes, dtype=np.int64).T
    most_X = np.array([cache_rows(model, level, one_node, m, efficiency) for _, m in shapes], dtype=np.int64)

    def stage_X(rows_X: Int64[ndarray, " X"]) -> StageSeconds:
        return stage_seconds(attention, expert_node, nodes_X, per_node, rows_X, level)

    def seconds_X(rows_X: Int64[ndarray, " X"]) -> Float64[ndarray, " X"]:
        return np.asarray(iteration_seconds(stage_X(rows_X), micro_X, model.layers))

    rows_X = _most_rows(seconds_X, most_X, level.seconds_per_token)
    pace = iteration_seconds if efficiency.measured else drained_seconds
    tokens_X = rows_X * micro_X * nodes_X / pace(stage_X(np.maximum(1, rows_X)), micro_X, model.layers)
    units_X = getattr(one_node, space.objective) * nodes_X + getattr(experts, space.objective)
    best = int(np.argmax(tokens_X / units_X))
    if not rows_X[best]:
        return None
    return DeploymentPlan(
        model=model, level=level, efficiency=efficiency, attention=replace(one_node, nodes=int(nodes_X[best])),
        experts=experts, experts_per_node=per_node, micro_batches=int(micro_X[best]), rows=int(rows_X[best]),
    )  # fmt: skip


def _most_rows(
    seconds: Callable[[Int64[ndarray, " X"]], Float64[ndarray, " X"]], most_X: Int64[ndarray, " X"], limit: float
) -> Int64[ndarray, " X"]:
    """Return the largest micro-batches, at most `most_X`, that take no longer than a limit, by bisection; 0: none."""
    low_X, high_X = np.zeros_like(most_X), most_X + 1
    while (high_X - low_X > 1).any():
        middle_X = np.maximum(1, (low_X + high_X) // 2)
        fits_X = (seconds(middle_X) <= limit) & (middle_X <= most_X)
        low_X, high_X = np.where(fits_X, np.maximum(low_X, middle_X), low_X), np.where(fits_X, high_X, middle_X)
    return low_X


def balanced_nodes(attention: Node, experts: Node, per_node: int, level: ServiceLevel) -> float:
    """Return the attention nodes at which both sides slow down equally with more rows: `k1 E / (k3 K skew)`."""
    model = attention.model
    low, high = ATTENTION_RANGE
    slope = (attention.attention(high, level.context) - attention.attention(low, level.context)) / (high - low)
    low, high = EXPERT_RANGE
    rise = experts.experts(high, per_node) - experts.experts(low, per_node)
    expert_slope = max(1e-12, rise / (high - low))  # measured seconds may stand still
    return float(slope * model.experts / (expert_slope * level.expert_skew * model.top_k))


def value(plan: DeploymentPlan, objective: Objective) -> float:
    """Return tokens per second / the objective of the plan."""
    return float(plan.tokens_per_second / getattr(plan, objective))


def _ways(space: SearchSpace, gpu: Accelerator) -> list[int]:
    return [ways for ways in space.ways if ways <= gpu.node_size]


def _names(plan: DeploymentPlan) -> tuple[str, str]:
    return plan.attention.accelerator.name, plan.experts.accelerator.name
