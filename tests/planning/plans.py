"""Random legal plans with their demand, for tests that need any plan, good or bad."""

import numpy as np
from hypothesis import strategies as st

from relibra import Demand
from relibra.cluster import Topology
from relibra.planning.placement import static_homes
from relibra.planning.plan import StepPlan


@st.composite
def planned_steps(draw, max_slots=2):
    """Draw a `StepPlan` and its scheduled `Demand`: zero loads, no slots, one rank, several nodes, left-out samples."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return planned_step(
        rng,
        nodes=draw(st.integers(1, 2)),
        per_node=draw(st.sampled_from([1, 2, 4])),
        experts_per_rank=draw(st.integers(1, 3)),
        micro_batches=draw(st.integers(1, 3)),
        layers=draw(st.integers(1, 3)),
        slots=draw(st.integers(0, max_slots)),
        resident=draw(st.booleans()),
    )


def planned_step(rng, *, nodes=2, per_node=2, experts_per_rank=2, micro_batches=3, layers=2, slots=2, resident=False):
    """Make a plan with random homes, replicas and quotas (replicas with quota 0 among them)."""
    R, M, L, B = nodes * per_node, micro_batches, layers, slots
    E, S = R * experts_per_rank, 2 * M + 1
    demand = Demand(
        counts_SLE=(rng.integers(0, 9, (S, L, E)) * (rng.random((S, L, E)) < 0.7)).astype(np.int32),
        layer_ids=np.arange(1, 2 * L, 2, dtype=np.int32),
        sample_ids=np.arange(S),
    )
    micro_batch_S = np.array([*range(M), *range(M), -1], dtype=np.int32)  # the last sample is left out
    rank_S = rng.integers(0, R, S).astype(np.int32)
    scheduled = demand.with_schedule(micro_batch_S, rank_S, R)
    previous = static_homes(Topology(num_nodes=nodes, ranks_per_node=per_node), demand.layer_ids, E)
    home_LE = np.stack([rng.permutation(np.repeat(np.arange(R), experts_per_rank)) for _ in range(L)]).astype(np.int16)
    replica_MLRB = np.full((M, L, R, B), -1, np.int16)
    quota_MLRB = np.zeros((M, L, R, B), np.int32)
    left_MLE = scheduled.load_MLE.copy()
    for m, layer, r in np.ndindex(M, L, R):
        choices = rng.permutation(np.flatnonzero(home_LE[layer] != r))[: rng.integers(0, B + 1)]
        for b, expert in enumerate(choices):
            quota = rng.integers(0, left_MLE[m, layer, expert] + 1)
            left_MLE[m, layer, expert] -= quota
            replica_MLRB[m, layer, r, b], quota_MLRB[m, layer, r, b] = expert, quota
    plan = StepPlan(
        balancer="made up",
        num_nodes=nodes,
        ranks_per_node=per_node,
        layer_ids=demand.layer_ids,
        micro_batch_S=micro_batch_S,
        rank_S=rank_S,
        physical_to_logical_map=previous.with_home_ranks(home_LE).physical_to_logical_map,
        previous_map=previous.physical_to_logical_map,
        replica_MLRB=replica_MLRB,
        quota_MLRB=quota_MLRB,
        resident=resident and slots > 0,
        group_M=np.arange(micro_batches, dtype=np.int32) // 2,
        scope="cluster",
        bound_ML=np.ones((M, L), np.int64),
        predicted={"compute": 0.25, "total": 1e-3},
        plan_seconds=0.125,
    )
    return plan, scheduled
