"""Loads under both plans of a page, against plain loops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from relibra.reporting.data.compared_plans import compare_plan, compare_static
from relibra.reporting.html.step_figures import load_figures
from tests.planning.plans import planned_steps
from tests.reporting.planned import compared_step, planned_step


@given(planned_steps())
def test_the_busiest_instance_is_the_home_or_a_replica(step) -> None:
    plan, demand = step
    found_MLE = compare_plan("plan", plan, demand).instance_load_MLE()
    for m, layer, expert in np.ndindex(*found_MLE.shape):
        quotas = plan.quota_MLRB[m, layer][plan.replica_MLRB[m, layer] == expert].tolist()
        home = int(demand.load_MLE[m, layer, expert]) - sum(quotas)
        assert found_MLE[m, layer, expert] == max([home, *quotas])


@given(planned_steps())
def test_the_static_layout_keeps_experts_at_home(step) -> None:
    plan, demand = step
    static = compare_static(plan, demand)
    per_rank = plan.num_experts // plan.num_ranks
    expected_MLR = demand.load_MLE.reshape(*demand.load_MLE.shape[:2], plan.num_ranks, per_rank).sum(axis=3)
    np.testing.assert_array_equal(static.rank_load_MLR, expected_MLR)
    assert static.bound == static.skew


def test_heatmaps_of_both_plans_share_a_scale_in_percent_of_mean() -> None:
    step = compared_step()
    before, after = step.plans
    found = load_figures(step)
    (_, ranks), (_, experts) = found["layers"]
    for layer in range(3):
        for i, compared in enumerate(step.plans):
            load_MR = compared.rank_load_MLR[:, layer]
            drawn = ranks.data[2 * layer + i]
            np.testing.assert_allclose(drawn.z, (100 * load_MR / load_MR.mean(axis=1, keepdims=True)).T, atol=0.5)
            busiest_ME = compared.instance_load_MLE()[:, layer]
            mean_M1 = compared.demand.load_MLE[:, layer].mean(axis=1, keepdims=True)
            np.testing.assert_allclose(experts.data[2 * layer + i].z, (100 * busiest_ME / mean_M1).T, atol=0.5)
    assert len({heatmap.zmax for heatmap in ranks.data}) == 1
    static_MLE = before.instance_load_MLE() / before.demand.load_MLE.mean(axis=2, keepdims=True)
    assert ranks.data[0].zmax < experts.data[0].zmax == 100 * np.quantile(static_MLE.max(axis=2), 0.99)
    (_, ranks_of_micro_batches), _ = found["micro_batches"]
    np.testing.assert_array_equal(ranks_of_micro_batches.data[2].z[:, 0], ranks.data[0].z[:, 1])
    m, layer = step.most_improved()
    assert found["first"] == (layer, m)
    lost_M = (before.rank_load_MLR.max(axis=2) - after.rank_load_MLR.max(axis=2)).sum(axis=1)
    assert lost_M[m] == lost_M.max()


def test_a_missing_micro_batch_has_no_loads() -> None:
    plan, demand = planned_step()
    shorter = demand.with_schedule(np.arange(40) % 3, np.arange(40) // 3 % 4, 4)
    step = compared_step(compare_static(plan, shorter), compare_plan("the plan", plan, demand))
    (_, ranks), _ = load_figures(step)["micro_batches"]
    assert load_figures(step)["numbers"] == [0, 1, 2, 3, 4]
    assert [len(heatmap.z) for heatmap in ranks.data] == [4, 4, 4, 4, 4, 4, 0, 4, 0, 4]


def test_large_steps_are_thinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relibra.reporting.html.step_figures.MAX_CELLS", 4 * 3 * 20 * 2)  # two micro-batches
    assert load_figures(compared_step())["numbers"] == [0, 4]
