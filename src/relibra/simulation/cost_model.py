"""Seconds of what a plan does not decide: attention rows, handover, gradient reduction, optimizer, weight sync.

What a plan decides is in `planning.costs`. Every figure is a model.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float64
from numpy import ndarray

from relibra.cluster import Cluster, Link
from relibra.errors import ClusterError
from relibra.planning.plan import StepPlan
from relibra.routing.demand import ScheduledDemand
from relibra.simulation.layout import ParallelLayout
from relibra.simulation.model_shape import ModelShape

_OPTIMIZER_BYTES = 30
"""Bytes that AdamW touches per parameter: reads gradient, master and two moments (16), writes these three (12) and the
bf16 weight (2)."""
STATE_BYTES = 12
"""Bytes of a parameter's fp32 master and two moments."""


class Gathers(NamedTuple):
    """Seconds or bytes of all-gathers of one stage.

    root    embedding and output matrix, before the forward pass; they stay until the backward pass ends
    first   the first layer with the dense layers before it, in each pass
    each    each other layer, in each pass
    """

    root: float
    first: float
    each: float


def rows_and_scores(
    plan: StepPlan, demand: ScheduledDemand, model: ModelShape
) -> tuple[Float64[ndarray, "M R"], Float64[ndarray, "M R"]]:
    """Return tokens per micro-batch and source rank, and the flops of their attention scores per layer, forward.

    Tokens of a sample = its token-slots / top_k. Samples do not see each other, but for shared prompts (`attended_S`).
    """
    M, R = plan.replica_MLRB.shape[0], plan.num_ranks
    rows_S = demand.counts_SLE[:, 0].sum(axis=1, dtype=np.int64) // model.top_k
    kept_S = plan.micro_batch_S >= 0
    where = (plan.micro_batch_S[kept_S], plan.rank_S[kept_S])
    rows_MR, flops_MR = np.zeros((M, R)), np.zeros((M, R))
    np.add.at(rows_MR, where, rows_S[kept_S])
    attended_S = None if demand.attended_S is None else demand.attended_S[kept_S]
    np.add.at(flops_MR, where, model.score_flops(rows_S[kept_S], attended_S))
    return rows_MR, flops_MR


def handover_seconds(model: ModelShape, cluster: Cluster, rows_MR: Float64[ndarray, "M R"]) -> Float64[ndarray, " M"]:
    """Return the seconds of sending hidden states to the next stage: the busiest rank's tokens, over the network."""
    num_bytes_M = rows_MR.max(axis=1, initial=0.0) * model.expert.row_bytes
    return np.maximum(cluster.inter_send.seconds(num_bytes_M), cluster.inter_receive.seconds(num_bytes_M))


def owned_parameters(
    model: ModelShape, layout: ParallelLayout, num_layers: int, *, first: bool, last: bool
) -> tuple[int, int]:
    """Return the weights of a rank: those outside of routed experts (equal on all ranks of a stage), and its experts.

    num_layers   MoE layers of the stage
    first        whether the stage holds the dense layers and the input embedding
    last         whether it holds the output matrix
    """
    shared = num_layers * model.non_expert_parameters
    shared += first * (model.dense_layers * model.dense_layer_parameters + model.head_parameters)
    shared += last * model.head_parameters * (0 if model.tied_embeddings and first else 1)
    return shared, num_layers * model.experts // layout.expert_parallel * model.expert.parameters


def gathered_bytes(model: ModelShape, *, first: bool, last: bool) -> Gathers:
    """Return the bytes of a stage's weights outside of routed experts that FSDP gathers on every rank.

    first, last   as for `owned_parameters`
    """
    heads = first + last * (0 if model.tied_embeddings and first else 1)
    dense = first * model.dense_layers * model.dense_layer_parameters
    each, num_bytes = model.non_expert_parameters, model.expert.bytes_per_value
    return Gathers(
        root=float(num_bytes * heads * model.head_parameters),
        first=float(num_bytes * (each + dense)),
        each=float(num_bytes * each),
    )


