"""The compiled split in whole chunks is that of a loop that deals chunks one by one."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from relibra.planning.traffic.rank_tables import chunked_split
from relibra.planning.traffic.split import split_tokens
from tests.planning.plans import planned_steps
from tests.planning.traffic.slow_tables import deal_chunks


@given(planned_steps(max_slots=3), st.sampled_from([1, 2, 3, 5, 16, 1 << 20]))
def test_each_expert_is_split_as_the_slow_reference_does(step, chunk):
    plan, demand = step
    for at in np.ndindex(plan.replica_MLRB.shape[:2]):
        arrays = (demand.tokens_MLRE[at], plan.home_LE[at[1]], plan.replica_MLRB[at], plan.quota_MLRB[at])
        split = split_tokens(*arrays, plan.ranks_per_node)
        for expert in np.unique(split.expert_I):
            tokens_RI = split.tokens_RI[:, split.expert_I == expert]
            supply_R, quota_I = tokens_RI.sum(axis=1), tokens_RI.sum(axis=0)
            chunked_RI, chunks_I = np.zeros_like(tokens_RI), np.zeros_like(quota_I)
            chunked_split(supply_R, quota_I, chunk, chunks_I, chunked_RI)
            assert chunked_RI.tolist() == deal_chunks(supply_R.tolist(), quota_I.tolist(), chunk).tolist()
