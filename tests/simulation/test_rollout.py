from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relibra import ClusterError, ConfigError, cluster_preset
from relibra.simulation import LengthDistribution, model_shape
from relibra.simulation.rollout import DecodeCost, decode_cost, decode_in_windows, decode_whole, prefill_seconds


def test_totals_are_those_of_decoding_token_by_token():
    lengths = LengthDistribution(median=8.0, sigma=0.8, longest=40)
    got = decode_in_windows(lengths.draw, 5, 12, np.random.default_rng(3), steps=7, burn_in=20)
    rng = np.random.default_rng(3)
    length, done, busy, decode_steps, fed_again, continued = lengths.draw(5, rng), [0] * 5, 0, 0, 0, 0
    time = 0.0
    for step in range(20 + 7):
        counted = step >= 20
        fed_again += counted * sum(done)
        continued += counted * sum(d > 0 for d in done)
        for _ in range(12):
            active = [b for b in range(5) if done[b] < length[b]]
            if not active:
                break
            for b in active:
                done[b] += 1
            busy += counted * len(active)
            decode_steps += counted
            time += counted * (1 + 0.25 * len(active))
        fresh = lengths.draw(5, rng)
        for b in range(5):
            if done[b] == length[b]:
                length[b], done[b] = fresh[b], 0
    assert (got.tokens, got.decode_steps, got.fed_again, got.continued) == (busy, decode_steps, fed_again, continued)
    assert got.idle(5) == pytest.approx(1 - busy / (5 * decode_steps))
    assert got.tokens_per_time(0.25) == pytest.approx(busy / time)


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
    draw = LengthDistribution(median=5.0, sigma=1.0, longest=5).draw
    for slots, window in ((0, 3), (3, 0)):
        with pytest.raises(ConfigError, match=f"an engine of {slots} slots and windows of {window} tokens"):
            decode_in_windows(draw, slots, window, np.random.default_rng(0), steps=1, burn_in=0)
