"""The objective: how long a planned step is expected to take, in seconds, term by term.

    total = sum over micro-batches and layers of (busiest rank's experts + exchange + exposed copies) + relocation

Ranks wait for each other in every layer of every micro-batch, so each term takes its maximum over ranks before it is
summed (ReLibra, arXiv 2605.08639; ForeMoE, arXiv 2606.11867). All figures are a model of the machine, not a
measurement, and carry the label `model`. Attention, router and optimizer are not in the total: no plan changes them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int
from numpy import ndarray

from relibra.cluster import Cluster
from relibra.errors import PlanError
from relibra.planning.costs.expert_shape import ExpertShape
from relibra.planning.placement import Homes, Placement
from relibra.planning.plan import StepPlan
from relibra.planning.traffic.traffic import IN, OUT, iterate_traffic, link_rows, send_once_share
from relibra.routing.demand import ScheduledDemand


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a plan is expected to cost in one step, summed over micro-batches and layers.

    compute, exchange, copies, relocation    seconds; `copies` counts only what attention does not hide
    cross_node_token_slots                   token-slots computed on another node than the one they come from
    sent_bytes                               activation bytes between ranks: dispatch and combine, forward and backward
    copy_bytes                               weights pushed to replicas and gradients returned
    moved_bytes                              state of experts that change their home rank, in full
    """

    compute: float
    exchange: float
    copies: float
    relocation: float
    cross_node_token_slots: int
    sent_bytes: float
    copy_bytes: int
    moved_bytes: int

    @property
    def total(self) -> float:
        """Sum of the four terms, in seconds."""
        return self.compute + self.exchange + self.copies + self.relocation

    def as_dict(self) -> dict[str, float]:
        """Return the four terms and their total by name, in seconds, as `StepPlan.predicted` holds them."""
        names = ("compute", "exchange", "copies", "relocation", "total")
        return {name: float(getattr(self, name)) for name in names}


def predict(
    plan: StepPlan,
    demand: ScheduledDemand,
    cluster: Cluster,
    expert: ExpertShape,
    *,
    pairs_LEE: Int[ndarray, "L E E2"] | None = None,
    attention_seconds: float = 0.0,
) -> Prediction:
    """Model the seconds and bytes of a step under a plan.

    demand             with the plan's schedule (`plan.scheduled`)
    pairs_LEE          tokens that pick two experts together (`relibra.routing.statistics.co_activation`): a token then
                       travels once per destination rank. Without, each token-slot travels, which is the upper bound
    attention_seconds  forward attention of one layer and micro-batch, under which copies hide; backward takes twice it
    raises             PlanError when plan, demand and cluster do not fit together
    """
    _check_fit(plan, demand, cluster)
    exchanged = exchange(plan, demand, cluster, expert, pairs_LEE)
    return Prediction(
        compute=float(compute_seconds(plan, demand, cluster, expert).sum()),
        exchange=float(exchanged.seconds_ML.sum()),
        copies=float(exposed_copy_seconds(plan, cluster, expert, attention_seconds).sum()),
        relocation=relocation_seconds(plan.previous, plan, cluster, expert),
        cross_node_token_slots=exchanged.cross_node_token_slots,
        sent_bytes=exchanged.sent_bytes,
        copy_bytes=_copy_bytes(plan, expert),
        moved_bytes=plan.num_moved * expert.state_bytes,
    )


def _check_fit(plan: StepPlan, demand: ScheduledDemand, cluster: Cluster) -> None:
    if (plan.num_nodes, plan.ranks_per_node) != (cluster.num_nodes, cluster.ranks_per_node):
        raise PlanError(
            f"a plan for {plan.num_nodes} x {plan.ranks_per_node} ranks meets cluster {cluster.name!r} of "
            f"{cluster.num_nodes} x {cluster.ranks_per_node}: plan again, or use Cluster.with_ranks"
        )
    planned = (*plan.replica_MLRB.shape[:3], plan.num_experts)
    if demand.tokens_MLRE.shape != planned:
        raise PlanError(
            f"a plan for (micro-batches, layers, ranks, experts) {planned} meets a demand of "
            f"{demand.tokens_MLRE.shape}: pass plan.scheduled(demand)"
        )


