"""Cover of a plan against a look at every expert after every loss."""

import numpy as np
from hypothesis import given

from relibra.reporting.data.fault_coverage import replica_cover, step_cover
from tests.planning.plans import planned_step, planned_steps


@given(planned_steps())
def test_cover_is_what_survives_each_loss(step):
    plan, demand = step
    load_MLE = demand.load_MLE
    found_LR, R = replica_cover(plan, demand), plan.num_ranks
    for layer, lost in np.ndindex(*found_LR.shape):
        survives = total = 0
        for m, expert in np.ndindex(len(load_MLE), plan.num_experts):
            on = {int(plan.home_LE[layer, expert])}
            on |= {r for r in range(R) if expert in plan.replica_MLRB[m, layer, r]}
            total += int(load_MLE[m, layer, expert])
            survives += int(load_MLE[m, layer, expert]) * bool(on - {lost})
        assert found_LR[layer, lost] == (1.0 if total == 0 else np.float64(1.0 - (total - survives) / total))
    step_R = step_cover(plan, demand)
    whole_L = load_MLE.sum(axis=(0, 2))
    expected_R = (found_LR * whole_L[:, None]).sum(axis=0) / whole_L.sum() if whole_L.any() else np.ones(R)
    np.testing.assert_allclose(step_R, expected_R)


def test_without_replicas_a_lost_rank_takes_its_load_along():
    plan, demand = planned_step(np.random.default_rng(0), slots=0)
    assert step_cover(plan, demand).sum() == np.float64(plan.num_ranks - 1)
