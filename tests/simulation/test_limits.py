import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relibra import Budget, Demand, cluster_preset, plan_step
from relibra.planning.costs.expert_shape import ExpertShape
from relibra.simulation import Execution, advice, memory_use, model_shape, overlap_ratio, simulate_step
from relibra.simulation.limits import overlap_ratios, sustained_overlap_ratios
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


def test_advice_names_the_largest_part_first_with_its_share():
    demand = make_demand(64, 4, 32, 4, 16, 1, sigma=1.5, tokens=4000)
    cluster, model = cluster_preset("h100x8", 16), model_shape("qwen3-30b-a3b")
    model = replace(model, moe_layers=4, experts=32, top_k=4)
    plan = plan_step(demand, cluster, Budget(slots=2), expert=model.expert)
    demand = plan.scheduled(demand)
    step = simulate_step(plan, demand, cluster, model)
    said = advice(step, cluster, model, memory_use(plan, demand, replace(cluster, memory_bytes=10**9), model))
    assert said[0].startswith("Overlap ratio")
    assert overlap_ratios(cluster, model.expert) == {
        "inside a node": overlap_ratio(model.expert, cluster.intra.bytes_per_second, cluster.peak_flops_per_second),
        "between nodes": overlap_ratio(
            model.expert, cluster.inter_send.bytes_per_second, cluster.peak_flops_per_second
        ),
    }
    shares = [int(found[0]) for sentence in said if (found := re.findall(r"\((\d+)% of", sentence))]
    assert shares == sorted(shares, reverse=True)
    assert 95 < sum(shares) < 105
    exchange = (step.terms["exchange"] + step.terms["gates"]) / step.seconds
    assert any(sentence.startswith("Traffic: ") and f"({exchange:.0%} of" in sentence for sentence in said)
    assert any(sentence.startswith("Straggler: ") for sentence in said)
    assert "0.52 inside a node and 0.06 between nodes at peak flops, 1.05 and 0.12 at sustained flops" in said[0]
    assert said[0].endswith("so traffic counts for more than balance.")
    assert any("of activations on the fullest rank" in sentence for sentence in said)
    assert said[-1].startswith("Memory: a rank of stage 0 would hold")
    slow = simulate_step(plan, demand, cluster, model, Execution(overlap=False))
    assert any(sentence.startswith("Copies: ") for sentence in advice(slow, cluster, model))


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_even_loads_have_no_straggler_and_uneven_ones_the_same_in_any_number_of_stages(stages):
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
        assert any("Straggler: " in sentence for sentence in advice(step, flat, model)) == (expected > 0)


def test_a_wide_expert_on_fast_links_hides_its_traffic():
    cluster = cluster_preset("h100x8")
    demand = make_demand(16, 2, 8, 2, 8, 1)
    model = replace(model_shape("mixtral-8x7b"), moe_layers=2, top_k=4)
    plan = plan_step(demand, cluster, Budget(slots=0), expert=model.expert)
    said = advice(simulate_step(plan, plan.scheduled(demand), cluster, model), cluster, model)
    assert "9.78 inside a node at peak flops, 19.56 at sustained flops" in said[0]
    assert said[0].endswith("so balance counts for more than traffic.")
    assert sustained_overlap_ratios(cluster, model.expert) == {
        "inside a node": overlap_ratio(model.expert, cluster.intra.bytes_per_second, cluster.flops_per_second)
    }