def compute_seconds(
    plan: Placement, demand: ScheduledDemand, cluster: Cluster, expert: ExpertShape
) -> Float64[ndarray, "M L"]:
    """Return the seconds of the busiest rank's experts per micro-batch and layer: forward and twice that backward."""
    flops = 3.0 * expert.flops_per_token_slot
    load_MLE, home_LE = demand.load_MLE, plan.home_LE
    seconds_ML = np.zeros(load_MLE.shape[:2])
    by_rank_RL = np.zeros((plan.num_ranks, len(home_LE)))
    layers = np.arange(len(home_LE))
    for m in range(len(load_MLE)):
        home_rows_LE = load_MLE[m].copy()
        layer_X, rank_X, slot_X = np.nonzero(plan.replica_MLRB[m] >= 0)
        rows_X = plan.quota_MLRB[m, layer_X, rank_X, slot_X].astype(np.int64)
        np.subtract.at(home_rows_LE, (layer_X, plan.replica_MLRB[m, layer_X, rank_X, slot_X]), rows_X)
        by_rank_RL[:] = 0
        np.add.at(by_rank_RL, (home_LE, layers[:, None]), cluster.gemm_seconds(home_rows_LE, flops))
        np.add.at(by_rank_RL, (rank_X, layer_X), cluster.gemm_seconds(rows_X, flops))
        seconds_ML[m] = by_rank_RL.max(axis=0)
    return seconds_ML


@dataclass(frozen=True, kw_only=True, eq=False)
class Exchange:
    """Dispatch and combine, forward and backward: seconds per micro-batch and layer; token-slots and bytes in all."""

    seconds_ML: Float64[ndarray, "M L"]
    cross_node_token_slots: int
    sent_bytes: float


def exchange(
    plan: Placement,
    demand: ScheduledDemand,
    cluster: Cluster,
    expert: ExpertShape,
    pairs_LEE: Int[ndarray, "L E E2"] | None = None,
) -> Exchange:
    """Time the exchanges of a plan.

    Dispatch carries a hidden state from its source rank to the computing rank, combine one back; backward, their
    gradients travel the same ways reversed: two passes along the traffic matrix and two against it. Links inside and
    between nodes work at the same time. A node's network is shared by its ranks in fixed parts, so the sum over a node
    can never be slower than its busiest rank.
    """
    share_LR = np.ones((len(plan.layer_ids), plan.num_ranks))
    if pairs_LEE is not None:
        if pairs_LEE.shape != (*plan.home_LE.shape, plan.num_experts):
            raise PlanError(f"pairs have shape {pairs_LEE.shape}: expected layers x experts x experts of the plan")
        share_LR = send_once_share(pairs_LEE, plan.home_LE, plan.num_ranks)
    seconds_ML, cross_node, rows = np.zeros(plan.replica_MLRB.shape[:2]), 0, 0.0
    for m, layers, traffic_LRR in iterate_traffic(plan, demand):
        inside_L2R, between_L2R, cross = link_rows(traffic_LRR, share_LR[layers], plan.ranks_per_node)
        inside_L2 = inside_L2R.max(axis=-1) * expert.row_bytes
        between_L2 = between_L2R.max(axis=-1) * expert.row_bytes
        nvlink_L = cluster.intra.seconds(inside_L2.max(axis=-1))
        for send, receive in ((OUT, IN), (IN, OUT)):
            send_L = cluster.inter_send.seconds(between_L2[:, send])
            network_L = np.maximum(send_L, cluster.inter_receive.seconds(between_L2[:, receive]))
            seconds_ML[m, layers] += 2 * np.maximum(nvlink_L, network_L)
        cross_node += int(cross)
        rows += float(inside_L2R[:, OUT].sum() + between_L2R[:, OUT].sum())
    return Exchange(seconds_ML=seconds_ML, cross_node_token_slots=cross_node, sent_bytes=4 * rows * expert.row_bytes)


def pushed_copies(
    plan: Placement,
) -> tuple[Bool[ndarray, "M L R B"], Bool[ndarray, "M L R B"], Bool[ndarray, "M L R B"]]:
    """Tell which replicas receive weights before forward, again before backward, and return a gradient after it.

    A buffer shared by all layers is filled for each pass. Resident slots are filled when an expert comes to a rank,
    keep it until backward, add up gradients over micro-batches and return them when it leaves the rank.
    """
    used_MLRB = plan.replica_MLRB >= 0
    if not plan.resident:
        return used_MLRB, used_MLRB, used_MLRB
    before, after = plan.replica_MLRB[:-1], plan.replica_MLRB[1:]
    arrives_MLRB, leaves_MLRB = used_MLRB.copy(), used_MLRB.copy()
    for b in range(plan.slots):  # whichever slot of its rank the expert is in
        arrives_MLRB[1:] &= after != before[..., b : b + 1]
        leaves_MLRB[:-1] &= before != after[..., b : b + 1]
    return arrives_MLRB, np.zeros_like(used_MLRB), leaves_MLRB


