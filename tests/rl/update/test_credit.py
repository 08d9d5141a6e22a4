"""Credit: whose advantages, where they lie, what is trained, and what the value model is worth."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relibra.rl.config.run_config import load_config
from relibra.rl.update import credit as credit_of
from relibra.rl.update.credit import (
    broadcast_advantages,
    compute_gae,
    compute_group_advantages,
    filter_groups,
    groups_with_signal,
)
from tests.rl.made_up import response_of

pytestmark = pytest.mark.usefixtures("group")

WINDOW = 6


def config_of(*overrides, preset="tppo"):
    window = () if preset in ("dapo", "grpo", "gspo") else (f"rollout.window={WINDOW}", "algorithm.tail_drop=2")
    return load_config(None, [f"algorithm.preset={preset}", "rollout.max_response=18", *window, *overrides])


def values_for(responses, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=response.length).astype(np.float32) for response in responses]


def flat(values_Sr):
    """Return values before each token, one array per response, as one tensor."""
    return torch.cat([torch.zeros(0), *(torch.from_numpy(values) for values in values_Sr)])


@dataclass
class CreditByResponse:
    advantage_Sr: list
    trained_Sr: list


def by_response(credit, responses):
    lengths = [response.length for response in responses]
    return CreditByResponse(
        [piece.numpy() for piece in credit.advantages_X.split(lengths)],
        [piece.numpy() for piece in credit.loss_mask_X.split(lengths)],
    )


def estimate(responses, values_Sr, config, *, train_unfinished):
    window = config.rollout.window_tokens
    credit = compute_gae(
        responses, flat(values_Sr), config.algorithm, window_tokens=window, train_unfinished=train_unfinished
    )
    return by_response(credit, responses)


def variance_explained(responses, values_Sr):
    return credit_of.variance_explained(responses, flat(values_Sr))


def auroc_at_cuts(responses):
    return credit_of.auroc_at_cuts(responses, window_tokens=WINDOW, max_response=18, overlong_buffer=0)


def group_advantages(responses, config):
    return compute_group_advantages(responses, divide_by_std=config.algorithm.divide_by_std)


def useful_groups(responses, config):
    signal = groups_with_signal(responses, config.algorithm, max_response=18)
    return filter_groups(responses, config.algorithm, signal)


def advantages_by_hand(response, expected, config, window=WINDOW):
    """Estimate the advantages of a response's last window, residual by residual; the slow reference."""
    s, w = config.algorithm, response.window_length
    finished = response.finish_reason is not None
    values = expected[len(expected) - w :].astype(np.float64)
    total = response.length if finished else response.length + window / 2
    decay = max(0.95, 1 - 1 / (0.05 * total)) if s.lambda_policy == "length_adaptive" else s.lambda_policy
    last_value = 0.0 if finished else values[w - 1]
    following = [*values[1:], last_value]
    rewards = [0.0] * (w - 1) + [response.reward if finished else 0.0]
    residuals = [reward + after - value for reward, after, value in zip(rewards, following, values, strict=True)]
    return [sum(decay ** (later - t) * residuals[later] for later in range(t, w)) for t in range(w)]


@st.composite
def windows(draw):
    """Draw responses with one to three windows, finished or not; of places refilled inside a step, short ones too."""
    responses = []
    for s in range(draw(st.integers(1, 6))):
        finished = draw(st.booleans())
        responses.append(
            response_of(
                s,
                earlier=draw(st.integers(0, 2 * WINDOW)),
                length=draw(st.integers(1, WINDOW)),
                finished=finished,
                reward=draw(st.sampled_from([0.0, 1.0, -0.5])),
                routed=False,
            )
        )
    return responses


@settings(max_examples=40)
@given(windows(), st.sampled_from([0.5, "length_adaptive"]))
def test_advantages_of_the_last_window_lie_behind_earlier_ones(responses, decay):
    config = config_of("algorithm.whiten=false", f"algorithm.lambda_policy={decay}")
    expected_Sr = values_for(responses)
    credit = estimate(responses, expected_Sr, config, train_unfinished=True)
    for s, response in enumerate(responses):
        earlier = response.length - response.window_length
        kept = max(0, response.window_length - (0 if response.finish_reason else 2))
        by_hand = advantages_by_hand(response, expected_Sr[s], config)
        assert credit.advantage_Sr[s].shape == credit.trained_Sr[s].shape == (response.length,)
        assert credit.trained_Sr[s].tolist() == [earlier <= t < earlier + kept for t in range(response.length)]
        assert (credit.advantage_Sr[s][~credit.trained_Sr[s]] == 0).all()
        assert credit.advantage_Sr[s][credit.trained_Sr[s]] == pytest.approx(by_hand[:kept], abs=1e-4)


