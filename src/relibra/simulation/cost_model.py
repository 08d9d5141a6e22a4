"""What each part of a step costs in seconds, as formulas of the plan, the load, the model and the machine.

Where the planner prices the same thing (`planning.objective`), the formula is the planner's own or a test holds the two
together: a simulated step without overlap adds up to what `predict` says, term by term. Every figure is a model.

A link costs alpha + beta x bytes in each direction, both at once; links inside and between nodes work at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int, Int64
from numpy import ndarray

from relibra.cluster import Cluster, Link
from relibra.errors import ClusterError
from relibra.planning.costs.expert_shape import ExpertShape
from relibra.planning.costs.prediction import copy_seconds_of_links, pushed_copies
from relibra.planning.plan import StepPlan
from relibra.planning.traffic.traffic import IN, OUT, iterate_traffic, link_rows, send_once_share
from relibra.routing.demand import ScheduledDemand
from relibra.simulation.layout import ParallelLayout
from relibra.simulation.model_shape import ModelShape

_OPTIMIZER_BYTES = 30
"""Bytes that AdamW touches per parameter: reads gradient, master and two moments (16), writes these three (12) and the
bf16 weight (2)."""


def rows_and_scores(
    plan: StepPlan, demand: ScheduledDemand, model: ModelShape
) -> tuple[Float64[ndarray, "M R"], Float64[ndarray, "M R"]]:
    """Return tokens per micro-batch and source rank, and the flops of their attention scores per layer, forward.

    Tokens of a sample = its token-slots / top_k. Samples do not see each other, also when they share a batch.
    """
    M, R = plan.replica_MLRB.shape[0], plan.num_ranks
    rows_S = demand.counts_SLE[:, 0].sum(axis=1, dtype=np.int64) // model.top_k
    kept_S = plan.micro_batch_S >= 0
    where = (plan.micro_batch_S[kept_S], plan.rank_S[kept_S])
    rows_MR, flops_MR = np.zeros((M, R)), np.zeros((M, R))
    np.add.at(rows_MR, where, rows_S[kept_S])
    np.add.at(flops_MR, where, model.score_flops(rows_S[kept_S]))
    return rows_MR, flops_MR


def attention_seconds(
    model: ModelShape, cluster: Cluster, rows_MR: Float64[ndarray, "M R"], score_flops_MR: Float64[ndarray, "M R"]
) -> Float64[ndarray, "M R"]:
    """Time what every token runs through in an expert layer, forward: attention, router, shared experts.

    (2 x weights x tokens + flops of the scores) / sustained flops per second. Norms and rotations are left out.
    """
    return (2.0 * model.always_parameters * rows_MR + score_flops_MR) / cluster.flops_per_second


def dense_layer_seconds(
    model: ModelShape, cluster: Cluster, rows_MR: Float64[ndarray, "M R"], score_flops_MR: Float64[ndarray, "M R"]
) -> Float64[ndarray, "M R"]:
    """Time a layer without experts, forward: the same formula with its own weights."""
    return (2.0 * model.dense_layer_parameters * rows_MR + score_flops_MR) / cluster.flops_per_second


def head_seconds(model: ModelShape, cluster: Cluster, rows_MR: Float64[ndarray, "M R"]) -> Float64[ndarray, "M R"]:
    """Time the output matrix, forward: 2 x hidden x vocabulary flops per token."""
    return 2.0 * model.head_parameters * rows_MR / cluster.flops_per_second


def expert_seconds(
    plan: StepPlan, demand: ScheduledDemand, cluster: Cluster, expert: ExpertShape
) -> tuple[Float64[ndarray, "M L R"], Float64[ndarray, "M L R"]]:
    """Time the experts of each rank, forward: those at home, and its replicas.

    Each expert is a GEMM of its own rows (`Cluster.gemm_seconds`), 2 flops per weight and row; backward takes twice as
    long. The busiest rank, three times, is `objective.compute_seconds`.
    """
    flops = float(expert.flops_per_token_slot)
    load_MLE, home_LE = demand.load_MLE, plan.home_LE
    layers = np.arange(len(home_LE))[:, None]
    home_MLR = np.zeros(plan.replica_MLRB.shape[:3])
    replica_MLR = np.zeros_like(home_MLR)
    for m in range(len(load_MLE)):
        home_rows_LE = load_MLE[m].copy()
        layer_X, rank_X, slot_X = np.nonzero(plan.replica_MLRB[m] >= 0)
        rows_X = plan.quota_MLRB[m, layer_X, rank_X, slot_X].astype(np.int64)
        np.subtract.at(home_rows_LE, (layer_X, plan.replica_MLRB[m, layer_X, rank_X, slot_X]), rows_X)
        np.add.at(home_MLR[m], (layers, home_LE), cluster.gemm_seconds(home_rows_LE, flops))
        np.add.at(replica_MLR[m], (layer_X, rank_X), cluster.gemm_seconds(rows_X, flops))
    return home_MLR, replica_MLR


@dataclass(frozen=True, kw_only=True, eq=False)
class ExchangeCosts:
    """Exchanges of rows and of gate weights, one pass each.

    dispatch_ML, combine_ML      seconds along the traffic (hidden states; gradients of results) and against it
    gates_ML, gates_back_ML      seconds of the gate weights, one number per token-slot, and of their gradients back
    out_MLR, in_MLR              rows that leave and enter a rank along the traffic
    gates_out_MLR, gates_in_MLR  the same in token-slots: gate weights are never shared between choices
    """

    dispatch_ML: Float64[ndarray, "M L"]
    combine_ML: Float64[ndarray, "M L"]
    gates_ML: Float64[ndarray, "M L"]
    gates_back_ML: Float64[ndarray, "M L"]
    out_MLR: Float64[ndarray, "M L R"]
    in_MLR: Float64[ndarray, "M L R"]
    gates_out_MLR: Float64[ndarray, "M L R"]
    gates_in_MLR: Float64[ndarray, "M L R"]


def exchange_costs(
    plan: StepPlan,
    demand: ScheduledDemand,
    cluster: Cluster,
    expert: ExpertShape,
    distinct_MLRR: Int[ndarray, "M L R R2"] | None = None,
) -> ExchangeCosts:
    """Time the exchanges of each micro-batch and layer: the busiest rank of the busier kind of link.

    With co-routing pairs (`demand.pairs_LEE`) a token travels once per destination rank, of which pairs tell a lower
    bound (`send_once_share`), without them once per choice, as in `objective.exchange`; twice `dispatch_ML` +
    `combine_ML` is what that returns.

    distinct_MLRR   tokens that travel from rank to rank, counted (`byte_ledger.distinct_rows_of_step`), instead
    """
    M, L, R, _ = plan.replica_MLRB.shape
    share_LR = np.ones((L, R))
    if distinct_MLRR is None and demand.pairs_LEE is not None:
        share_LR = send_once_share(demand.pairs_LEE, plan.home_LE, R)
    seconds_4ML, rows_4MLR = np.zeros((4, M, L)), np.zeros((4, M, L, R))
    for m, layers, traffic_LRR in iterate_traffic(plan, demand):
        rows_LRR = traffic_LRR if distinct_MLRR is None else distinct_MLRR[m, layers].astype(np.int64)
        all_LR = np.ones_like(share_LR[layers])
        for first, moved_LRR, share, row_bytes in (
            (0, rows_LRR, share_LR[layers], expert.row_bytes),
            (2, traffic_LRR, all_LR, expert.bytes_per_value),
        ):
            inside_L2R, between_L2R, _ = link_rows(moved_LRR, share, plan.ranks_per_node)
            inside_L2 = inside_L2R.max(axis=-1) * float(row_bytes)
            between_L2 = between_L2R.max(axis=-1) * float(row_bytes)
            intra_L = cluster.intra.seconds(inside_L2.max(axis=-1))
            for pass_, (send, receive) in enumerate(((OUT, IN), (IN, OUT))):
                send_L = cluster.inter_send.seconds(between_L2[:, send])
                inter_L = np.maximum(send_L, cluster.inter_receive.seconds(between_L2[:, receive]))
                seconds_4ML[first + pass_, m, layers] = np.maximum(intra_L, inter_L)
                rows_4MLR[first + pass_, m, layers] = inside_L2R[:, send] + between_L2R[:, send]
    names = ("dispatch_ML", "combine_ML", "gates_ML", "gates_back_ML")
    more = ("out_MLR", "in_MLR", "gates_out_MLR", "gates_in_MLR")
    return ExchangeCosts(**dict(zip((*names, *more), (*seconds_4ML, *rows_4MLR), strict=True)))


@dataclass(frozen=True, kw_only=True, eq=False)
class CopyCosts:
    """Copies of experts in one kind of transfer: weights out before a pass, or gradients home after it.

    seconds_ML             of the busiest rank, over whichever link is slowest (`objective.copy_seconds`)
    network_ML             of the busiest rank between nodes alone, on links that rows use too
    takes_part_MLR         ranks that send or receive
    sent_MLR, received_MLR experts that leave and enter a rank
    from_host_MLR          of those received, how many come from a pool in host memory and from no rank: all or none
    bytes_each             of one expert
    """

    seconds_ML: Float64[ndarray, "M L"]
    network_ML: Float64[ndarray, "M L"]
    takes_part_MLR: Bool[ndarray, "M L R"]
    sent_MLR: Int64[ndarray, "M L R"]
    received_MLR: Int64[ndarray, "M L R"]
    from_host_MLR: Int64[ndarray, "M L R"]
    bytes_each: int


def copy_costs(
    plan: StepPlan, cluster: Cluster, expert: ExpertShape, *, from_pool: bool = False
) -> tuple[CopyCosts, CopyCosts, CopyCosts]:
    """Time pushes before forward, pushes again before backward, and gradients home after it.

    from_pool   the pushes before forward are copies out of host memory, as in a pass without gradients that has a pool
    """
    forward, backward, gradients = pushed_copies(plan)
    return (
        _copies(plan, forward, cluster, expert.weight_bytes, from_pool=from_pool),
        _copies(plan, backward, cluster, expert.weight_bytes),
        _copies(plan, gradients, cluster, expert.gradient_bytes, to_home=True),
    )


def _copies(
    plan: StepPlan,
    copied_MLRB: Bool[ndarray, "M L R B"],
    cluster: Cluster,
    bytes_each: int,
    *,
    to_home: bool = False,
    from_pool: bool = False,
) -> CopyCosts:
    m_X, layer_X, rank_X, slot_X = np.nonzero(copied_MLRB)
    home_X = plan.home_LE[layer_X, plan.replica_MLRB[m_X, layer_X, rank_X, slot_X]].astype(np.int64)

    def count(rank_of_X: ndarray) -> Int64[ndarray, "M L R"]:
        counts_MLR = np.zeros(copied_MLRB.shape[:3], dtype=np.int64)
        np.add.at(counts_MLR, (m_X, layer_X, rank_of_X), 1)
        return counts_MLR

    from_X, to_X = (rank_X, home_X) if to_home else (home_X, rank_X)
    received_MLR = count(to_X)
    nothing_MLR = np.zeros_like(received_MLR)
    sent_MLR = nothing_MLR if from_pool else count(from_X)
    inside_ML, network_ML = copy_seconds_of_links(
        plan, copied_MLRB, cluster, bytes_each, to_home=to_home, from_pool=from_pool
    )
    return CopyCosts(
        seconds_ML=np.maximum(inside_ML, network_ML),
        network_ML=network_ML,
        takes_part_MLR=(sent_MLR > 0) | (received_MLR > 0),
        sent_MLR=sent_MLR,
        received_MLR=received_MLR,
        from_host_MLR=received_MLR if from_pool else nothing_MLR,
        bytes_each=bytes_each,
    )


def handover_seconds(model: ModelShape, cluster: Cluster, rows_MR: Float64[ndarray, "M R"]) -> Float64[ndarray, " M"]:
    """Time what a pipeline stage hands to the next: hidden states of the busiest rank's tokens, over the network."""
    num_bytes_M = rows_MR.max(axis=1, initial=0.0) * model.expert.row_bytes
    return np.maximum(cluster.inter_send.seconds(num_bytes_M), cluster.inter_receive.seconds(num_bytes_M))


