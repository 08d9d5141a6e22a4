"""Loads under both plans of a page, against plain loops."""

from __future__ import annotations

import base64

import numpy as np
import pytest
from hypothesis import given

from relibra.reporting.data.compared_plans import compare_plan, compare_static
from relibra.reporting.pages.load_facts import load_facts
from tests.planning.plans import planned_steps
from tests.reporting.planned import compared_step


@given(planned_steps())
def test_the_busiest_instance_is_the_home_or_a_replica(step) -> None:
    plan, demand = step
    found_MLE = compare_plan("plan", plan, demand).instance_load_MLE()
    for m, layer, expert in np.ndindex(*found_MLE.shape):
        quotas = plan.quota_MLRB[m, layer][plan.replica_MLRB[m, layer] == expert].tolist()
        home = int(demand.load_MLE[m, layer, expert]) - sum(quotas)
        assert found_MLE[m, layer, expert] == max([home, *quotas])


@given(planned_steps())
def test_the_static_layout_keeps_experts_at_home_under_the_given_schedule(step) -> None:
    plan, demand = step
    static = compare_static(plan, demand)
    per_rank = plan.num_experts // plan.num_ranks
    expected_MLR = demand.load_MLE.reshape(*demand.load_MLE.shape[:2], plan.num_ranks, per_rank).sum(axis=3)
    np.testing.assert_array_equal(static.rank_load_MLR, expected_MLR)
    assert static.bound == static.skew


def _unpacked(cube: dict) -> np.ndarray:
    numbers = np.frombuffer(base64.b64decode(cube["data"]), dtype="<u2").reshape(cube["shape"])
    return numbers / 65535 * cube["largest"]


def test_cubes_hold_loads_over_their_mean_on_a_scale_for_ranks_and_one_for_experts() -> None:
    step = compared_step()
    before, after = step.plans
    facts = load_facts(step)
    ranks, experts = facts["scales"]["ranks"], facts["scales"]["experts"]
    for one, shown in zip((before, after), facts["plans"], strict=True):
        load_MLR = one.rank_load_MLR
        ratio_MLR = load_MLR / load_MLR.mean(axis=2, keepdims=True)
        np.testing.assert_allclose(_unpacked(shown["ranks"]), ratio_MLR, atol=1e-4)
        busiest_MLE = one.instance_load_MLE() / one.demand.load_MLE.mean(axis=2, keepdims=True)
        np.testing.assert_allclose(_unpacked(shown["experts"]), busiest_MLE, atol=1e-3)
        assert shown["micro_batches"] == list(range(5))
    static_MLE = before.instance_load_MLE() / before.demand.load_MLE.mean(axis=2, keepdims=True)
    assert experts["largest"] == static_MLE.max() > ranks["largest"]
    assert ranks["end"] < experts["end"] == np.quantile(static_MLE.max(axis=2), 0.99)
    m, layer = step.most_improved()
    assert facts["first"] == [layer, m]
    lost_M = (before.rank_load_MLR.max(axis=2) - after.rank_load_MLR.max(axis=2)).sum(axis=1)
    assert lost_M[m] == lost_M.max()


def test_large_steps_are_thinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relibra.reporting.pages.load_facts.MAX_BYTES", 4 * 3 * 20 * 2)  # two micro-batches
    facts = load_facts(compared_step())
    assert [one["micro_batches"] for one in facts["plans"]] == [[0, 4], [0, 4]]
