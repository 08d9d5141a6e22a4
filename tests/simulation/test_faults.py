"""Policies after the loss of a rank: scores over the horizon, and the step that the other ranks make."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relibra.planning.validation import validate_plan
from relibra.simulation.faults import Recovery, best_policies, reroute_slowdown, without_rank
from tests.planning.plans import planned_steps

KEEP_GOING = Recovery(policy="keep going", ranks=8, samples=10, step_seconds=2.0)
PAUSE = Recovery(policy="pause", ranks=8, samples=10, step_seconds=1.0, pause_seconds=10.0)


@pytest.mark.parametrize(("horizon", "rates"), [(15.0, (5.0, 10 / 3)), (20.0, (5.0, 5.0)), (40.0, (5.0, 7.5))])
def test_rates_over_the_horizon(horizon, rates):
    assert (KEEP_GOING.rate(horizon), PAUSE.rate(horizon)) == pytest.approx(rates)


def test_the_curves_cross_where_rates_are_equal():
    assert best_policies([PAUSE, KEEP_GOING]) == [(0.0, KEEP_GOING), (20.0, PAUSE)]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 30)), min_size=1, max_size=5), st.floats(0.01, 1e4))
def test_the_best_of_a_horizon_is_the_best_of_all(policies, horizon):
    found = [
        Recovery(policy=str(i), ranks=1, samples=10, step_seconds=float(step), pause_seconds=float(pause))
        for i, (step, pause) in enumerate(policies)
    ]
    best = [one for start, one in best_policies(found) if start <= horizon][-1]
    assert best.rate(horizon) == pytest.approx(max(one.rate(horizon) for one in found), abs=1e-9)


def test_peers_of_a_lost_stage_slow_a_pipeline_down():
    assert [round(reroute_slowdown(4, 16, 4, lost), 2) for lost in ([1], [1, 1], [2])] == [1.28, 1.56, 1.84]
    assert reroute_slowdown(4, 16, 4, [4]) == math.inf
    assert reroute_slowdown(1, 5, 2, [1]) == 2.0


@given(planned_steps(), st.integers(0, 7), st.booleans())
def test_a_lost_rank_computes_nothing_and_others_all(step, lost, anew):
    plan, demand = step
    R = plan.num_ranks
    if R == 1:
        return
    lost %= R
    left, fetched_R = without_rank(plan, demand, lost, anew=anew)
    after = left.scheduled(demand)
    validate_plan(left, plan.topology, after)
    assert not left.rank_load(after)[:, :, lost].any()
    assert not (after.rank_S[after.micro_batch_S >= 0] == lost).any()
    assert not (left.replica_MLRB[:, :, lost] >= 0).any()
    assert np.array_equal(after.load_MLE, demand.load_MLE)
    L, of_rank = len(plan.layer_ids), plan.num_experts // R
    assert fetched_R[lost] == 0
    covered = 0
    for layer, e in zip(*np.nonzero(plan.home_LE == lost), strict=True):
        holders = [(plan.replica_MLRB[:, layer, r] == e).any(axis=1).all() for r in range(R) if r != lost]
        covered += plan.resident and not anew and any(holders)
    assert fetched_R.sum() == L * of_rank - covered
