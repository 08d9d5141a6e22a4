"""Collecting: who goes on, who starts, what is rated, over many steps."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from relibra.errors import ConfigError
from relibra.rl.collect import collect, rate
from relibra.rl.config import load_config
from relibra.rl.rollout.pool import check_pool
from relibra.rl.rollout.response import RolloutCost, Window
from relibra.rl.tasks.arithmetic import Arithmetic
from relibra.rl.tokenizer import CharacterTokenizer

from .joined import alone
from .made_up import response_of

TASK = Arithmetic(seed=0, max_terms=6, continue_probability=0.5)
TOKENIZER = CharacterTokenizer(TASK.characters, TASK.characters[-1])


@pytest.fixture(scope="module", autouse=True)
def _group():
    with alone():
        yield


@dataclass
class ScriptedEngine:
    """Ends each response at a length that its sample id decides; without routes."""

    served: list = field(default_factory=list)

    def generate(self, responses, *, window, max_response):
        self.served.append([one.sample_id for one in responses])
        windows = []
        for one in responses:
            total = min(max_response, wanted_length(one.sample_id))
            added = min(window, total - one.length)
            ends = one.length + added == wanted_length(one.sample_id)
            tokens_w = np.full(added, 1 + one.sample_id % 10)
            if ends:
                tokens_w[-1] = TOKENIZER.stop_ids[0]
            windows.append(
                Window(tokens_w=tokens_w, log_probs_w=np.zeros(added, np.float32), experts_mLK=None, stopped=ends)
            )
        return windows, RolloutCost(decode_steps=1, slot_steps=1, busy_slot_steps=1, prefilled_tokens=0)


def wanted_length(sample_id):
    return 1 + sample_id * 7 % 40


def config_of(*overrides):
    return load_config(
        None,
        [
            "algorithm.preset=tppo",
            "algorithm.tail_drop=2",
            "rollout.prompts_per_step=4",
            "rollout.responses_per_prompt=3",
            "rollout.max_response=32",
            "rollout.window=8",
            *overrides,
        ],
    )


def collected(live, started, config, engine=None, version=0):
    return collect(
        live,
        started=started,
        finished=started - len(live),
        engine=engine or ScriptedEngine(),
        task=TASK,
        tokenizer=TOKENIZER,
        config=config,
        weight_version=version,
    )


def test_a_first_step_fills_all_places_group_by_group():
    rollout = collected([], 0, config_of())
    assert [one.sample_id for one in rollout.responses] == list(range(12))
    assert [one.group_id for one in rollout.responses] == [s // 3 for s in range(12)]
    assert rollout.next_sample == 12
    for one in rollout.responses:
        prompt = TASK.prompt(one.group_id).text
        assert one.tokens_n[: one.prompt_length].tolist() == TOKENIZER.encode(prompt)
        assert (one.windows, one.window_length) == (1, min(8, wanted_length(one.sample_id)))
        assert one.versions_r.tolist() == [0] * one.length
        assert one.reward is None, "rating is a stage of its own"


def test_unfinished_responses_go_on_and_their_places_are_not_given_away():
    first = collected([], 0, config_of())
    live = [one for one in first.responses if one.finish_reason is None]
    second = collected(live, first.next_sample, config_of(), version=1)
    by_id = {one.sample_id: one for one in second.responses}
    assert len(by_id) == 12
    assert {one.sample_id for one in live} <= by_id.keys()
    assert second.next_sample == 12 + (12 - len(live))
    for one in live:
        longer = by_id[one.sample_id]
        assert longer.windows == 2
        assert longer.tokens_n[: len(one.tokens_n)].tolist() == one.tokens_n.tolist()
        assert longer.versions_r.tolist() == [0] * 8 + [1] * longer.window_length


def test_over_many_steps_no_response_is_lost_and_none_lives_too_long():
    """U7 of the T-PPO checks, with the engine's part made up."""
    config, engine, live, next_sample, finished = config_of(), ScriptedEngine(), [], 0, []
    for step in range(60):
        rollout = collected(live, next_sample, config, engine, version=step)
        rated = rate(rollout.responses, TASK, TOKENIZER, config)
        live, next_sample = [one for one in rated if one.finish_reason is None], rollout.next_sample
        finished += [one.sample_id for one in rated if one.finish_reason is not None]
        check_pool(
            started=next_sample,
            finished=len(finished),
            live=[(one.sample_id, one.windows) for one in live],
            slots=12,
            max_windows=4,
        )
        assert len(engine.served[-1]) == 12, "the number of responses under way is constant"
    with pytest.raises(AssertionError, match="some were lost"):
        collect(
            live[1:],
            started=next_sample,
            finished=len(finished),
            engine=engine,
            task=TASK,
            tokenizer=TOKENIZER,
            config=config,
            weight_version=60,
        )
    assert len(finished) == len(set(finished))
    assert {one.finish_reason for one in rated} >= {"stop", None}


def test_responses_are_cut_at_the_longest_allowed():
    config = config_of("rollout.window=0", "rollout.max_response=8")
    reasons = {one.sample_id: one.finish_reason for one in collected([], 0, config).responses}
    assert reasons == {s: "stop" if wanted_length(s) <= 8 else "length" for s in range(12)}


def test_what_ends_is_rated_and_what_goes_on_is_not():
    digit = sum(TASK.prompt(0).row["terms"]) % 10
    right = TOKENIZER.encode_response(f"1+1={digit}")
    one = response_of(0, prompt=2, length=len(right), group=0, reward=None, routed=False)
    one.tokens_n[2:] = right
    cut = response_of(1, prompt=2, length=6, group=0, reward=None, finished=False, routed=False)
    rated, unrated = rate([one, cut], TASK, TOKENIZER, config_of())
    assert rated.reward == 1.0
    assert unrated is cut


def test_long_responses_lose_reward_evenly():
    config = load_config(None, ["rollout.max_response=20", "algorithm.overlong_buffer=10"])
    lengths = (5, 10, 15, 20)
    responses = [response_of(s, length=length, reward=None, routed=False) for s, length in enumerate(lengths)]
    for one in responses:
        one.tokens_n[one.prompt_length :] = 3
    rewards = [one.reward for one in rate(responses, TASK, TOKENIZER, config)]
    assert rewards == pytest.approx([0.0, 0.0, -0.5, -1.0])


@pytest.mark.parametrize("limit", [2, 3])
def test_a_prompt_that_is_too_long_is_named(limit):
    with pytest.raises(ConfigError) as caught:
        collected([], 0, config_of(f"rollout.max_prompt={limit}"))
    sentence = str(caught.value)
    assert sentence.startswith("prompt 0 of the task 'arithmetic' has ")
    assert f"allowed are 1 to {limit} (rollout.max_prompt)" in sentence
    assert "\n" not in sentence