def owned_parameters(
    model: ModelShape, layout: ParallelLayout, num_layers: int, *, first: bool, last: bool
) -> tuple[int, int]:
    """Count the weights of a rank of one stage: outside of routed experts (on every rank of it), and of its experts.

    num_layers    with experts, of the stage
    first, last   whether it holds dense layers and the input embedding; the output matrix
    """
    shared = num_layers * model.always_parameters
    shared += first * (model.dense_layers * model.dense_layer_parameters + model.head_parameters)
    shared += last * model.head_parameters * (0 if model.tied_embeddings and first else 1)
    return shared, num_layers * model.experts // layout.expert_parallel * model.expert.parameters


def gradient_reduction_seconds(cluster: Cluster, layout: ParallelLayout, shared: int, experts: int) -> float:
    """Time the sum of gradients over the ranks that hold the same weights, fp32: rings or trees, what takes less.

    A ring of n sends 2 (n - 1) / n x bytes in 2 (n - 1) messages, a double binary tree 2 x bytes in 2 log2(n)
    (NCCL has both). Shared weights are on all ranks of a stage: they go through the ranks of a node and through the
    nodes at once, and each of the node's G network links carries a G-th of the bytes. Experts are on one rank of each
    expert-parallel group, which are on other nodes: all bytes of a rank go through its own link.

    cluster   of one expert-parallel group
    """
    G, nodes = cluster.ranks_per_node, cluster.num_nodes * layout.data_parallel

    def summed(link: Link, n: int, num_bytes: float) -> float:
        ring = link.seconds(2 * (n - 1) / n * num_bytes, 2 * (n - 1))
        tree = link.seconds(2 * num_bytes, 2 * (n - 1).bit_length())
        return float(min(ring, tree)) if n > 1 else 0.0

    of_shared = max(summed(cluster.intra, G, 4.0 * shared), summed(cluster.inter_send, nodes, 4.0 * shared / G))
    return of_shared + summed(cluster.inter_send, layout.data_parallel, 4.0 * experts)


