from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relibra import Budget, Demand, cluster_preset, plan_step
from relibra.planning.costs.expert_shape import ExpertShape
from relibra.simulation import Execution, model_shape, overlap_ratio, simulate_step, step_limits
from relibra.simulation.limits import overlap_ratios, step_parts, sustained_overlap_ratios
from tests.planning.cases import make_demand


@pytest.mark.parametrize(
    ("width", "gigabytes", "ratio"),
    [(14_336, 200, 4.35), (2048, 200, 0.62), (2048, 50, 0.16), (768, 450, 0.52), (1536, 50, 0.12)],
)
def test_the_overlap_ratio_of_known_experts_at_989_tflops(width, gigabytes, ratio):
    shape = ExpertShape(hidden=4096, width=width)
    assert overlap_ratio(shape, gigabytes * 1e9, 989e12) == pytest.approx(ratio, abs=0.005)


@given(st.integers(1, 10_000), st.integers(1, 20_000), st.floats(1e9, 1e12), st.floats(1e12, 1e15))
def test_the_overlap_ratio_does_not_depend_on_hidden(hidden, width, bandwidth, peak):
    expected = 1.5 * width * bandwidth / peak
    assert overlap_ratio(ExpertShape(hidden=hidden, width=width), bandwidth, peak) == pytest.approx(expected)


def test_limits_are_the_parts_of_the_step_the_largest_first():
    demand = make_demand(64, 4, 32, 4, 16, 1, sigma=1.5, tokens=4000)
    cluster, model = cluster_preset("h100x8", 16), model_shape("qwen3-30b-a3b")
    model = replace(model, moe_layers=4, experts=32, top_k=4)
    plan = plan_step(demand, cluster, Budget(slots=2), expert=model.expert)
    demand = plan.scheduled(demand)
    step = simulate_step(plan, demand, cluster, model)
    assert overlap_ratios(cluster, model.expert) == {
        "inside a node": overlap_ratio(model.expert, cluster.intra.bytes_per_second, cluster.peak_flops_per_second),
        "between nodes": overlap_ratio(
            model.expert, cluster.inter_send.bytes_per_second, cluster.peak_flops_per_second
        ),
    }
    limits = step_limits(step)
    assert [limit.seconds for limit in limits] == sorted((limit.seconds for limit in limits), reverse=True)
    assert 0.95 < sum(limit.share for limit in limits) <= 1 + 1e-9
    by_part = {limit.part: limit for limit in limits}
    assert by_part["exchange"].share == step.terms["exchange"] / step.seconds
    assert by_part["experts, straggler"].seconds == step.straggler_seconds()
    assert sum(step_parts(step).values()) == pytest.approx(step.seconds)
    slow = simulate_step(plan, demand, cluster, model, Execution(overlap=False))
    assert "copies" in {limit.part for limit in step_limits(slow)}


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_stragglers_are_the_same_in_any_number_of_stages(stages):
    cluster, R, M = cluster_preset("h100x8"), 8, 8
    model = replace(model_shape("qwen3-30b-a3b"), moe_layers=5)
    counts_SLE = np.full((M * R, 5, 128), 64, dtype=np.int32)
    skewed_SLE = counts_SLE.copy()
    skewed_SLE[:, :, :16] *= 3
    place = np.arange(M * R)
    for counts, expected in ((counts_SLE, 0.0), (skewed_SLE, 1 - 1.25 / 3)):
        demand = Demand(counts_SLE=counts, layer_ids=np.arange(5), sample_ids=place)
        demand = demand.with_schedule(place // R, place % R, R)
        plan = plan_step(demand, cluster, Budget(slots=0), "static", expert=model.expert)
        flat = replace(cluster, gemm_table=(), memory_bytes_per_second=0.0)
        step = simulate_step(plan, plan.scheduled(demand), flat, model, Execution(pipeline_stages=stages))
        assert step.straggler_seconds() / step.terms["compute"] == pytest.approx(expected, abs=1e-12)
        assert ("experts, straggler" in {limit.part for limit in step_limits(step)}) == (expected > 0)


def test_ratio_at_sustained_flops_is_larger_by_the_efficiency():
    cluster, model = cluster_preset("h100x8"), model_shape("mixtral-8x7b")
    assert overlap_ratios(cluster, model.expert)["inside a node"] == pytest.approx(9.78, abs=0.005)
    assert sustained_overlap_ratios(cluster, model.expert) == {
        "inside a node": overlap_ratio(model.expert, cluster.intra.bytes_per_second, cluster.flops_per_second)
    }
