from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relibra import ConfigError
from relibra.planning.deployment.accelerator import accelerator
from relibra.planning.deployment.performance import Efficiency, Node, hop_seconds, stage_seconds
from relibra.planning.deployment.served_model import PAPER_MODELS
from relibra.planning.deployment.service_level import ServiceLevel
from relibra.simulation import MODEL_SHAPES, model_shape
from relibra.simulation.serving.served_shape import served_model

USED = Efficiency()
DBRX = PAPER_MODELS["dbrx"]


def node_of(gpu, ways, **changes):
    return replace(Node(model=DBRX, gpu=accelerator(gpu), ways=ways, used=USED), **changes)


@pytest.mark.parametrize(("name", "billions"), [("mixtral-8x22b", 140.6), ("dbrx", 131.6), ("scaled-moe", 317)])
def test_models_have_the_weights_that_the_paper_says(name, billions):
    model = PAPER_MODELS[name]
    embeddings = {"mixtral-8x22b": 32768 * 6144 * 2, "dbrx": 100352 * 6144 * 2, "scaled-moe": 0}[name]
    total = model.attention_values + model.experts * model.expert_values + embeddings
    assert total / 1e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.parametrize(("name", "cache", "attention", "expert"), [
    ("mixtral-8x22b", 229_376, 9.87, 33.8), ("dbrx", 163_840, 7.05, 15.9), ("scaled-moe", 196_608, 14.5, 19.3),
])  # fmt: skip
def test_cache_and_weights_of_a_node(name, cache, attention, expert):
    model = PAPER_MODELS[name]
    assert model.cache_bytes(1) == cache
    assert 2e-9 * model.attention_values == pytest.approx(attention, rel=0.005)
    assert 2e-9 * model.expert_values == pytest.approx(expert, rel=0.005)


@pytest.mark.parametrize("name", MODEL_SHAPES)
def test_shapes_of_the_simulator_keep_their_weights_and_cache(name):
    shape, model = model_shape(name), served_model(model_shape(name))
    total = model.attention_values + model.experts * model.expert_values
    router = shape.moe_layers * shape.hidden * shape.experts  # under a thousandth, and not modelled
    assert total == pytest.approx(shape.parameters - router, rel=1e-3)
    if not shape.windowed_layers:
        assert model.cache_bytes(1) == shape.cache_bytes_per_token


def test_few_rows_read_weights_and_many_compute():
    seconds = [node_of("l40s", 1).experts(rows, 1) - USED.launch_seconds for rows in (1, 100, 1000, 2000)]
    assert seconds[1] < 1.1 * seconds[0]
    assert seconds[3] == pytest.approx(2 * seconds[2], rel=0.02)
    assert seconds[0] == pytest.approx(2 * DBRX.expert_values / DBRX.layers / (0.8 * 864e9), rel=0.01)


def test_a_slow_side_and_small_messages_make_a_hop_longer():
    fast, slow = node_of("h20", 8), node_of("l40s", 1)
    even = hop_seconds(fast, fast, 4000, 4000, 16)
    assert hop_seconds(fast, slow, 4000, 4000, 16) > 4 * even
    assert hop_seconds(fast, fast, 4000, 4000, 64) > even
    late = node_of("h20", 8, used=replace(USED, hop_factor=3.14))
    assert hop_seconds(late, late, 4000, 4000, 16) == pytest.approx(3.14 * even)


@given(rows=st.lists(st.integers(1, 3000), min_size=1, max_size=5), nodes=st.integers(1, 20))
def test_many_at_once_are_the_same_as_one_after_the_other(rows, nodes):
    sides, level = (node_of("h20", 4), node_of("l40s", 2)), ServiceLevel(seconds_per_token=0.15, context=650)
    together = stage_seconds(*sides, nodes, 2, np.array(rows), level)
    for number, one in enumerate(rows):
        alone = stage_seconds(*sides, nodes, 2, one, level)
        assert [np.broadcast_to(part, len(rows))[number] for part in together] == pytest.approx(alone, rel=1e-12)


def test_a_window_bounds_what_is_read():
    windowed = replace(DBRX, window=128, windowed_layers=40)
    assert node_of("h20", 1, model=windowed).attention(64, 100_000) == node_of("h20", 1).attention(64, 128)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: replace(DBRX, top_k=17), "picks 17 of 16"),
        (lambda: replace(DBRX, windowed_layers=40), "give a window of at least 1"),
        (lambda: replace(DBRX, window=5, windowed_layers=41), "in at most all layers"),
        (lambda: replace(DBRX, hidden=0), "hidden is 0"),
        (lambda: replace(USED, flops=0), "flops is 0"),
        (lambda: ServiceLevel(seconds_per_token=0.0, context=1), "seconds_per_token is 0.0"),
        (lambda: replace(accelerator("h20"), node_size=3), "node_size is 3"),
        (lambda: replace(accelerator("h20"), watts=float("nan")), "watts is nan"),
    ],
)
def test_values_out_of_range_are_refused(make, words):
    with pytest.raises(ConfigError, match=words):
        make()
