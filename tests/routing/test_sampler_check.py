"""What the check of a sampler finds, how often it cries wolf, and that its sums are what they say."""

import json
from dataclasses import replace

import numpy as np
import pytest

from relibra.routing.sampler_check import (
    SampledTokens,
    SamplerHistory,
    check_sampler,
    sampler_sums,
)
from tests.routing.made_up_samplers import RARE, Sampler, disturbed, uses_rare_expert


def history_of(sampler, steps=6):
    history = SamplerHistory()
    for _ in range(steps):
        history = history.with_step(sampler_sums(sampler.step()))
    return history


def verdict_of(tokens, history):
    return check_sampler(sampler_sums(tokens), history)


def slow_sums(tokens):
    """Return responses' x by server, and slots and v by (server, layer, expert), token by token."""
    u = [min(float(d) ** 2, 0.05) + 1e-8 for d in tokens.log_ratio_X.astype(np.float64)]
    of_response = {}
    for response, value in zip(tokens.response_X, u, strict=True):
        of_response.setdefault(int(response), []).append(value)
    x_of_server = {server: [] for server in range(tokens.num_servers)}
    for response, values in of_response.items():
        if len(values) >= 8:
            x_of_server[int(tokens.server_S[response])].append(np.log(np.mean(values)))
    slots, excess = {}, {}
    for token, response in enumerate(tokens.response_X):
        v = np.sqrt(u[token]) / np.mean(np.sqrt(of_response[int(response)]))
        for layer, choices in enumerate(tokens.experts_XLK[token]):
            for expert in choices:
                place = (int(tokens.server_S[response]), layer, int(expert))
                slots[place] = slots.get(place, 0) + 1
                excess[place] = excess.get(place, 0.0) + v
    return x_of_server, slots, excess


def test_sums_are_those_of_a_loop_over_tokens():
    tokens = Sampler(responses=40, tokens=15, longest=40, layers=2, experts=16, top_k=2, servers=3).step()
    sums, (x_of_server, slots, excess) = sampler_sums(tokens), slow_sums(tokens)
    for server, values in x_of_server.items():
        expected = [len(values), sum(values), sum(value**2 for value in values)]
        assert sums.coarse_Z3[3 + server] == pytest.approx(expected)
    assert int(sums.slots_YLE.sum()) == sum(slots.values())
    for place, count in slots.items():
        assert sums.slots_YLE[place] == count
        assert sums.excess_YLE[place] == pytest.approx(excess[place], rel=1e-6)
    assert sums.excess_YLE.sum() == pytest.approx(4 * len(tokens.log_ratio_X)), "v is 1 on average"


def part_of(tokens, chosen_S):
    """Return the tokens of some responses."""
    inside_X = chosen_S[tokens.response_X]
    number_S = np.cumsum(chosen_S) - 1
    named = {name: getattr(tokens, name)[inside_X] for name in ("log_ratio_X", "position_X", "age_X", "experts_XLK")}
    return replace(
        tokens, **named, response_X=number_S[tokens.response_X[inside_X]], server_S=tokens.server_S[chosen_S]
    )


def test_sums_of_ranks_add_up():
    tokens = Sampler(responses=64, tokens=30, layers=2).step()
    first_S = np.arange(64) % 3 == 0
    whole = sampler_sums(tokens)
    nothing = sampler_sums(part_of(tokens, first_S & ~first_S))
    parts = [nothing, sampler_sums(part_of(tokens, first_S)), sampler_sums(part_of(tokens, ~first_S))]
    added = nothing.shaped(sum(one.flat() for one in parts))
    assert added.flat() == pytest.approx(whole.flat())
    assert added.coarse_Z3 == pytest.approx(whole.coarse_Z3)


