"""Token batches: the layout, the routes on their rows, and the same log-probs as apart."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relibra.replay import record_routing, replay_routing
from relibra.rl.batch.token_batch import make_token_batch, with_routes
from relibra.rl.update.recompute import score_tokens
from tests.replay.tiny_models import tiny_model
from tests.rl.made_up import EXPERTS, LAYERS, response_of, responses_of

RESPONSES = responses_of([4, 1, 7, 3])


def routed_batch(responses, chosen):
    experts = [responses[s].experts_mLK for s in chosen]
    batch = make_token_batch(responses, chosen)
    return with_routes(batch, experts, responses, num_experts=EXPERTS, layer_ids=range(LAYERS))


@pytest.fixture(scope="module")
def model():
    return tiny_model().eval()


def alone(model, response):
    """Feed one response by itself and return the log-probs of its tokens and its routes; the slow reference."""
    tokens_1N = torch.from_numpy(response.tokens_n[:-1])[None]
    with torch.no_grad(), record_routing(model) as recorder:
        logits_NV = model(input_ids=tokens_1N, use_cache=False).logits[0]
        [experts_NLK] = recorder.take()
    log_probs_NV = logits_NV.log_softmax(-1)
    places = range(response.prompt_length, len(response.tokens_n))
    return [float(log_probs_NV[t - 1, response.tokens_n[t]]) for t in places], experts_NLK


def test_layout_of_a_micro_batch():
    first = replace(response_of(0, prompt=1, length=2), tokens_n=np.array([5, 6, 7]))
    second = replace(response_of(1, prompt=3, length=2), tokens_n=np.array([8, 9, 10, 11, 12]))
    batch = routed_batch([first, second], [1, 0])
    assert batch.tokens_1T.tolist() == [[8, 9, 10, 11, 5, 6]]
    assert batch.position_1T.tolist() == [[0, 1, 2, 3, 0, 1]]
    assert batch.row_X.tolist() == [2, 3, 4, 5]
    assert batch.target_X.tolist() == [11, 12, 6, 7]
    assert batch.response_X.tolist() == [0, 0, 1, 1]
    assert batch.samples_B.tolist() == [1, 0]
    assert batch.token_X.tolist() == [2, 3, 0, 1]
    assert batch.num_responses == 2


@settings(max_examples=10)
@given(st.permutations(range(len(RESPONSES))))
def test_routes_lie_on_the_rows_of_their_tokens(order):
    batch = routed_batch(RESPONSES, order)
    expected = np.concatenate([RESPONSES[s].experts_mLK for s in order])
    assert batch.routes.experts_TLK.tolist() == expected.tolist()
    assert batch.routes.valid_T.all(), "no row of a packed micro-batch is left to the router"
    assert batch.routes.fallback_samples == ()
    assert batch.routes.coverage == 1.0
    assert [batch.routes.sample_ids[s] for s in batch.routes.sample_T] == np.repeat(
        order, [len(RESPONSES[s].tokens_n) - 1 for s in order]
    ).tolist()


def test_packed_responses_get_the_log_probs_of_separate_ones(model):
    for chosen in ([0, 1, 2, 3], [2], [3, 1]):
        scores = score_tokens(model, make_token_batch(RESPONSES, chosen), 1.0)
        expected = [value for s in chosen for value in alone(model, RESPONSES[s])[0]]
        assert scores.log_probs_X.tolist() == pytest.approx(expected, abs=1e-5)
        assert scores.entropy_X.shape == scores.log_probs_X.shape


def test_packed_replay_of_own_routes_equals_separate_passes(model):
    recorded = []
    for response in RESPONSES:
        _, experts_NLK = alone(model, response)
        recorded.append(replace(response, experts_mLK=experts_NLK.numpy()))
    batch = routed_batch(recorded, [3, 0, 2, 1])
    with replay_routing(model, batch.routes) as replay:
        logp_X = score_tokens(model, batch, 1.0).log_probs_X
    expected = [value for s in (3, 0, 2, 1) for value in alone(model, recorded[s])[0]]
    assert logp_X.tolist() == pytest.approx(expected, abs=1e-5)
    assert replay.comparison().rows == batch.tokens_1T.shape[1]
    assert replay.comparison().differing_pairs == 0


def test_replayed_routes_are_executed_and_change_the_log_probs(model):
    batch = routed_batch(RESPONSES, [0, 2])
    with replay_routing(model, batch.routes) as replay, torch.no_grad():
        replayed_X = score_tokens(model, batch, 1.0).log_probs_X
    native_X = score_tokens(model, make_token_batch(RESPONSES, [0, 2]), 1.0).log_probs_X
    assert replay.comparison().differing_pairs > 0
    assert (replayed_X - native_X).abs().max() > 1e-2


def test_temperature_divides_the_logits(model):
    batch = make_token_batch(RESPONSES, [0, 1])
    scores = score_tokens(model, batch, 2.0)
    with torch.no_grad():
        logits_TV = model(input_ids=batch.tokens_1T, position_ids=batch.position_1T, use_cache=False).logits[0]
        tempered_XV = (logits_TV[batch.row_X] / 2).log_softmax(-1)
    expected_X = tempered_XV.gather(-1, batch.target_X[:, None])[:, 0]
    assert scores.log_probs_X.tolist() == pytest.approx(expected_X.tolist(), abs=1e-6)
    assert scores.entropy_X.tolist() == pytest.approx((-tempered_XV.exp() * tempered_XV).sum(-1).tolist(), abs=1e-5)


def test_some_response_tokens_of_a_batch(model):
    batch = make_token_batch(RESPONSES, [2, 0])
    chosen_X = torch.arange(len(batch.row_X)) % 3 == 1
    some = batch.of_tokens(chosen_X)
    assert torch.equal(some.tokens_1T, batch.tokens_1T)
    assert some.token_X.tolist() == batch.token_X[chosen_X].tolist()
    assert some.num_responses == 2
    expected_X = score_tokens(model, batch, 1.0).log_probs_X[chosen_X]
    torch.testing.assert_close(score_tokens(model, some, 1.0).log_probs_X, expected_X, atol=1e-6, rtol=0)


@settings(max_examples=30)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.data())
def test_values_of_the_rank_are_found_by_token_and_written_back(lengths, data):
    responses = responses_of(lengths, routed=False)
    cut = data.draw(st.integers(0, len(lengths)))
    order = data.draw(st.permutations(range(len(lengths))))
    values_X = torch.from_numpy(np.concatenate([one.log_probs_r for one in responses]))
    back_X = torch.zeros_like(values_X)
    for chosen in (order[:cut], order[cut:]):
        batch = make_token_batch(responses, chosen)
        assert torch.equal(values_X[batch.token_X], batch.sampled_log_probs_X)
        assert len(batch.token_X) == len(batch.row_X) == len(batch.in_window_X)
        back_X[batch.token_X] = batch.sampled_log_probs_X
    assert torch.equal(values_X, back_X)


def test_routes_with_another_number_of_rows_are_refused():
    short = replace(RESPONSES[3], experts_mLK=RESPONSES[3].experts_mLK[:-1])
    rows = len(RESPONSES[3].tokens_n) - 1
    with pytest.raises(AssertionError, match=rf"sample 3: {rows - 1} rows of routes, {rows} fed tokens"):
        routed_batch([*RESPONSES[:3], short], [3])


def test_routes_name_samples_and_their_versions():
    batch = routed_batch(responses_of([2, 3], version=6), [1, 0])
    assert batch.routes.sample_ids == (1, 0)
    assert batch.routes.weight_versions == (6, 6)


def test_a_filler_trains_nothing(model):
    batch = routed_batch(RESPONSES, [])
    assert batch.num_responses == 0
    assert batch.routes is None
    assert batch.tokens_1T.shape == batch.position_1T.shape == (1, 1)
    assert batch.sampled_log_probs_X.shape == batch.token_X.shape == (0,)
    assert score_tokens(model, batch, 1.0).log_probs_X.shape == (1,), "one row keeps collectives aligned"
