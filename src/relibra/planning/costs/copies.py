"""`CopyCosts`: seconds and counts of experts that travel, as weights to replicas, gradients home, or to new homes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import no_type_check

import numpy as np
from jaxtyping import Bool, Float64, Int64
from numpy import ndarray

from relibra.cluster import Cluster, Link
from relibra.planning.costs.expert_shape import ExpertShape
from relibra.planning.placement import Homes, Placement
from relibra.planning.traffic.traffic import BETWEEN, INSIDE
from relibra.routing.compiled import compiled


@dataclass(frozen=True, kw_only=True, eq=False)
class CopyCosts:
    """Copies of experts in one kind of transfer: weights out before a pass, or gradients home after it.

    seconds_ML              of the busiest rank, over whichever link is slowest
    network_ML              of the busiest rank between nodes alone, on links that rows use too
    takes_part_MLR          ranks that send or receive
    sent_MLR, received_MLR  experts that leave and enter a rank
    network_sent_MLR        of those sent, how many go to other nodes
    bytes_each              of one expert
    """

    seconds_ML: Float64[ndarray, "M L"]
    network_ML: Float64[ndarray, "M L"]
    takes_part_MLR: Bool[ndarray, "M L R"]
    sent_MLR: Int64[ndarray, "M L R"]
    received_MLR: Int64[ndarray, "M L R"]
    network_sent_MLR: Int64[ndarray, "M L R"]
    bytes_each: int

    def without_last(self) -> CopyCosts:
        """Return copies without those of the last layer that has any, per micro-batch."""
        L = self.seconds_ML.shape[1]
        has_ML: ndarray = np.any(self.takes_part_MLR, axis=2)
        last_M = L - 1 - np.argmax(has_ML[:, ::-1], axis=1)
        keep_ML: ndarray = np.not_equal(np.arange(L), last_M[:, None])
        counts = ("takes_part_MLR", "sent_MLR", "received_MLR", "network_sent_MLR")
        return replace(
            self,
            **{name: getattr(self, name) * keep_ML for name in ("seconds_ML", "network_ML")},
            **{name: getattr(self, name) * keep_ML[..., None] for name in counts},
        )


def copy_costs(plan: Placement, cluster: Cluster, expert: ExpertShape) -> tuple[CopyCosts, CopyCosts, CopyCosts]:
    """Return the pushes before forward, the pushes again before backward, and the gradients sent home after it.

    One transfer per copy, each with the latency of a message, as the executor makes them: homes send weights, one
    replica after another, and receive gradients, by `intra` where home and replica share a node, else out through
    `inter_send` of one and in through `inter_receive` of the other.
    """
    forward, backward, gradients = pushed_copies(plan)
    first = _count_copies(plan, forward)
    again, returned = (first if copied is forward else _count_copies(plan, copied) for copied in (backward, gradients))
    home_2MLR, replica_2MLR = returned
    return (
        _copies(*first, cluster, expert.weight_bytes),
        _copies(*again, cluster, expert.weight_bytes),
        _copies(replica_2MLR, home_2MLR, cluster, expert.returned_bytes(plan.gradient_wire)),
    )


def pushed_copies(
    plan: Placement,
) -> tuple[Bool[ndarray, "M L R B"], Bool[ndarray, "M L R B"], Bool[ndarray, "M L R B"]]:
    """Return which replicas receive weights before forward, again before backward, and return a gradient after it.

    Shared slots are filled for each pass. Resident slots are filled when an expert comes to a rank, keep it until
    backward, add up gradients over micro-batches and return them when it leaves the rank. No expert stays from
    one group of micro-batches to the next: an optimizer step between them changes the weights.
    """
    used_MLRB = plan.replica_MLRB >= 0
    if not plan.resident:
        return used_MLRB, used_MLRB, used_MLRB
    comes_MLRB, again_MLRB, leaves_MLRB = used_MLRB.copy(), np.zeros_like(used_MLRB), used_MLRB.copy()
    group_M = np.zeros(len(used_MLRB), dtype=np.int32) if plan.group_M is None else plan.group_M
    stays = (np.diff(group_M) == 0)[:, None, None, None]
    before, after = plan.replica_MLRB[:-1], plan.replica_MLRB[1:]
    for b in range(plan.slots):  # whichever slot of its rank the expert is in
        comes_MLRB[1:] &= ~(stays & (after == before[..., b : b + 1]))
        leaves_MLRB[:-1] &= ~(stays & (before == after[..., b : b + 1]))
    return comes_MLRB, again_MLRB, leaves_MLRB


def _count_copies(
    plan: Placement, copied_MLRB: Bool[ndarray, "M L R B"]
) -> tuple[Int64[ndarray, "2 M L R"], Int64[ndarray, "2 M L R"]]:
    """Return the number of copies by the rank of the home and by the rank of the replica, inside and between nodes."""
    sent_2MLR, received_2MLR = np.zeros((2, 2, *copied_MLRB.shape[:3]), dtype=np.int64)
    _add_copies(copied_MLRB, plan.replica_MLRB, plan.home_LE, plan.ranks_per_node, sent_2MLR, received_2MLR)
    return sent_2MLR, received_2MLR


@compiled
@no_type_check
def _add_copies(copied_MLRB, replica_MLRB, home_LE, ranks_per_node, sent_2MLR, received_2MLR) -> None:
    M, L, R, B = copied_MLRB.shape
    for m in range(M):
        for layer in range(L):
            for r in range(R):
                for b in range(B):
                    if copied_MLRB[m, layer, r, b]:
                        home = home_LE[layer, replica_MLRB[m, layer, r, b]]
                        link = BETWEEN if home // ranks_per_node != r // ranks_per_node else INSIDE
                        sent_2MLR[link, m, layer, home] += 1
                        received_2MLR[link, m, layer, r] += 1


def _copies(
    sent_2MLR: Int64[ndarray, "2 M L R"], received_2MLR: Int64[ndarray, "2 M L R"], cluster: Cluster, bytes_each: int
) -> CopyCosts:
    sent_2ML, received_2ML = (count_2MLR.max(axis=-1, initial=0) for count_2MLR in (sent_2MLR, received_2MLR))

    def seconds_ML(link: Link, copies_ML: Int64[ndarray, "M L"]) -> Float64[ndarray, "M L"]:
        return link.seconds(copies_ML * float(bytes_each), copies_ML)

    inside_ML = seconds_ML(cluster.intra, np.maximum(sent_2ML[INSIDE], received_2ML[INSIDE]))
    network_ML = np.maximum(
        seconds_ML(cluster.inter_send, sent_2ML[BETWEEN]), seconds_ML(cluster.inter_receive, received_2ML[BETWEEN])
    )
    sent_MLR, received_MLR = sent_2MLR.sum(axis=0), received_2MLR.sum(axis=0)
    return CopyCosts(
        seconds_ML=np.maximum(inside_ML, network_ML),
        network_ML=network_ML,
        takes_part_MLR=(sent_MLR > 0) | (received_MLR > 0),
        sent_MLR=sent_MLR,
        received_MLR=received_MLR,
        network_sent_MLR=sent_2MLR[BETWEEN],
        bytes_each=bytes_each,
    )


def memory_of_slots(slots: int, layers: int, expert: ExpertShape, *, trained: bool = True) -> int:
    """Return the bytes of so many slots in each of so many layers: weights, and gradients in single precision."""
    return slots * layers * (expert.weight_bytes + trained * expert.gradient_bytes)


def slot_bytes(plan: Placement, expert: ExpertShape, *, num_layers: int | None = None, trained: bool = True) -> int:
    """Return the memory of a rank's spare slots; 0 for a plan without copies, which needs none.

    num_layers   layers on the rank; None: all of the plan
    trained      fp32 gradients beside the weights
    """
    layers = (len(plan.layer_ids) if num_layers is None else num_layers) if plan.resident else 1
    return memory_of_slots(plan.slots if plan.num_copies else 0, layers, expert, trained=trained)


def relocation_seconds(before: Homes, after: Homes, cluster: Cluster, expert: ExpertShape) -> float:
    """Return the seconds of moving expert state to new homes: the busiest rank's bytes over the slowest kind of link.

    One message per layer.
    """
    layer_X, expert_X = np.nonzero(before.home_LE != after.home_LE)
    from_X, to_X = before.home_LE[layer_X, expert_X], after.home_LE[layer_X, expert_X]
    inside_X = from_X // after.ranks_per_node == to_X // after.ranks_per_node

    def busiest(ranks: ndarray) -> float:
        return float(np.bincount(ranks).max(initial=0) * expert.state_bytes)

    messages = len(np.unique(layer_X[inside_X]))
    inside = cluster.intra.seconds(max(busiest(from_X[inside_X]), busiest(to_X[inside_X])), messages)
    messages = len(np.unique(layer_X[~inside_X]))
    sent = cluster.inter_send.seconds(busiest(from_X[~inside_X]), messages)
    return max(inside, sent, cluster.inter_receive.seconds(busiest(to_X[~inside_X]), messages))