@settings(max_examples=30)
@given(windows())
def test_whitening_uses_mean_and_spread_of_trained_tokens_only(responses):
    expected_Sr = values_for(responses, seed=1)
    plain = estimate(responses, expected_Sr, config_of("algorithm.whiten=false"), train_unfinished=True)
    white = estimate(responses, expected_Sr, config_of(), train_unfinished=True)
    mask = np.concatenate(plain.trained_Sr)
    before, after = np.concatenate(plain.advantage_Sr)[mask], np.concatenate(white.advantage_Sr)
    assert (after[~mask] == 0).all()
    if len(before) < 2 or before.std() < 1e-2:
        return
    assert after[mask].mean() == pytest.approx(0, abs=1e-4)
    assert after[mask].std() == pytest.approx(1, abs=1e-3)
    assert after[mask] == pytest.approx((before - before.mean()) / before.std(), abs=1e-3)


def test_advantages_are_clamped_after_whitening(monkeypatch):
    monkeypatch.setattr(credit_of, "LARGEST_ADVANTAGE", 1.5)
    responses = [response_of(s, length=6, reward=0.0, routed=False) for s in range(8)]
    responses.append(response_of(8, length=6, reward=1000.0, routed=False))
    expected_Sr = [np.zeros(6, dtype=np.float32) for _ in responses]
    credit = estimate(responses, expected_Sr, config_of(), train_unfinished=True)
    assert max(advantage.max() for advantage in credit.advantage_Sr) == 1.5


def test_value_model_that_explains_nothing_keeps_unfinished_out():
    responses = [
        response_of(0, length=6, finished=False),
        response_of(1, length=4),
        response_of(2, earlier=6, length=3),
    ]
    credit = estimate(responses, values_for(responses), config_of(), train_unfinished=False)
    assert not credit.trained_Sr[0].any()
    assert (credit.advantage_Sr[0] == 0).all()
    assert credit.trained_Sr[1].all()
    assert credit.trained_Sr[2].tolist() == [False] * 6 + [True] * 3
    only_finished = estimate(responses[1:], values_for(responses)[1:], config_of(), train_unfinished=True)
    for one, other in zip(credit.advantage_Sr[1:], only_finished.advantage_Sr, strict=True):
        assert one == pytest.approx(other, abs=1e-6), "an unfinished response is in the mean"