def optimizer_seconds(cluster: Cluster, layout: ParallelLayout, shared: int, experts: int) -> float:
    """Time AdamW over the rank's share of the weights it holds together with others: 30 bytes each, bound by memory.

    raises    ClusterError when the machine's memory bandwidth is not known
    """
    own = shared / (layout.data_parallel * layout.expert_parallel) + experts / layout.data_parallel
    return own * _OPTIMIZER_BYTES / memory_bandwidth(cluster)


def memory_bandwidth(cluster: Cluster) -> float:
    """Return bytes per second of a rank's own memory.

    raises    ClusterError when it is not known
    """
    if not cluster.memory_bytes_per_second:
        raise ClusterError(
            f"cluster {cluster.name!r} does not say memory_bytes_per_second, which the optimizer and decoding are "
            "bound by: add it to the cluster file"
        )
    return cluster.memory_bytes_per_second


def weight_sync_seconds(model: ModelShape, cluster: Cluster, engine_ranks: int) -> float:
    """Time new weights on their way to rollout engines on the same machine: every engine takes the whole model once.

    A rank of an engine of `engine_ranks` receives 1 / engine_ranks of all weights, and sends as much on average.
    """
    num_bytes = model.parameters * model.expert.bytes_per_value / engine_ranks
    return max(cluster.inter_send.seconds(num_bytes), cluster.inter_receive.seconds(num_bytes))
