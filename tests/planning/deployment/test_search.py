from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.deployment.brute_force import brute_force
from relibra import ConfigError
from relibra.planning.deployment.accelerator import ACCELERATORS, accelerator
from relibra.planning.deployment.performance import Efficiency
from relibra.planning.deployment.search import PAPER_SPACE, SearchSpace, search_pair, search_pairs, value
from relibra.planning.deployment.served_model import PAPER_MODELS, ServedModel
from relibra.planning.deployment.service_level import ServiceLevel

LEVEL = ServiceLevel(seconds_per_token=0.15, context=650)
ANCHORS = [  # computed apart: tp_a, tp_e, n_a, m, b_a, us T_a, T_e, T_c, ms T_iter, GPUs, tokens/s per cost
    ("mixtral-8x22b", "a800", "a800", (2, 1, 2, 3, 299), (403, 433, 178), 72.8, 12, 899),
    ("mixtral-8x22b", "h20", "l40s", (8, 2, 1, 3, 1523), (571, 685, 218), 115.0, 24, 1227),
    ("dbrx", "a800", "a800", (2, 1, 3, 4, 321), (431, 457, 367), 73.1, 22, 1043),
    ("dbrx", "h20", "l40s", (8, 1, 1, 4, 1606), (601, 649, 447), 103.9, 24, 1900),
    ("scaled-moe", "a800", "a800", (2, 1, 7, 4, 253), (422, 428, 425), 82.2, 46, 816),
    ("scaled-moe", "h20", "l40s", (4, 1, 5, 4, 647), (658, 663, 645), 127.2, 52, 1400),
]


@pytest.mark.parametrize(("model", "gpu", "expert_gpu", "shape", "micros", "millis", "gpus", "per_price"), ANCHORS)
def test_plans_are_those_computed_apart(model, gpu, expert_gpu, shape, micros, millis, gpus, per_price):
    pair = accelerator(gpu), accelerator(expert_gpu)
    plan = search_pair(PAPER_MODELS[model], LEVEL, pair, PAPER_SPACE, Efficiency())
    assert (plan.attention.ways, plan.experts.ways, plan.attention.nodes, plan.micro_batches, plan.rows) == shape
    assert [1e6 * one for one in plan.stage[:3]] == pytest.approx(micros, abs=0.5)
    assert 1e3 * plan.iteration_seconds == pytest.approx(millis, rel=0.005)
    assert plan.gpus == gpus
    assert value(plan, "price") == pytest.approx(per_price, rel=0.005)
    assert plan.limit == "memory"
    plan.validate()


@pytest.mark.parametrize(
    "model", [pytest.param(name, marks=[pytest.mark.slow] * (name != "dbrx")) for name in PAPER_MODELS]
)
def test_best_pair_is_bandwidth_for_attention_flops_for_experts(model):
    plans = search_pairs(PAPER_MODELS[model], LEVEL, list(ACCELERATORS.values()), PAPER_SPACE, Efficiency())
    assert (plans[0].attention.accelerator.name, plans[0].experts.accelerator.name) == ("h20", "l40s")
    for plan in plans:
        plan.validate()


@pytest.mark.parametrize(("model", "nodes"), [("mixtral-8x22b", 5), ("dbrx", 5), ("scaled-moe", 9)])
def test_longer_requests_need_more_attention_nodes(model, nodes):
    pair = accelerator("h20"), accelerator("l40s")
    plan = search_pair(PAPER_MODELS[model], replace(LEVEL, context=8192), pair, PAPER_SPACE, Efficiency())
    assert plan.attention.nodes == nodes


def small_models():
    return st.builds(
        lambda hidden, experts, top_k, width, layers: ServedModel(
            name="small", layers=layers, hidden=64 * hidden, experts=experts, top_k=min(top_k, experts),
            width=64 * width, qkv_width=96 * hidden, output_rows=64 * hidden, cache_values=32 * hidden, cache_ways=2,
            score_flops=256 * hidden, head_values=10_000, output_values=5_000,
        ),
        st.integers(1, 8), st.sampled_from([2, 3, 4, 6]), st.integers(1, 3), st.integers(1, 16), st.integers(1, 4),
    )  # fmt: skip


@settings(max_examples=6, deadline=None)
@given(
    model=small_models(),
    context=st.integers(400, 5000),
    memory=st.floats(1e6, 2.5e6),
    allowed=st.floats(1e-4, 4e-3),
    objective=st.sampled_from(["price", "watts", "gpus"]),
    most_gpus=st.sampled_from([0, 5, 9]),
)
def test_the_search_finds_what_brute_force_finds(model, context, memory, allowed, objective, most_gpus):
    gpus = [
        replace(accelerator(name), memory_bytes=memory, memory_bytes_per_second=1e9 * speed, node_size=2)
        for name, speed in (("h20", 3), ("l40s", 1))
    ]
    level = ServiceLevel(seconds_per_token=allowed, context=context)
    space = SearchSpace(micro_batches=(1, 2, 3), ways=(1, 2), node_counts=(1, 2, 3), objective=objective,
                        most_gpus=most_gpus)  # fmt: skip
    pair = gpus[0], gpus[1]
    found = search_pair(model, level, pair, space, Efficiency())
    best = brute_force(model, level, pair, space, Efficiency())
    assert (found is None) == (best is None)
    if found is not None:
        found.validate()
        assert value(found, objective) == pytest.approx(value(best, objective), rel=1e-12)
        assert not most_gpus or found.gpus <= most_gpus


def test_more_experts_on_a_node_use_fewer_nodes():
    pair = accelerator("h20"), accelerator("h800")
    few = SearchSpace(experts_per_node=(4,), micro_batches=(3,))
    plan = search_pair(PAPER_MODELS["scaled-moe"], LEVEL, pair, few, Efficiency())
    assert (plan.experts.nodes, plan.experts_per_node) == (8, 4)
    rows = plan.rows * plan.attention.nodes * 4 / 32
    assert plan.expert_rows == rows


def test_a_space_without_choices_is_refused():
    pair = accelerator("h20"), accelerator("l40s")
    with pytest.raises(ConfigError, match="at least one of each"):
        search_pair(PAPER_MODELS["dbrx"], LEVEL, pair, SearchSpace(ways=()), Efficiency())
    with pytest.raises(ConfigError, match="name at least one"):
        search_pairs(PAPER_MODELS["dbrx"], LEVEL, [], SearchSpace(), Efficiency())