def test_windows_train_every_token_once_but_for_dropped_tails():
    """U6 of the T-PPO checks: cap of three windows, all lengths."""
    config, cap = config_of(), 3 * WINDOW
    for total in range(1, cap + 1):
        times = np.zeros(total, dtype=int)
        for earlier in range(0, total, WINDOW):
            length = min(WINDOW, total - earlier)
            finished = earlier + length == total
            response = response_of(0, earlier=earlier, length=length, finished=finished, routed=False)
            credit = estimate([response], values_for([response]), config, train_unfinished=True)
            times[: earlier + length] += credit.trained_Sr[0]
        dropped = [t for t in range(total) if (t // WINDOW + 1) * WINDOW < total and t % WINDOW >= WINDOW - 2]
        assert [t for t in range(total) if not times[t]] == dropped
        assert times.max() == 1


def test_a_rank_without_responses_takes_part():
    credit = estimate([], [], config_of(), train_unfinished=True)
    assert (credit.advantage_Sr, credit.trained_Sr) == ([], [])
    assert group_advantages([], config_of(preset="grpo")) == {}
    assert useful_groups([], config_of(preset="dapo")).tolist() == []
    assert variance_explained([], []) is None


def test_tokens_of_a_response_share_its_advantage_in_its_group():
    rewards, groups = [1.0, 0.0, 0.0, 1.0, 1.0], [4, 4, 4, 9, 9]
    responses = [
        response_of(s, reward=reward, group=group, routed=False)
        for s, (reward, group) in enumerate(zip(rewards, groups, strict=True))
    ]
    advantage_of = group_advantages(responses, config_of(preset="grpo"))
    deviation = np.std([1, 0, 0], ddof=1) + 1e-6
    assert [advantage_of[s] for s in range(5)] == pytest.approx(
        [2 / 3 / deviation, -1 / 3 / deviation, -1 / 3 / deviation, 0, 0], abs=1e-5
    )
    plain = group_advantages(responses, config_of("algorithm.divide_by_std=false", preset="grpo"))
    assert [plain[s] for s in range(5)] == pytest.approx([2 / 3, -1 / 3, -1 / 3, 0, 0], abs=1e-6)
    credit = by_response(broadcast_advantages(responses[1:3], advantage_of), responses[1:3])
    assert credit.advantage_Sr[0].tolist() == [np.float32(advantage_of[1])] * 5
    assert all(trained.all() for trained in credit.trained_Sr)


def test_filter_leaves_mixed_groups_and_unfinished_responses():
    responses = [
        response_of(0, group=0, reward=1.0),
        response_of(1, group=0, reward=1.0),
        response_of(2, group=1, reward=1.0),
        response_of(3, group=1, reward=0.0),
        response_of(4, group=2, reward=0.0),
        response_of(5, group=2, finished=False),
        response_of(6, group=3, finished=False),
    ]
    dapo = config_of(preset="dapo")
    assert useful_groups(responses, dapo).tolist() == [False, False, True, True, False, True, True]
    off = config_of("algorithm.group_filter=off", preset="dapo")
    assert useful_groups(responses, off).all()


def test_groups_have_the_signal_that_the_filter_sees():
    """Rewards of the task are equal; one response is long and has a penalty, which the filter does not look at."""
    responses = [response_of(sample, group=0, length=length, reward=reward) for sample, length, reward in PENALISED]
    dapo = config_of("algorithm.overlong_buffer=6", preset="dapo")
    assert groups_with_signal(responses, dapo.algorithm, max_response=18) == {0: False}
    assert not useful_groups(responses, dapo).any()
    off = config_of("algorithm.overlong_buffer=6", "algorithm.group_filter=off", preset="dapo")
    assert groups_with_signal(responses, off.algorithm, max_response=18) == {0: True}
    assert useful_groups(responses, off).all()


PENALISED = ((0, 6, 1.0), (1, 15, 0.5))


def test_explained_variance_is_over_tokens_of_finished_responses():
    responses = [
        response_of(0, length=2, reward=1.0),
        response_of(1, length=4, reward=0.0),
        response_of(2, length=3, finished=False),
    ]
    config_free = [np.full(2, 1.0, np.float32), np.zeros(4, np.float32), np.full(3, 9.0, np.float32)]
    assert variance_explained(responses, config_free) == pytest.approx(1.0)
    constant = [np.full(len(one), 0.3, np.float32) for one in config_free]
    assert variance_explained(responses, constant) == pytest.approx(0.0, abs=1e-6)
    wrong = [1 - one for one in config_free]
    assert variance_explained(responses, wrong) == pytest.approx(-3.0)


def test_returns_that_are_all_alike_explain_nothing():
    responses = [response_of(0, reward=1.0), response_of(1, reward=1.0)]
    assert variance_explained(responses, values_for(responses)) is None
    assert variance_explained([response_of(0, finished=False)], values_for(responses)[:1]) is None


def test_finished_response_without_reward_is_an_assertion_error():
    response = replace(response_of(0), reward=None)
    with pytest.raises(AssertionError, match="sample 0 is finished, so it has a reward"):
        estimate([response], values_for([response]), config_of(), train_unfinished=True)


@pytest.mark.parametrize("first", [WINDOW, 2])
def test_values_at_cuts_are_held_against_how_responses_ended(first):
    """Also where the first window was a short one, of a place refilled inside a step."""

    def ended(sample_id, values_at_cuts, reward, first=WINDOW):
        earlier = first + WINDOW * (len(values_at_cuts) - 1)
        response = response_of(sample_id, earlier=earlier, length=2, reward=reward)
        values_r = np.zeros(response.length, dtype=np.float32)
        values_r[first - 1 :: WINDOW][: len(values_at_cuts)] = values_at_cuts
        versions_r = (np.arange(response.length) + WINDOW - first) // WINDOW + 5
        return replace(response, values_r=values_r, versions_r=versions_r.astype(np.int32))

    right, wrong = ended(0, [0.6, 0.9], 1.0), ended(1, [0.2, 0.7], 0.0, first=first)
    # of the pairs (0.6, 0.9) x (0.2, 0.7) three are in the right order
    assert auroc_at_cuts([right, wrong]) == 0.75
    never_cut = response_of(2, length=WINDOW, reward=1.0)
    unfinished = response_of(3, earlier=WINDOW, finished=False)
    assert auroc_at_cuts([right, wrong, never_cut, unfinished]) == 0.75
    assert auroc_at_cuts([right]) is None
    assert auroc_at_cuts([]) is None
