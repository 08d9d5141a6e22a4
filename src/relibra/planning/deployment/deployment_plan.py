"""`DeploymentPlan`: which GPUs compute attention, which experts, and in how many micro-batches they take turns."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from relibra.errors import PlanError
from relibra.planning.deployment.accelerator import Accelerator
from relibra.planning.deployment.performance import Efficiency, MeasuredNode, Node, stage_seconds
from relibra.planning.deployment.pipeline_time import StageSeconds, drained_seconds, iteration_seconds, layer_period
from relibra.planning.deployment.served_model import BYTES, ServedModel
from relibra.planning.deployment.service_level import ServiceLevel

Objective = Literal["price", "watts", "gpus"]
"""What tokens per second are divided by."""


@dataclass(frozen=True)
class Pool:
    """Equal nodes of one accelerator: `ways` GPUs of a node share each layer by tensor parallelism."""

    accelerator: Accelerator
    ways: int
    nodes: int

    @property
    def gpus(self) -> int:
        """Return the GPUs of all nodes."""
        return self.ways * self.nodes

    @property
    def price(self) -> float:
        """Return the price of all GPUs."""
        return self.gpus * self.accelerator.price

    @property
    def watts(self) -> float:
        """Return the most power of all GPUs."""
        return self.gpus * self.accelerator.watts

    def node(self, model: ServedModel, efficiency: Efficiency) -> Node:
        """Return one of the nodes, with its share of a model."""
        if efficiency.measured is None:
            return Node(model=model, gpu=self.accelerator, ways=self.ways, used=efficiency)
        tables = efficiency.measured
        return MeasuredNode(model=model, gpu=self.accelerator, ways=self.ways, used=efficiency, measured=tables)


@dataclass(frozen=True, kw_only=True)
class DeploymentPlan:
    """One instance of a model, with attention and experts on nodes of their own.

    attention, experts    nodes with attention, cache and router; nodes with experts
    experts_per_node      routed experts of an expert node; the last node may have fewer
    micro_batches         that take turns at attention and experts (`m`)
    rows                  requests of one micro-batch on one attention node (`b_a`)
    """

    model: ServedModel
    level: ServiceLevel
    efficiency: Efficiency
    attention: Pool
    experts: Pool
    experts_per_node: int
    micro_batches: int
    rows: int

    @cached_property
    def stage(self) -> StageSeconds:
        """Return the seconds of one micro-batch."""
        attention, experts = (pool.node(self.model, self.efficiency) for pool in (self.attention, self.experts))
        nodes, per_node = self.attention.nodes, self.experts_per_node
        return StageSeconds(*map(float, stage_seconds(attention, experts, nodes, per_node, self.rows, self.level)))

    @property
    def batch(self) -> int:
        """Return the requests that decode at once (`B`)."""
        return self.rows * self.micro_batches * self.attention.nodes

    @property
    def expert_rows(self) -> float:
        """Return the rows of one micro-batch at the mean expert (`b_e`)."""
        return self.rows * self.attention.nodes * self.model.top_k / self.model.experts

    @property
    def iteration_seconds(self) -> float:
        """Return the seconds between two tokens of a request, micro-batches running freely."""
        return float(iteration_seconds(self.stage, self.micro_batches, self.model.layers))

    @property
    def drained_seconds(self) -> float:
        """Return the seconds of one token for all requests, with filling and draining."""
        return float(drained_seconds(self.stage, self.micro_batches, self.model.layers))

    @property
    def tokens_per_second(self) -> float:
        """Return tokens per second: with measured nodes steady ones, else of a drained step, as in Algorithm 1."""
        return self.steady_tokens_per_second if self.efficiency.measured else self.batch / self.drained_seconds

    @property
    def steady_tokens_per_second(self) -> float:
        """Return tokens per second of the instance while micro-batches run on freely."""
        return self.batch / self.iteration_seconds

    @property
    def gpus(self) -> int:
        """Return the GPUs of the instance."""
        return self.attention.gpus + self.experts.gpus

    @property
    def price(self) -> float:
        """Return the price of the instance."""
        return self.attention.price + self.experts.price

    @property
    def watts(self) -> float:
        """Return the most power of the instance."""
        return self.attention.watts + self.experts.watts

    @property
    def bubble(self) -> float:
        """Return the share of a layer's period in which the slowest resource waits."""
        period = layer_period(self.stage, self.micro_batches)
        return float(1 - self.micro_batches * self.stage.slowest / period)

    @property
    def limit(self) -> str:
        """Return what keeps the batch from growing: "memory" of the attention nodes, else "latency"."""
        room = cache_rows(self.model, self.level, self.attention, self.micro_batches, self.efficiency)
        return "memory" if self.rows + 1 > room else "latency"

    def validate(self) -> None:
        """Raise PlanError where the plan breaks Eq. 7 or Eq. 8, or experts do not fit their nodes."""
        model, where = self.model, f"the deployment of {self.model.name!r}"
        for name, pool in (("attention", self.attention), ("expert", self.experts)):
            if not 1 <= pool.ways <= pool.accelerator.node_size or pool.nodes < 1:
                raise PlanError(
                    f"{where} has {pool.nodes} {name} nodes of {pool.ways} GPUs: allowed are 1 node or more, of 1 to "
                    f"{pool.accelerator.node_size} {pool.accelerator.name}"
                )
        if self.rows < 1 or self.micro_batches < 1:
            raise PlanError(
                f"{where} has {self.micro_batches} micro-batches of {self.rows} requests: both must be at least 1"
            )
        if self.experts.nodes != -(-model.experts // self.experts_per_node):
            raise PlanError(
                f"{where} has {self.experts.nodes} expert nodes with {self.experts_per_node} experts each for "
                f"{model.experts} experts: every expert has one node"
            )
        if not experts_fit(model, self.experts, self.experts_per_node, self.efficiency):
            node = f"{self.experts.ways} {self.experts.accelerator.name}"
            raise PlanError(f"{where}: {self.experts_per_node} experts do not fit {node}; put fewer on a node")
        room = cache_rows(model, self.level, self.attention, self.micro_batches, self.efficiency)
        if self.rows > room:
            raise PlanError(
                f"{where}: {self.micro_batches} micro-batches of {self.rows} requests do not fit the memory of an "
                f"attention node, which has room for {room} each (Eq. 8)"
            )
        if self.iteration_seconds > self.level.seconds_per_token:
            raise PlanError(
                f"{where} takes {self.iteration_seconds:.6g} s per token, allowed are {self.level.seconds_per_token:g} "
                "(Eq. 7)"
            )


def experts_fit(model: ServedModel, pool: Pool, experts: int, efficiency: Efficiency) -> bool:
    """Return whether a node of a pool holds a number of experts."""
    return BYTES * model.expert_values * experts < efficiency.usable_memory * pool.accelerator.memory_bytes * pool.ways


def cache_rows(
    model: ServedModel,
    level: ServiceLevel,
    pool: Pool,
    micro_batches: int,
    efficiency: Efficiency,
    others: int | float = 0.0,
) -> int:
    """Return the most requests of a micro-batch that fit an attention node beside its weights (Eq. 8); 0: none.

    others    bytes of a node that hold something else
    """
    memory = efficiency.usable_memory * pool.accelerator.memory_bytes * pool.ways
    copies = pool.ways / min(pool.ways, model.cache_ways)
    room = memory - BYTES * model.attention_values - others
    return max(0, int(room // (micro_batches * model.cache_bytes(level.context) * copies)))
