"""`Site`: a plan as nodes, experts on them and links between them; the seconds of a step's work there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int, Int64, Shaped
from numpy import ndarray
from numpy.random import Generator

from relibra.errors import PlanError
from relibra.planning.deployment.colocated import ColocatedPlan
from relibra.planning.deployment.deployment_plan import DeploymentPlan
from relibra.planning.deployment.performance import Node
from relibra.planning.deployment.served_model import BYTES, ServedModel
from relibra.simulation.serving.ping_pong import Work, sending_order
from relibra.simulation.serving.transport import Transport

Plan = DeploymentPlan | ColocatedPlan


@dataclass(frozen=True, kw_only=True)
class NodeCompute:
    """Seconds of the nodes of `planning.deployment.performance`, elementwise for arrays of any shape."""

    attention_node: Node
    expert_node: Node

    def attention(
        self, rows: Shaped[ndarray, "*X"], tokens: Shaped[ndarray, "*X"]
    ) -> tuple[Float64[ndarray, "*X"], Float64[ndarray, "*X"]]:
        """Return seconds of a layer for `rows` requests with `tokens` tokens in all, and of a step outside layers."""
        context, node = tokens / np.maximum(1, rows), self.attention_node
        return np.where(rows > 0, node.attention(rows, context), 0.0), np.where(rows > 0, node.rest(rows, context), 0.0)

    def experts(self, rows: Float64[ndarray, "*X P"]) -> Float64[ndarray, "*X"]:
        """Return the seconds of nodes with P experts from the rows of each; experts without rows are not read."""
        launch = self.expert_node.used.launch_seconds
        each = np.asarray(self.expert_node.experts(rows, 1)) - launch
        busy = (rows > 0).any(axis=-1)
        total: Float64[ndarray, "*X"] = np.where(rows > 0, each, 0.0).sum(axis=-1) + np.where(busy, launch, 0.0)
        return total


@dataclass(frozen=True, kw_only=True)
class Site:
    """X attention nodes and Y expert nodes, or X = Y nodes that do both.

    expert_LYP                     experts of each expert node in each layer; -1: an empty slot
    near_XY                        pairs inside one server, whose rows pass no NIC; same_XY: on one node
    shared                         the same GPUs compute attention and experts
    server                         number of nodes in a server, inside which rows pass no NIC
    """

    compute: NodeCompute
    senders: int
    expert_LYP: Int64[ndarray, "L Y P"]
    near_XY: Bool[ndarray, "X Y"]
    same_XY: Bool[ndarray, "X Y"]
    shared: bool
    server: int = 1

    @property
    def model(self) -> ServedModel:
        """Return the model that is served."""
        return self.compute.attention_node.model

    @property
    def order_XY(self) -> Int64[ndarray, "X Y"]:
        """Return the order in which attention nodes send to expert nodes."""
        return sending_order(self.senders, self.receivers, self.server)

    @property
    def back_YX(self) -> Int64[ndarray, "Y X"]:
        """Return the order in which expert nodes send to attention nodes."""
        return sending_order(self.receivers, self.senders, self.server)

    @property
    def by_network_XY(self) -> Bool[ndarray, "X Y"]:
        """Return the pairs whose rows pass NICs."""
        return ~(self.near_XY | self.same_XY)

    @property
    def receivers(self) -> int:
        """Return the number of expert nodes."""
        return self.expert_LYP.shape[1]

    @property
    def held_LEY(self) -> Float64[ndarray, "L E Y"]:
        """Return the copies of each expert on each node."""
        L, Y, _ = self.expert_LYP.shape
        held_LEY = np.zeros((L, self.model.experts, Y))
        layer_X, node_X, slot_X = np.nonzero(self.expert_LYP >= 0)
        np.add.at(held_LEY, (layer_X, self.expert_LYP[layer_X, node_X, slot_X], node_X), 1.0)
        return held_LEY

    def work(
        self,
        rows_MX: Shaped[ndarray, "M X"],
        tokens_MX: Shaped[ndarray, "M X"],
        counts_LMXE: Float64[ndarray, "L M X E"],
        transport: Transport,
        rng: Generator,
    ) -> tuple[Work, Float64[ndarray, "L M X Y"]]:
        """Return the seconds of a step, and the bytes from each attention to each expert node; as many come back.

        rows_MX, tokens_MX    requests, and tokens that they attend to
        counts_LMXE           rows for each expert; copies share them evenly
        """
        layer_MX, rest_MX = self.compute.attention(rows_MX, tokens_MX)
        attention_LMX = np.repeat(layer_MX[None], self.model.layers, axis=0)
        attention_LMX[0] += rest_MX
        held_LEY = self.held_LEY
        share_LMXE = counts_LMXE / held_LEY.sum(axis=2)[:, None, None]
        rows_LMXY = share_LMXE @ held_LEY[:, None]
        share_LM1E = share_LMXE.sum(axis=2, keepdims=True)  # experts compute the rows of all senders at once
        L, Y, P = self.expert_LYP.shape
        index_L11P = self.expert_LYP.reshape(L, 1, 1, Y * P)
        slot_LM1P = np.where(index_L11P >= 0, np.take_along_axis(share_LM1E, np.maximum(0, index_L11P), axis=3), 0.0)
        slot_LM1YP = slot_LM1P.reshape(*share_LM1E.shape[:3], Y, P)
        bytes_LMXY = BYTES * self.model.hidden * rows_LMXY
        send, receive = self._link_seconds(bytes_LMXY, self.compute.attention_node, self.compute.expert_node, transport)
        give, take = self._link_seconds(bytes_LMXY, self.compute.expert_node, self.compute.attention_node, transport)
        work = Work(
            attention_LMX=attention_LMX,
            experts_LMXY=np.ascontiguousarray(self.compute.experts(slot_LM1YP)),
            send_LMXY=send,
            receive_LMXY=receive,
            give_LMXY=give,
            take_LMXY=take,
            late_LMXY=self._late(bytes_LMXY, send, receive, transport, rng),
            back_late_LMXY=self._late(bytes_LMXY, give, take, transport, rng),
        )
        return work, bytes_LMXY

    def _link_seconds(
        self, bytes_LMXY: Float64[ndarray, "L M X Y"], sender: Node, receiver: Node, transport: Transport
    ) -> tuple[Float64[ndarray, "L M X Y"], Float64[ndarray, "L M X Y"]]:
        """Return the time of both NICs; a message takes as long as its bytes and `half_rate_bytes` more.

        The latter are counted per GPU of an attention node, in both directions, as in the search.
        """
        pair = bytes_LMXY * self.by_network_XY
        used = sender.used
        slower = 1 + used.half_rate_bytes * self.compute.attention_node.ways / np.maximum(pair, 1e-9)
        seconds = pair * slower * transport.factor * used.hop_factor
        return (
            seconds / (sender.gpu.network_bytes_per_second * sender.ways),
            seconds / (receiver.gpu.network_bytes_per_second * receiver.ways),
        )

    def _late(
        self,
        bytes_LMXY: Float64[ndarray, "L M X Y"],
        out_LMXY: Float64[ndarray, "L M X Y"],
        in_LMXY: Float64[ndarray, "L M X Y"],
        transport: Transport,
        rng: Generator,
    ) -> Float64[ndarray, "L M X Y"]:
        """Return the sum of latency, tail and, inside a server, transfer time of each message."""
        node = self.compute.attention_node
        factor = transport.factor * node.used.hop_factor
        inside = np.where(self.near_XY, bytes_LMXY / (node.gpu.peer_bytes_per_second * node.ways), 0.0)
        latency = np.where(self.same_XY, 0.0, factor * node.used.hop_seconds)
        late: Float64[ndarray, "L M X Y"] = latency + inside
        return late + transport.delays(np.maximum(out_LMXY, in_LMXY) + late, rng)


@dataclass(frozen=True, kw_only=True)
class SlicedCompute(NodeCompute):
    """Seconds of nodes whose GPUs cut every expert between them and sum the rows of a token once.

    hand_over    seconds of a step between pipeline stages
    """

    hand_over: float = 0.0

    def attention(
        self, rows: Shaped[ndarray, "*X"], tokens: Shaped[ndarray, "*X"]
    ) -> tuple[Float64[ndarray, "*X"], Float64[ndarray, "*X"]]:
        """Return seconds of one layer, and of a step outside of layers, hand-overs between stages included."""
        layer, rest = super().attention(rows, tokens)
        return layer, rest + self.hand_over

    def experts(self, rows: Float64[ndarray, "*X P"]) -> Float64[ndarray, "*X"]:
        """Return the seconds of all experts; those without rows are not read."""
        node, model = self.expert_node, self.expert_node.model
        tokens = rows.sum(axis=-1) / model.top_k
        total = np.where(rows > 0, node.gated(rows, model.width), 0.0).sum(axis=-1) + node.all_reduce(tokens)
        seconds: Float64[ndarray, "*X"] = np.where(tokens > 0, total + node.used.launch_seconds, 0.0)
        return seconds


def site_of(plan: Plan, expert_LYP: Int[ndarray, "L Y P"] | None = None) -> Site:
    """Return the nodes of a plan.

    expert_LYP    experts of each expert node, with copies; None: each expert once, in order
    raises        PlanError when an expert has no place, or the placement has other nodes than the plan
    """
    if isinstance(plan, DeploymentPlan):
        attention, experts = (pool.node(plan.model, plan.efficiency) for pool in (plan.attention, plan.experts))
        senders, receivers, per_node = plan.attention.nodes, plan.experts.nodes, plan.experts_per_node
    else:
        attention = experts = plan.node
        senders = receivers = plan.pool.nodes if plan.kind == "expert" else 1
        per_node = -(-plan.model.experts // receivers)
    made = NodeCompute(attention_node=attention, expert_node=experts)
    if isinstance(plan, ColocatedPlan) and plan.kind == "tensor":
        made = SlicedCompute(attention_node=attention, expert_node=experts, hand_over=plan.hand_over_seconds)
    if expert_LYP is None:
        place_YP = np.arange(receivers * per_node).reshape(receivers, per_node)
        expert_LYP = np.tile(np.where(place_YP < plan.model.experts, place_YP, -1), (plan.model.layers, 1, 1))
    _check_placed(plan, expert_LYP, receivers)
    shared = isinstance(plan, ColocatedPlan)
    same_XY = np.zeros((senders, receivers), dtype=bool)
    near_XY = same_XY.copy()
    per_server = 1
    if shared:
        per_server = max(1, attention.gpu.node_size // attention.ways)
        per_server = min(senders, per_server) if senders % per_server == 0 or senders < per_server else 1
        server = np.arange(senders) // per_server
        same_XY = np.eye(senders, dtype=bool)
        near_XY = (server[:, None] == server) & ~same_XY
    return Site(
        compute=made,
        senders=senders,
        expert_LYP=expert_LYP.astype(np.int64),
        near_XY=near_XY,
        same_XY=same_XY,
        shared=shared,
        server=per_server,
    )


def _check_placed(plan: Plan, expert_LYP: Int[ndarray, "L Y P"], receivers: int) -> None:
    """Raise PlanError when an expert has no place in a layer, or the placement has other layers or nodes."""
    L, Y, _ = expert_LYP.shape
    if plan.model.layers != L or receivers != Y:
        raise PlanError(
            f"experts are placed in {L} layers on {Y} nodes: the plan has {plan.model.layers} layers and {receivers} "
            "expert nodes"
        )
    for layer, placed_YP in enumerate(expert_LYP):
        held = np.unique(placed_YP[placed_YP >= 0])
        if not np.array_equal(held, np.arange(plan.model.experts)):
            raise PlanError(
                f"layer {layer}: {len(held)} of {plan.model.experts} experts have a place: every expert needs one"
            )
