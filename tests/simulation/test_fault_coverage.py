"""Cover of a plan against a look at every expert after every loss."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relibra import Demand
from relibra.cluster import Topology
from relibra.planning.plan import StepPlan
from relibra.planning.validation import validate_plan
from relibra.routing.readers import open_trace
from relibra.simulation.fault_coverage import cover_plan, cover_replicas, replica_cover, step_cover
from tests.planning.cases import DATA
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


@given(st.lists(st.integers(0, 9), min_size=6, max_size=6), st.integers(0, 2))
def test_cover_of_the_worst_rank_is_the_highest_possible(loads, slots):
    """Three ranks of two experts; against every choice of as many experts that get a replica."""
    load_E, home_E = np.array(loads), np.repeat(np.arange(3), 2)
    replica_RB = cover_replicas(load_E, home_E, np.full(3, slots))
    for r, row in enumerate(replica_RB.tolist()):
        own = [e for e in row if e >= 0]
        assert len(own) == len(set(own))
        assert not any(home_E[e] == r for e in own)
    copied = set(replica_RB[replica_RB >= 0].tolist())

    def lost(kept):
        return max(sum(load_E[e] for e in range(6) if home_E[e] == r and e not in kept) for r in range(3))

    assert lost(copied) == min(lost(kept) for kept in itertools.combinations(range(6), min(6, 3 * slots)))


@pytest.mark.skipif(not DATA.is_dir(), reason="the recorded routes are not here")
@pytest.mark.parametrize(
    ("name", "by_balance_alone", "reached"),
    [("deepseek_v2_lite_esft_topk", 0.910, 0.948), ("gpt_oss_20b_decode_topk", 0.943, 1.0)],
)
def test_32_slots_for_cover_raise_the_worst_rank_of_a_layer(name, by_balance_alone, reached):
    """Of eight ranks, load of the whole trace: section 9 of the specification has copies chosen for balance alone."""
    demand = Demand.from_trace(open_trace(DATA / f"{name}.npz", None))
    ranks = (np.arange(len(demand.counts_SLE)) % 8).astype(np.int32)
    demand = demand.with_schedule(np.zeros_like(ranks), ranks, 8)
    static = StepPlan.static(demand, Topology(num_nodes=1, ranks_per_node=8))
    worst = []
    for slots in (0, 1, 2, 4):
        plan = cover_plan(static, demand, slots)
        validate_plan(plan, plan.topology, demand)
        worst.append(replica_cover(plan, demand).min())
        assert plan.skew(demand) <= static.skew(demand)
    assert worst == sorted(worst)
    assert worst[-1] > by_balance_alone
    assert worst[-1] == pytest.approx(reached, abs=0.001)
