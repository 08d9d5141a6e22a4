"""Prices: choose the replicas with the least seconds for each (micro-batch, layer).

A replica pays off if it shortens compute and exchange by more than the part of its two pushes and its gradient that
attention does not hide. So replicas are chosen for several tolerances, each with fewer copies than the last, and every
(micro-batch, layer) takes the cheapest; no replicas is one choice (ForeMoE's fallback, arXiv 2606.11867).
If copies may cross nodes, copies that keep a node's own tokens inside it are priced too
(`relibra.planning.replicas.traffic_copies`): as many as attention hides at their homes, half and twice that.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from jaxtyping import Float64, Int, Int16, Int32, Int64
from numpy import ndarray

from relibra.planning.balancer import PlacementRequest
from relibra.planning.costs.compute import mean_attention_seconds
from relibra.planning.costs.copies import relocation_seconds
from relibra.planning.costs.layer_costs import layer_costs
from relibra.planning.loads import home_rank_load, replica_load_change
from relibra.planning.replicas.replication import replicate
from relibra.planning.replicas.traffic_copies import replicate_for_traffic
from relibra.planning.search.deadline import Deadline
from relibra.planning.search.parallel_map import available_cores, parallel_map
from relibra.routing.demand import ScheduledDemand

TOLERANCE_SHARES = (0.0, 0.5, 1.0, 2.0, 3.0, 5.0)
"""Tolerances that single (micro-batches, layers) may take, as multiples of the budget's."""
TOLERANCES = (0.1,)
"""Tolerances that are priced, beside the budget's own and no replicas."""


Replicas = tuple[Int16[ndarray, "M L R B"], Int32[ndarray, "M L R B"]]
"""Experts in slots, and the token-slots of each."""


def choose_replicas(
    request: PlacementRequest,
    demand: ScheduledDemand,
    home_LE: Int64[ndarray, "L E"],
    tolerance: float,
    *,
    cross_node: bool,
) -> tuple[Int16[ndarray, "M L R B"], Int32[ndarray, "M L R B"]]:
    """Return replicas of every micro-batch and layer at one tolerance: some 10 microseconds each."""
    cluster, budget = request.cluster, request.budget
    load_MLE = demand.load_MLE

    def place(layer: int) -> tuple[ndarray, ndarray]:
        return replicate(
            np.ascontiguousarray(load_MLE[:, layer]),
            home_LE[layer],
            cluster.num_ranks,
            cluster.ranks_per_node,
            slots=budget.slots,
            tolerance=tolerance,
            cross_node=cross_node,
        )

    replica_MLRB, quota_MLRB = _empty_slots(demand, budget.slots)
    for layer, (replica_MRB, quota_MRB) in enumerate(parallel_map(place, len(home_LE), budget.threads)):
        replica_MLRB[:, layer], quota_MLRB[:, layer] = replica_MRB, quota_MRB
    return replica_MLRB, quota_MLRB


def _empty_slots(demand: ScheduledDemand, slots: int) -> Replicas:
    """Return spare slots without replicas for the micro-batches and layers of a demand."""
    shape = (*demand.tokens_MLRE.shape[:3], slots)
    return np.full(shape, -1, dtype=np.int16), np.zeros(shape, dtype=np.int32)


def evenest_replicas(request: PlacementRequest, demand: ScheduledDemand, home_LE: Int64[ndarray, "L E"]) -> Replicas:
    """Return replicas for even loads: as a whole within the budget's tolerance, with few copies.

    Each (micro-batch, layer) takes the tolerance at which its busiest rank and a price per copy add up to least. The
    price, one for all, is the highest at which the busiest ranks together stay within the tolerance of the budget.
    """
    tolerance, cross_node = request.budget.tolerance, request.budget.cross_node_copies
    made = [
        choose_replicas(request, demand, home_LE, tolerance * share, cross_node=cross_node)
        for share in (TOLERANCE_SHARES if tolerance else (0.0,))
    ]
    home_MLR = home_rank_load(demand.load_MLE, home_LE, request.cluster.num_ranks)
    tops_TML = np.stack([(home_MLR + replica_load_change(*one, home_LE)).max(axis=2, initial=0) for one in made])
    copies_TML = np.stack([(replica_MLRB >= 0).sum(axis=(2, 3)) for replica_MLRB, _ in made])
    most = (1 + tolerance) * tops_TML[0].sum()
    low, high = 0.0, float(tops_TML.max(initial=1))
    for _ in range(40):
        price = (low + high) / 2
        chosen_1ML = np.argmin(tops_TML + price * copies_TML, axis=0)[None]
        within = np.take_along_axis(tops_TML, chosen_1ML, axis=0).sum() <= most
        low, high = (price, high) if within else (low, price)
    chosen_ML = np.argmin(tops_TML + low * copies_TML, axis=0)
    replica, quota = (array.copy() for array in made[0])
    for number, (new_replica, new_quota) in enumerate(made):
        replica[chosen_ML == number], quota[chosen_ML == number] = (
            new_replica[chosen_ML == number],
            new_quota[chosen_ML == number],
        )
    return replica, quota