def gradient_reduction_seconds(
    cluster: Cluster, layout: ParallelLayout, shared: int, experts: int, *, sharded: bool = False
) -> float:
    """Return the seconds of the fp32 gradient all-reduce over ranks with equal weights: rings or trees, the faster one.

    A ring of n sends 2 (n - 1) / n x bytes in 2 (n - 1) messages, a double binary tree 2 x bytes in 2 log2(n)
    (NCCL has both). Shared weights are on all ranks of a stage: they go through the ranks of a node and through the
    nodes at once, and each of the node's G network links carries a G-th of the bytes. An expert is on one rank of each
    expert-parallel group, and groups are on different nodes: its bytes all go through the link of that rank.

    cluster   of one expert-parallel group
    sharded   shared weights are spread over the ranks of each group (FSDP, replicated over groups): a reduce-scatter in
              the group, then a sum over groups of each rank's part
    """
    G, nodes, groups = cluster.ranks_per_node, cluster.num_nodes * layout.data_parallel, layout.data_parallel

    def all_reduce(link: Link, n: int, num_bytes: float) -> float:
        ring = link.seconds(2 * (n - 1) / n * num_bytes, 2 * (n - 1))
        tree = link.seconds(2 * num_bytes, 2 * (n - 1).bit_length())
        return float(min(ring, tree)) if n > 1 else 0.0

    if sharded:
        of_shared = spread_seconds(cluster, 4.0 * shared)
        of_shared += all_reduce(cluster.inter_send, groups, 4.0 * shared / layout.expert_parallel)
    else:
        of_shared = max(
            all_reduce(cluster.intra, G, 4.0 * shared), all_reduce(cluster.inter_send, nodes, 4.0 * shared / G)
        )
    return of_shared + all_reduce(cluster.inter_send, groups, 4.0 * experts)


def spread_seconds(cluster: Cluster, num_bytes: float) -> float:
    """Return the seconds of an all-gather of bytes spread over the ranks of a group, or of the reduce-scatter back.

    Inside nodes and between them at once, as for shared gradients: (n - 1) / n of the bytes, a G-th of that on each
    network link, in log2(n) messages (NCCL's PAT).
    """
    G, N = cluster.ranks_per_node, cluster.num_nodes
    inside = cluster.intra.seconds((G - 1) / G * num_bytes, (G - 1).bit_length())
    between = cluster.inter_send.seconds((N - 1) / N * num_bytes / G, (N - 1).bit_length())
    return max(inside, between)


def optimizer_seconds(cluster: Cluster, layout: ParallelLayout, shared: int, experts: int) -> float:
    """Return the seconds of AdamW over the rank's shard of its weights: 30 bytes per weight, bound by memory.

    raises    ClusterError when the machine's memory bandwidth is not known
    """
    return owned_share(layout, shared, experts) * _OPTIMIZER_BYTES / memory_bandwidth(cluster)


def owned_share(layout: ParallelLayout, shared: int, experts: int) -> float:
    """Return the number of parameters that a rank updates: ranks with equal weights update an equal share each."""
    return shared / (layout.data_parallel * layout.expert_parallel) + experts / layout.data_parallel


def memory_bandwidth(cluster: Cluster) -> float:
    """Return bytes per second of a rank's own memory.

    raises    ClusterError when it is not known
    """
    if not cluster.memory_bytes_per_second:
        raise ClusterError(
            f"cluster {cluster.name!r} has no memory_bytes_per_second, which limits the optimizer and decoding: "
            "add it to the cluster file"
        )
    return cluster.memory_bytes_per_second


def weight_sync_seconds(model: ModelShape, cluster: Cluster, engine_ranks: int) -> float:
    """Return the seconds of sending new weights to rollout engines on the same machine: each receives the whole model.

    A rank of an engine of `engine_ranks` receives 1 / engine_ranks of all weights, and sends as much on average.
    """
    num_bytes = model.parameters * model.expert.bytes_per_value / engine_ranks
    return max(cluster.inter_send.seconds(num_bytes), cluster.inter_receive.seconds(num_bytes))