def exposed_copy_seconds(
    plan: Placement, cluster: Cluster, expert: ExpertShape, attention_seconds: float
) -> Float64[ndarray, "M L"]:
    """Return the seconds of copies that attention does not hide; each phase hides under its own direction."""
    forward, backward, gradients = pushed_copies(plan)
    forward_ML = copy_seconds(plan, forward, cluster, expert.weight_bytes)
    backward_ML = copy_seconds(plan, backward, cluster, expert.weight_bytes)
    backward_ML += copy_seconds(plan, gradients, cluster, expert.gradient_bytes, to_home=True)
    return np.maximum(0, forward_ML - attention_seconds) + np.maximum(0, backward_ML - 2 * attention_seconds)


def _copy_bytes(plan: Placement, expert: ExpertShape) -> int:
    forward, backward, gradients = (int(copied.sum()) for copied in pushed_copies(plan))
    return (forward + backward) * expert.weight_bytes + gradients * expert.gradient_bytes


def copy_seconds(
    plan: Placement,
    copied_MLRB: Bool[ndarray, "M L R B"],
    cluster: Cluster,
    bytes_each: int,
    *,
    to_home: bool = False,
    from_pool: bool = False,
) -> Float64[ndarray, "M L"]:
    """Time copies as `copy_seconds_of_links` does, both kinds of links at once."""
    return np.maximum(
        *copy_seconds_of_links(plan, copied_MLRB, cluster, bytes_each, to_home=to_home, from_pool=from_pool)
    )


def copy_seconds_of_links(
    plan: Placement,
    copied_MLRB: Bool[ndarray, "M L R B"],
    cluster: Cluster,
    bytes_each: int,
    *,
    to_home: bool = False,
    from_pool: bool = False,
) -> tuple[Float64[ndarray, "M L"], Float64[ndarray, "M L"]]:
    """Time one transfer per copy on the busiest rank, as the executor makes them: inside nodes, and between nodes.

    Homes send weights, one replica after another, and receive gradients: by `intra` where home and replica share a
    node, else out through `inter_send` of one and in through `inter_receive` of the other.

    to_home     gradients on their way home; False: weights on their way out
    from_pool   weights come from the host memory of each replica's own node (`parallel.HostPool`), inside a node too:
                only in passes without gradients
    """
    assert not (to_home and from_pool), "gradients go to homes, never into a pool"
    M, L, R, _ = copied_MLRB.shape
    m_X, layer_X, rank_X, slot_X = np.nonzero(copied_MLRB)
    home_X = plan.home_LE[layer_X, plan.replica_MLRB[m_X, layer_X, rank_X, slot_X]]

    def busiest(ranks: ndarray, chosen_X: ndarray) -> Float64[ndarray, "M L"]:
        counts_MLR = np.zeros((M, L, R), dtype=np.int64)
        np.add.at(counts_MLR, (m_X[chosen_X], layer_X[chosen_X], ranks[chosen_X]), 1)
        return counts_MLR.max(axis=-1) * float(bytes_each)

    nothing_ML = np.zeros((M, L))
    if from_pool:
        return cluster.host.seconds(busiest(rank_X, np.ones(len(rank_X), dtype=np.bool_))), nothing_ML
    inside_X = rank_X // plan.ranks_per_node == home_X // plan.ranks_per_node
    inside_ML = cluster.intra.seconds(np.maximum(busiest(rank_X, inside_X), busiest(home_X, inside_X)))
    if inside_X.all():
        return inside_ML, nothing_ML
    from_X, to_X = (rank_X, home_X) if to_home else (home_X, rank_X)
    sent_ML = cluster.inter_send.seconds(busiest(from_X, ~inside_X))
    return inside_ML, np.maximum(sent_ML, cluster.inter_receive.seconds(busiest(to_X, ~inside_X)))


def relocation_seconds(before: Homes, after: Homes, cluster: Cluster, expert: ExpertShape) -> float:
    """Time the moves of expert state: the busiest rank's bytes over each kind of link, one message per layer."""
    before_LE, after_LE = before.home_LE, after.home_LE
    layer_X, expert_X = np.nonzero(before_LE != after_LE)
    from_X, to_X = before_LE[layer_X, expert_X], after_LE[layer_X, expert_X]
    inside_X = from_X // after.ranks_per_node == to_X // after.ranks_per_node

    def busiest(ranks: ndarray) -> float:
        return float(np.bincount(ranks).max(initial=0) * expert.state_bytes)

    layers = len(np.unique(layer_X[inside_X]))
    inside = cluster.intra.seconds(max(busiest(from_X[inside_X]), busiest(to_X[inside_X])), layers)
    layers = len(np.unique(layer_X[~inside_X]))
    sent = cluster.inter_send.seconds(busiest(from_X[~inside_X]), layers)
    return max(inside, sent, cluster.inter_receive.seconds(busiest(to_X[~inside_X]), layers))
