"""The same model without separation, under the same formulas: what a deployment plan has to beat.

"tensor"    GPUs of one node cut every matrix; stages of a pipeline where one node is too small
"expert"    attention is data-parallel, experts lie on the same GPUs, rows travel to them and back in every layer;
            two micro-batches hide the network behind computing, as wide expert parallelism does
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Literal

from relibra.planning.deployment.accelerator import NODE_SIZES, Accelerator
from relibra.planning.deployment.deployment_plan import Objective, Pool, cache_rows
from relibra.planning.deployment.performance import Efficiency, Node
from relibra.planning.deployment.pipeline_time import StageSeconds
from relibra.planning.deployment.served_model import BYTES, ServedModel
from relibra.planning.deployment.service_level import ServiceLevel

Kind = Literal["tensor", "expert"]
MOST_STAGES = 4
"""Pipeline stages that are tried."""


@dataclass(frozen=True, kw_only=True)
class ColocatedPlan:
    """One instance of a model whose GPUs compute attention and experts.

    pool             accelerator, GPUs of a tensor-parallel group, groups; with kind "tensor" groups are pipeline stages
    micro_batches    that take turns at computing and network ("expert"), or that fill the stages ("tensor")
    rows             requests of a micro-batch on one group; with "tensor" of the instance
    """

    model: ServedModel
    level: ServiceLevel
    efficiency: Efficiency
    kind: Kind
    pool: Pool
    micro_batches: int
    rows: int

    @property
    def gpus(self) -> int:
        """Return the GPUs of the instance."""
        return self.pool.gpus

    @property
    def price(self) -> float:
        """Return the price of the instance."""
        return self.pool.price

    @property
    def watts(self) -> float:
        """Return the most power of the instance."""
        return self.pool.watts

    @property
    def batch(self) -> int:
        """Return the requests that decode at once."""
        return self.rows * self.micro_batches * (self.pool.nodes if self.kind == "expert" else 1)

    @property
    def node(self) -> Node:
        """Return a group of GPUs, with its share of the model."""
        return self.pool.node(self.model, self.efficiency)

    @cached_property
    def stage(self) -> StageSeconds:
        """Return the seconds of one micro-batch; attention and experts are computed on the same GPUs."""
        model, node, level = self.model, self.node, self.level
        attention, rest = node.attention(self.rows, level.context), node.rest(self.rows, level.context)
        if self.kind == "tensor":
            return StageSeconds(float(attention), _sliced_seconds(self), 0.0, float(rest))
        per_group = model.experts / self.pool.nodes
        rows = level.expert_skew * self.rows * self.pool.nodes * model.top_k / model.experts
        experts, hop = node.experts(rows, per_group), _exchange_seconds(self, rows * per_group)
        return StageSeconds(*map(float, (attention, experts, hop, rest)))

    @property
    def period(self) -> float:
        """Return the seconds in which all micro-batches pass one layer."""
        stage, computing = self.stage, self.stage.attention + self.stage.experts
        if self.kind == "tensor":
            return float(self.micro_batches * computing)
        # Rows to the experts and back leave through the same NIC.
        return float(max(self.micro_batches * computing, self.micro_batches * 2 * stage.hop, stage.round_trip))

    @property
    def iteration_seconds(self) -> float:
        """Return the seconds between two tokens of a request."""
        layers, stage = self.model.layers, self.stage
        if self.kind == "expert":
            return float(layers * self.period + self.micro_batches * stage.rest)
        return float(layers * (stage.attention + stage.experts) + stage.rest + self.hand_over_seconds)

    @property
    def hand_over_seconds(self) -> float:
        """Return the seconds of a token between pipeline stages."""
        stages = self.pool.nodes
        if self.kind == "expert" or stages == 1:
            return 0.0
        sent = BYTES * self.rows * self.model.hidden / self.pool.ways
        return stages * float(self.node.network(sent, sent))

    @property
    def steady_tokens_per_second(self) -> float:
        """Return tokens per second of the instance."""
        return self.batch / self.iteration_seconds

    @property
    def limit(self) -> str:
        """Return what keeps the batch from growing: "memory", else "latency"."""
        return "memory" if self.rows + 1 > room(self) else "latency"


def room(plan: ColocatedPlan) -> int:
    """Return the most requests of a micro-batch that fit the memory of a group; 0: none, or weights do not fit."""
    model, pool, efficiency = plan.model, plan.pool, plan.efficiency
    if plan.kind == "expert":
        experts = BYTES * model.expert_values * model.experts / pool.nodes
        return cache_rows(model, plan.level, pool, plan.micro_batches, efficiency, experts)
    # A stage has its part of the weights, and its part of the cache of every micro-batch under way.
    experts = BYTES * model.expert_values * model.experts
    memory = efficiency.usable_memory * pool.accelerator.memory_bytes * pool.gpus - BYTES * model.attention_values
    copies = pool.ways / min(pool.ways, model.cache_ways)
    return max(0, int((memory - experts) // (plan.micro_batches * model.cache_bytes(plan.level.context) * copies)))


def search_colocated(
    model: ServedModel, level: ServiceLevel, gpus: Sequence[Accelerator], objective: Objective, efficiency: Efficiency,
    kinds: tuple[Kind, ...] = ("tensor", "expert"), most_gpus: int = 0,
) -> ColocatedPlan | None:  # fmt: skip
    """Return the plan of most tokens per second per unit of `objective`, on any one accelerator; None: none fits."""
    shapes = _shapes(model, level, gpus, efficiency, kinds)
    filled = [fill_colocated(shape) for shape in shapes if not most_gpus or shape.gpus <= most_gpus]
    found = [plan for plan in filled if plan is not None]
    return max(found, key=lambda plan: plan.steady_tokens_per_second / getattr(plan, objective), default=None)


def fill_colocated(shape: ColocatedPlan) -> ColocatedPlan | None:
    """Return a shape with the largest micro-batch that memory and latency allow; None: not even one request."""
    limit = shape.level.seconds_per_token
    most = room(shape)
    if most < 1 or replace(shape, rows=1).iteration_seconds > limit:
        return None
    low, high = 1, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if replace(shape, rows=middle).iteration_seconds <= limit else (low, middle)
    return replace(shape, rows=low)


def _shapes(
    model: ServedModel,
    level: ServiceLevel,
    gpus: Sequence[Accelerator],
    efficiency: Efficiency,
    kinds: tuple[Kind, ...],
) -> Iterator[ColocatedPlan]:
    """Yield what is tried, with one request each: kinds, groups of GPUs, numbers of groups and of micro-batches."""
    groups = [number for number in range(2, model.experts + 1) if model.experts % number == 0]
    tried: dict[Kind, list[tuple[int, int]]] = {
        "tensor": [(stages, stages) for stages in range(1, MOST_STAGES + 1)],
        "expert": list(product(groups, (1, 2))),
    }
    for gpu in gpus:
        for ways in (one for one in NODE_SIZES if one <= gpu.node_size):
            for kind in kinds:
                for nodes, micro_batches in tried[kind]:
                    yield ColocatedPlan(
                        model=model, level=level, efficiency=efficiency, kind=kind, pool=Pool(gpu, ways, nodes),
                        micro_batches=micro_batches, rows=1,
                    )  # fmt: skip


def _sliced_seconds(plan: ColocatedPlan) -> float:
    """Return the seconds of all experts of a layer, each cut over the GPUs of a node; untouched ones are not read."""
    model, node = plan.model, plan.node
    touched = model.experts * (1 - (1 - model.top_k / model.experts) ** plan.rows)
    each = node.gated(plan.rows * model.top_k / touched, model.width)
    return float(touched * each + node.all_reduce(plan.rows)) + plan.efficiency.launch_seconds


def _exchange_seconds(plan: ColocatedPlan, received_rows: float) -> float:
    """Return the seconds of one way between groups: links of a server and its NICs work at once.

    received_rows    of the busiest group
    """
    model, gpu, ways, groups = plan.model, plan.pool.accelerator, plan.pool.ways, plan.pool.nodes
    inside = max(1, gpu.node_size // ways)  # groups of one server
    inside = min(groups, inside) if groups % inside == 0 or groups < inside else 1  # uneven: one per server
    sent = BYTES * plan.rows * model.top_k * model.hidden / ways
    received = BYTES * received_rows * model.hidden / ways
    away, near = (groups - inside) / groups, (inside - 1) / groups
    near_seconds = max(sent, received) * near / gpu.peer_bytes_per_second
    if not away:
        return near_seconds + plan.efficiency.hop_seconds
    pair = sent / groups
    return max(near_seconds, float(plan.node.network(max(sent, received) * away, pair)))