FAULTS = {
    "a rare expert": (
        {},
        lambda tokens: disturbed(tokens, uses_rare_expert(tokens), 0.1),
        f"layer 1, expert {RARE}",
    ),
    "a server": ({}, lambda tokens: disturbed(tokens, tokens.server_S[tokens.response_X] == 2, 0.05), "server 2"),
    "late positions": (
        {"tokens": 1500.0, "longest": 8192, "layers": 0},
        lambda tokens: disturbed(tokens, tokens.position_X > 6000, 0.2),
        "positions 6144 to 8191",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found_in_the_step_where_they_appear(name):
    trials = 10
    sizes, break_step, where = FAULTS[name]
    sampler = Sampler(**sizes)
    history = history_of(sampler)
    found = [verdict_of(break_step(sampler.step()), history) for _ in range(trials)]
    assert sum(where in verdict.differs for verdict in found) >= 0.9 * trials
    assert sum(verdict_of(sampler.step(), history).accepted for _ in range(trials)) == trials


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a rare expert", "a server"])
def test_faults_are_found_among_6144_experts(name):
    trials = 20
    sizes, break_step, where = FAULTS[name]
    sampler = Sampler(**sizes, layers=48, seed=3)
    history = history_of(sampler, steps=4)
    found = [verdict_of(break_step(sampler.step()), history) for _ in range(trials)]
    assert sum(where in verdict.differs for verdict in found) >= 0.9 * trials


@pytest.mark.slow
def test_clean_runs_of_500_steps_raise_at_most_one_alarm():
    sampler, history, refused = Sampler(layers=12, tokens=80.0, seed=5), SamplerHistory(), []
    for _ in range(500):
        sums = sampler_sums(sampler.step())
        verdict = check_sampler(sums, history)
        if verdict.accepted:
            history = history.with_step(sums)
        else:
            refused.append(verdict)
    assert len(refused) <= 1, refused


def test_p_of_experts_is_about_uniform():
    sampler = Sampler(layers=8, seed=7)
    history = history_of(sampler, steps=4)
    smallest = min(verdict_of(sampler.step(), history).p for _ in range(4))
    assert smallest > 1e-7, "of 8,000 tests the smallest p is about 1e-4"


def test_the_server_of_a_broken_expert_is_named():
    sampler = Sampler(seed=1)
    history, tokens = history_of(sampler), sampler.step()
    here_X = (tokens.experts_XLK[:, 2] == 7).any(axis=1) & (tokens.server_S[tokens.response_X] == 5)
    verdict = check_sampler(sampler_sums(disturbed(tokens, here_X, 0.1)), history, layer_ids=[1, 3, 5, 7])
    assert verdict.differs[0] == "layer 5, expert 7, server 5"
    assert verdict.clearest == verdict.differs[0]
    assert verdict.ratio > 1.5


def test_without_history_only_limits_refuse():
    tokens, none = Sampler(responses=32, tokens=40, layers=1).step(), SamplerHistory()
    assert verdict_of(disturbed(tokens, True, 0.05), none).accepted
    for added, expected in (
        (tokens.position_X == 3, "ratios above 2"),
        (-0.3, "mean log-ratio beyond"),
        (np.nan, "ratios above 2"),
    ):
        broken = verdict_of(replace(tokens, log_ratio_X=tokens.log_ratio_X + added), none)
        assert not broken.accepted
        assert any(expected in where for where in broken.differs)


def test_rounding_of_float32_is_never_a_fault():
    """Log-ratios of 1e-7 with any structure: all of them are below the floor."""
    sampler = Sampler(noise=1e-7, seed=2)
    history = history_of(sampler, steps=2)
    verdict = verdict_of(disturbed(sampler.step(), True, 3e-6), history)
    assert verdict.accepted


def test_a_slow_drift_is_found_against_the_first_steps():
    sampler, history, found = Sampler(layers=0, seed=4), SamplerHistory(), None
    for step in range(120):
        sampler.noise = 5e-3 * 1.03**step
        sums = sampler_sums(sampler.step())
        verdict = check_sampler(sums, history)
        if not verdict.accepted:
            found = step
            break
        history = history.with_step(sums)
    assert found is not None
    assert 1.03**found > 1.3, "a mild drift is none"


def test_strata_that_nothing_uses_are_not_tested():
    sampler = Sampler(responses=32, tokens=30, layers=2, seed=6)
    history = history_of(sampler)
    tokens = sampler.step()
    unused = replace(tokens, experts_XLK=np.minimum(tokens.experts_XLK, 3))
    assert verdict_of(unused, history).p > 0
    nothing = part_of(tokens, np.zeros(32, dtype=bool))
    assert verdict_of(nothing, history) == replace(verdict_of(nothing, SamplerHistory()), accepted=True)


def test_an_expert_of_one_response_is_compared_inside_it():
    """A response that rounds more than others is no fault of the expert that it alone uses."""
    sampler = Sampler(layers=2, seed=8)
    history, tokens = history_of(sampler), sampler.step()
    response = int(np.bincount(tokens.response_X).argmax())
    experts_XLK = tokens.experts_XLK.copy()
    experts_XLK[tokens.response_X == response, 1, 0] = RARE
    log_ratio_X = np.where(tokens.response_X == response, 3 * tokens.log_ratio_X, tokens.log_ratio_X)
    verdict = verdict_of(replace(tokens, experts_XLK=experts_XLK, log_ratio_X=log_ratio_X), history)
    assert not any("expert" in where for where in verdict.differs)


def test_a_history_survives_a_checkpoint_to_the_bit():
    sampler = Sampler(responses=48, tokens=20, layers=1)
    history = history_of(sampler, steps=30)
    again = SamplerHistory.from_state(json.loads(json.dumps(history.as_state())))
    sums = sampler_sums(sampler.step())
    assert check_sampler(sums, again) == check_sampler(sums, history)
    one, other = again.with_step(sums), history.with_step(sums)
    assert one.as_state() == other.as_state()
    assert len(one.recent_XZ3) == 20
    assert len(one.first_XZ3) == 8


def test_another_number_of_servers_begins_anew():
    history = history_of(Sampler(responses=48, tokens=20, layers=1))
    sums = sampler_sums(Sampler(responses=48, tokens=20, layers=1, servers=3).step())
    assert check_sampler(sums, history).accepted
    assert len(history.with_step(sums).recent_XZ3) == 1


def test_tokens_of_older_weights_have_a_history_of_their_own():
    sampler = Sampler(layers=0, seed=9)

    def older(tokens, sd):
        old_X = tokens.server_S[tokens.response_X] % 2 == 1
        return replace(disturbed(tokens, old_X, sd), age_X=old_X.astype(int))

    history = SamplerHistory()
    for _ in range(6):
        history = history.with_step(sampler_sums(older(sampler.step(), 0.03)))
    assert verdict_of(older(sampler.step(), 0.03), history).accepted
    assert "weights of age 1" in verdict_of(older(sampler.step(), 0.15), history).differs


def test_types_of_shapes():
    tokens = Sampler(responses=16, tokens=10, layers=0).step()
    assert isinstance(tokens, SampledTokens)
    sums = sampler_sums(tokens)
    assert sums.slots_YLE.shape == (8, 0, 128)
    assert check_sampler(sums, SamplerHistory().with_step(sums)).accepted
