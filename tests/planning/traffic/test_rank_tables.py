"""The compiled tables of all layers, and of one, are those of the slow reference."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from relibra.planning.traffic.rank_tables import micro_batch_tables, rank_tables
from tests.planning.plans import planned_steps
from tests.planning.traffic.slow_tables import rank_tables_reference


@given(planned_steps(max_slots=3), st.sampled_from([None, 1, 2, 3, 16, 128]))
def test_compiled_tables_are_those_of_the_slow_reference(step, chunk):
    plan, demand = step
    M, L = plan.replica_MLRB.shape[:2]
    for m, rank in np.ndindex(M, plan.num_ranks):
        tables_L = micro_batch_tables(plan, demand, rank, m, chunk)
        assert len(tables_L) == L
        tables_L.append(rank_tables(plan, demand, rank, m, L - 1, chunk))
        for tables, layer in zip(tables_L, [*range(L), L - 1], strict=True):
            expected = rank_tables_reference(plan, demand, rank, m, layer, chunk)
            for name in ("tokens_E", "send_RP", "receive_RP"):
                np.testing.assert_array_equal(getattr(tables, name), getattr(expected, name), err_msg=name)
            sent_RP = expected.send_RP > 0
            np.testing.assert_array_equal(tables.first_RP[sent_RP], expected.first_RP[sent_RP])
            for name in ("place", "num_homes", "pushes", "ranks_per_node", "stay_in_node", "stay_on_rail"):
                assert getattr(tables, name) == getattr(expected, name), name