def copies_against_traffic(
    request: PlacementRequest,
    demand: ScheduledDemand,
    home_LE: Int64[ndarray, "L E"],
    traffic_slots: int,
    most_per_home: int,
) -> tuple[Int16[ndarray, "M L R B"], Int32[ndarray, "M L R B"]]:
    """Return replicas that keep tokens inside their node; the remaining slots balance the remaining load."""
    cluster, budget = request.cluster, request.budget

    def place(layer: int) -> tuple[ndarray, ndarray]:
        return replicate_for_traffic(
            demand.tokens_MLRE[:, layer],
            home_LE[layer],
            cluster.ranks_per_node,
            slots=budget.slots,
            traffic_slots=traffic_slots,
            most_per_home=most_per_home,
            tolerance=budget.tolerance,
        )

    layers = parallel_map(place, len(home_LE), budget.threads)
    replica, quota = (np.stack([pair[part] for pair in layers], axis=1) for part in (0, 1))
    return replica, quota


def copies_hidden(request: PlacementRequest, demand: ScheduledDemand) -> int:
    """Return how many copies on other nodes a home rank can send while attention runs, forward and backward.

    Weights leave before the forward pass and before the backward pass, which takes twice as long; gradients arrive
    after it.
    """
    cluster, expert = request.cluster, request.expert
    if not cluster.hides_copies:
        return 0
    attention = mean_attention_seconds(demand, cluster, expert)
    out = expert.weight_bytes / cluster.inter_send.bytes_per_second
    back = expert.gradient_bytes / cluster.inter_receive.bytes_per_second
    return int(min(attention / out, 2 * attention / (out + back)))


def replica_choices(
    request: PlacementRequest, demand: ScheduledDemand, home_LE: Int64[ndarray, "L E"]
) -> list[Callable[[], Replicas]]:
    """Return functions that choose replicas, fewest copies first: at equal seconds the first one wins."""
    budget, cluster = request.budget, request.cluster

    choices: list[Callable[[], Replicas]] = [lambda: _empty_slots(demand, request.budget.slots)]
    if not budget.slots:
        return choices
    tolerances = sorted({t for t in (budget.tolerance, *TOLERANCES) if t >= budget.tolerance}, reverse=True)
    may_cross = budget.cross_node_copies and cluster.num_nodes > 1
    choices += [
        partial(choose_replicas, request, demand, home_LE, tolerance, cross_node=cross_node)
        for cross_node in ((False, True) if may_cross else (False,))
        for tolerance in tolerances
    ]
    if budget.slots > 1 and may_cross:
        hidden = max(1, copies_hidden(request, demand))  # one exposed copy may save more than it costs
        choices += [
            partial(copies_against_traffic, request, demand, home_LE, budget.slots // 2, most)
            for most in sorted({hidden // 2, hidden, 2 * hidden} - {0})
        ]
    return choices


def cheapest_replicas(
    request: PlacementRequest, demand: ScheduledDemand, home_LE: Int64[ndarray, "L E"], clock: Deadline, *, share: float
) -> tuple[Int16[ndarray, "M L R B"], Int32[ndarray, "M L R B"], Float64[ndarray, "M L"]]:
    """Return the cheapest replicas per micro-batch and layer, and their seconds.

    The seconds are compute, exchange and exposed copies, without moves of homes.

    share   of the planning time that may be used. No replicas and the first choices, one per thread, are always priced,
            further ones only if they are expected to end within it
    """
    choices = replica_choices(request, demand, home_LE)
    together = len(choices) if clock.seconds is None else max(2, request.budget.threads or available_cores())
    best: tuple[ndarray, ndarray, ndarray] | None = None
    longest = 0.0
    for first in range(0, len(choices), together):
        if first and not clock.allows(share, estimate=longest):
            break
        begun = clock.elapsed()
        made = [choose() for choose in choices[first : first + together]]
        price = partial(_price, request, demand, home_LE, made)
        for (replica, quota), seconds_ML in zip(
            made, parallel_map(price, len(made), request.budget.threads), strict=True
        ):
            if best is None:
                best = replica, quota, seconds_ML
                continue
            cheaper_ML = seconds_ML < best[2]
            for chosen, new in zip(best, (replica, quota, seconds_ML), strict=True):
                chosen[cheaper_ML] = new[cheaper_ML]
        longest = max(longest, clock.elapsed() - begun)
    assert best is not None, "no replicas are always among the choices"
    return best


def _price(
    request: PlacementRequest,
    demand: ScheduledDemand,
    home_LE: Int64[ndarray, "L E"],
    made: list[Replicas],
    number: int,
) -> Float64[ndarray, "M L"]:
    return seconds(request, demand, home_LE, *made[number])


def seconds(
    request: PlacementRequest,
    demand: ScheduledDemand,
    home_LE: Int[ndarray, "L E"],
    replica_MLRB: Int16[ndarray, "M L R B"],
    quota_MLRB: Int32[ndarray, "M L R B"],
    *,
    threads: int | None = 1,
) -> Float64[ndarray, "M L"]:
    """Return compute, exchange and exposed copies per micro-batch and layer."""
    cluster, expert = request.cluster, request.expert
    resident_slots = request.budget.resident_slots or 0
    placement = request.placement(
        home_LE, replica_MLRB, quota_MLRB, schedule=demand, resident_slots=resident_slots, scope="cluster"
    )
    costs = layer_costs(placement, demand, cluster, expert, threads=threads)
    exposed_ML = costs.exposed_copies_ML(mean_attention_seconds(demand, cluster, expert))
    return costs.compute_ML + costs.exchange_ML + exposed_ML


def all_moves_seconds(request: PlacementRequest, home_LE: Int[ndarray, "L E"]) -> float:
    """Return the seconds of moving experts from the previous homes to these: of the busiest link, undivided."""
    homes = request.previous.with_home_ranks(home_LE.astype(np.int16))
    return relocation_seconds(request.previous, homes, request.cluster, request.expert)
