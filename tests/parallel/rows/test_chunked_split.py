"""Chunks are whole, consecutive and dealt as quotas say: as a slow split does that deals them one by one."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from relibra.planning.traffic.split import split_tokens
from tests.planning.plans import planned_steps
from tests.planning.traffic.slow_tables import chunked_split


def slow_split(supply_R, quota_I, chunk):
    """Number the token-slots by source, cut them into chunks, and deal these out one by one."""
    sources = [rank for rank, supply in enumerate(supply_R) for _ in range(supply)]
    pieces = [sources[begin : begin + chunk] for begin in range(0, len(sources), chunk)]
    shares = [quota // chunk for quota in quota_I]
    while sum(shares) < len(pieces):
        short = [quota - share * chunk for quota, share in zip(quota_I, shares, strict=True)]
        shares[short.index(max(short))] += 1
    result = np.zeros((len(supply_R), len(quota_I)), dtype=int)
    for instance, share in enumerate(shares):
        for piece in pieces[:share]:
            for source in piece:
                result[source, instance] += 1
        pieces = pieces[share:]
    return result.tolist()


@given(planned_steps(max_slots=3), st.sampled_from([1, 2, 3, 5, 16, 1 << 20]))
def test_each_expert_is_split_as_the_slow_reference_does(step, chunk):
    plan, demand = step
    for at in np.ndindex(plan.replica_MLRB.shape[:2]):
        arrays = (demand.tokens_MLRE[at], plan.home_LE[at[1]], plan.replica_MLRB[at], plan.quota_MLRB[at])
        split = split_tokens(*arrays, plan.ranks_per_node)
        chunked = chunked_split(split, chunk)
        assert (chunked.expert_I == split.expert_I).all()
        assert (chunked.rank_I == split.rank_I).all()
        for expert in np.unique(split.expert_I):
            own = split.expert_I == expert
            tokens_RI = split.tokens_RI[:, own]
            expected = slow_split(tokens_RI.sum(axis=1).tolist(), tokens_RI.sum(axis=0).tolist(), chunk)
            assert chunked.tokens_RI[:, own].tolist() == expected
