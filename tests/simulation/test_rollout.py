from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relibra import ClusterError, ConfigError, cluster_preset
from relibra.simulation import Engines, LengthDistribution, model_shape, simulate_rollout
from relibra.simulation.rollout import DecodeCost, decode_cost, decode_whole, prefill_seconds

MODEL = replace(model_shape("qwen3-30b-a3b"), moe_layers=4, experts=32, top_k=4)
CLUSTER = cluster_preset("h100x8", 16)
ENGINES = Engines(num_engines=2, ranks=8, slots=16)


@given(st.lists(st.integers(1, 30), max_size=12), st.integers(1, 5))
def test_whole_responses_decode_as_token_by_token(lengths, slots):
    waiting, running, steps, tokens = list(lengths), [], 0, 0
    while waiting or running:
        while waiting and len(running) < slots:
            running.append(waiting.pop(0))
        tokens += len(running)
        steps += 1
        running = [left - 1 for left in running if left > 1]
    decoded = decode_whole(np.array(lengths, dtype=np.int64), slots)
    assert (decoded.decode_steps, decoded.tokens) == (steps, tokens)
    assert 0 <= decoded.idle < 1


def test_a_decode_step_reads_weights_once_and_each_cache():
    model, cluster = model_shape("qwen3-30b-a3b"), cluster_preset("h100x8")
    cost = decode_cost(model, cluster, 8, context=1000.0)
    assert cost.fixed == pytest.approx(model.parameters * 2 / 8 / 3.35e12 + 2 * 48 * 7 * 2e-6)
    reading = 48 * 2 * 4 * 128 * 2 * 1000 / 8 / 3.35e12
    assert cost.per_active == pytest.approx(reading + 2 * model.active_parameters / 8 / cluster.flops_per_second)
    assert decode_cost(model, cluster, 1, context=0.0).fixed == pytest.approx(model.parameters * 2 / 3.35e12)
    assert DecodeCost(fixed=2.0, per_active=0.5).seconds(10, 40) == 40
    with pytest.raises(ClusterError, match="memory_bytes_per_second"):
        decode_cost(model, replace(cluster, memory_bytes_per_second=0.0), 8, context=1.0)


def test_prefill_counts_scores_by_squares():
    model, cluster = model_shape("qwen3-30b-a3b"), cluster_preset("h100x8")
    one, two = (prefill_seconds(model, cluster, 8, np.array(tokens)) for tokens in ([2000], [1000, 1000]))
    weights = 2 * (model.active_parameters - model.head_parameters) * 2000
    scores = 48 * 2 * 32 * 256 * 2000 * 2001 / 2
    assert one == pytest.approx((weights + scores) / 8 / cluster.flops_per_second)
    assert two < one


def test_what_decodes_nothing_is_refused():
    with pytest.raises(ConfigError, match=r"median 0.0, sigma 1.0 and at most 5"):
        LengthDistribution(median=0.0, sigma=1.0, longest=5)
    with pytest.raises(ConfigError, match="an engine of 0 slots"):
        decode_whole(np.array([1]), 0)


def test_the_slowest_engine_ends_the_rollout():
    even, uneven = np.array([100, 100, 100, 100]), np.array([300, 100, 300, 100])  # engine 0 gets the long ones
    rollouts = [simulate_rollout(lengths, 10.0, ENGINES, MODEL, CLUSTER) for lengths in (even, uneven)]
    assert rollouts[1].decode > 2.9 * rollouts[0].decode * 0.9
    assert rollouts[0].tokens == 400
    assert rollouts[0].idle == pytest.approx(1 - 2 / 16)


def test_engines_without_anything_are_refused():
    with pytest.raises(ConfigError, match="engines have slots 0: it must be at least 1"):
        Engines(num_engines=1, ranks=1, slots=0)
