"""Small requests for balancers, and a checker of their placements that shares no code with any of them."""

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from relibra import Demand
from relibra.cluster import Topology, cluster_preset
from relibra.planning.balancer import PlacementRequest
from relibra.planning.budget import Budget
from relibra.planning.costs.expert_shape import ExpertShape
from relibra.planning.placement import static_homes

SMALL_EXPERT = ExpertShape(hidden=8, width=2)


def ask(tokens_MLRE, nodes, *, slots, total_LE=None, expert=SMALL_EXPERT, previous_map=None, memory_gib=1.0, **budget):
    """Make a request of scheduled tokens; homes before the step are the static layout unless given."""
    tokens_MLRE = np.asarray(tokens_MLRE, dtype=np.int32)
    M, L, R, E = tokens_MLRE.shape
    counts_SLE = tokens_MLRE.swapaxes(1, 2).reshape(M * R, L, E)
    micro_batch_S, rank_S = np.divmod(np.arange(M * R, dtype=np.int32), np.int32(R))
    demand = Demand(
        counts_SLE=counts_SLE, layer_ids=np.arange(L, dtype=np.int32), sample_ids=np.arange(M * R)
    ).with_schedule(micro_batch_S, rank_S, R)
    if total_LE is None:
        total_LE = tokens_MLRE.sum(axis=(0, 2))
    static = static_homes(Topology(num_nodes=nodes, ranks_per_node=R // nodes), demand.layer_ids, E)
    return PlacementRequest(
        demand=demand,
        cluster=cluster_preset("h100x8", R, R // nodes),
        budget=Budget(slots=slots, **budget),
        expert=expert,
        memory_gib=memory_gib,
        previous=static if previous_map is None else replace(static, physical_to_logical_map=previous_map),
        total_LE=np.asarray(total_LE, dtype=np.float64),
    )


def spread(load_MLE, num_ranks):
    """Share loads evenly over source ranks; what is left over goes to the first ranks."""
    share, rest = np.divmod(np.asarray(load_MLE)[:, :, None], num_ranks)
    return share + (np.arange(num_ranks)[:, None] < rest)


@st.composite
def requests(draw):
    """Draw requests with zero loads, one hot expert, no slots, one rank, one node, empty micro-batches, E = R."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    nodes, per_node, per_rank = (
        draw(st.sampled_from([1, 2, 3])),
        draw(st.sampled_from([1, 2, 4])),
        draw(st.integers(1, 3)),
    )
    M, L, R = draw(st.integers(1, 3)), draw(st.integers(1, 2)), nodes * per_node
    E = R * per_rank
    largest = draw(st.sampled_from([0, 3, 1000]))
    tokens_MLRE = rng.integers(0, largest + 1, (M, L, R, E)) * (
        rng.random((M, L, 1, E)) < draw(st.sampled_from([0.3, 1]))
    )
    if draw(st.booleans()):
        tokens_MLRE[:, :, :, rng.integers(E)] *= 50
    if draw(st.booleans()):
        tokens_MLRE[rng.integers(M)] = 0
    previous_map = np.stack([rng.permutation(E) for _ in range(L)]).astype(np.int16) if draw(st.booleans()) else None
    return ask(
        tokens_MLRE,
        nodes,
        slots=draw(st.integers(0, 3)),
        total_LE=rng.integers(0, 100, (L, E)) if draw(st.booleans()) else None,
        previous_map=previous_map,
        move_homes=draw(st.booleans()),
        pack_samples=draw(st.booleans()),
        memory_gib=draw(st.sampled_from([0.0, 1.0])),
    )


def rank_loads(request, placement):
    """Count what every rank computes, one replica after the other, and check every rule of a placement on the way."""
    demand = request.demand.with_schedule(placement.micro_batch_S, placement.rank_S, request.cluster.num_ranks)
    M, L, R, E = demand.tokens_MLRE.shape
    B, G = placement.slots, request.cluster.ranks_per_node
    assert placement.home_LE.shape == (L, E)
    assert placement.home_LE.dtype == placement.replica_MLRB.dtype == np.int16
    assert placement.quota_MLRB.dtype == np.int32
    assert placement.replica_MLRB.shape == placement.quota_MLRB.shape == (M, L, R, B)
    load_MLE = demand.load_MLE
    result = np.zeros((M, L, R), dtype=np.int64)
    for m, layer in np.ndindex(M, L):
        home_E = placement.home_LE[layer]
        assert np.bincount(home_E, minlength=R).tolist() == [E // R] * R
        left_E = load_MLE[m, layer].copy()
        for r in range(R):
            held = set(np.flatnonzero(home_E == r).tolist())
            for b in range(B):
                expert, quota = int(placement.replica_MLRB[m, layer, r, b]), int(placement.quota_MLRB[m, layer, r, b])
                if expert < 0:
                    assert (expert, quota) == (-1, 0)
                    continue
                assert expert not in held
                held.add(expert)
                assert quota > 0 or (placement.resident and quota == 0)
                assert placement.scope == "cluster" or home_E[expert] // G == r // G
                left_E[expert] -= quota
                result[m, layer, r] += quota
        assert (left_E >= 0).all()
        np.add.at(result[m, layer], home_E, left_E)
        assert result[m, layer].sum() == load_MLE[m, layer].sum()
    return result


def step_skew(request, placement):
    """Mean over layers of the sum of busiest ranks / the sum of mean ranks."""
    load_MLR = rank_loads(request, placement)
    return float((load_MLR.max(axis=2).sum(axis=0) / load_MLR.mean(axis=2).sum(axis=0)).mean())
