"""Collecting: who goes on, who starts, what is rated, over many steps."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relibra.errors import ConfigError
from relibra.rl.config.run_config import load_config
from relibra.rl.rollout.admission import SampleCursor, check_versions
from relibra.rl.rollout.collect import check_live_responses, collect, compute_rewards, length_penalty
from relibra.rl.rollout.embedded import EmbeddedEngine
from relibra.rl.rollout.response import RolloutCost, Window, new_response
from relibra.rl.toy.character_tokenizer import CharacterTokenizer
from relibra.rl.toy.tasks import Arithmetic
from tests.replay.tiny_models import tiny_model
from tests.rl.made_up import response_of

pytestmark = pytest.mark.usefixtures("group")

TASK = Arithmetic(seed=0, max_terms=6, continue_probability=0.5)
TOKENIZER = CharacterTokenizer(TASK.characters)


@dataclass
class ScriptedEngine:
    """Ends each response at a length that its sample id decides; without routes. Free places are refilled."""

    served: list = field(default_factory=list)

    def generate(self, responses, *, window, max_response, spare=None):
        self.served.append([one.sample_id for one in responses])
        windows, of_spares = [], []
        for one in responses:
            windows.append(scripted_window(one, window, max_response))
            left = window - len(windows[-1].tokens_w)
            while spare is not None and left:
                of_spares.append(scripted_window(next(spare), left, max_response))
                left -= len(of_spares[-1].tokens_w)
        cost = RolloutCost(decode_steps=1, passes=1, slot_steps=1, busy_slot_steps=1, prefilled_tokens=0)
        return [*windows, *of_spares], cost


def scripted_window(one, limit, max_response):
    total = min(max_response, wanted_length(one.sample_id))
    added = min(limit, total - one.length)
    ends = one.length + added == wanted_length(one.sample_id)
    tokens_w = np.full(added, 1 + one.sample_id % 10)
    if ends:
        tokens_w[-1] = TOKENIZER.stop_ids[0]
    return Window(tokens_w=tokens_w, log_probs_w=np.zeros(added, np.float32), experts_mLK=None, stopped=ends)


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


def collected(live, cursor, config, engine=None, version=0):
    return collect(
        live,
        cursor=cursor,
        engine=engine or ScriptedEngine(),
        task=TASK,
        tokenizer=TOKENIZER,
        settings=config.rollout,
        weight_version=version,
    )


def rewarded(responses, config):
    found, errors = compute_rewards(
        responses,
        TASK,
        TOKENIZER,
        max_response=config.rollout.max_response,
        overlong_buffer=config.algorithm.overlong_buffer,
    )
    assert not errors
    return found


def test_a_first_step_fills_all_places_group_by_group():
    rollout = collected([], SampleCursor(), config_of())
    assert [one.sample_id for one in rollout.responses] == list(range(12))
    assert [one.group_id for one in rollout.responses] == [s // 3 for s in range(12)]
    assert rollout.cursor == SampleCursor(next_sample=12)
    for one in rollout.responses:
        prompt = TASK.prompt(one.group_id).text
        assert one.tokens_n[: one.prompt_length].tolist() == TOKENIZER.encode(prompt)
        assert (one.windows, one.window_length) == (1, min(8, wanted_length(one.sample_id)))
        assert one.versions_r.tolist() == [0] * one.length
        assert one.reward is None, "rating is a stage of its own"


def test_unfinished_responses_go_on_and_keep_their_places():
    first = collected([], SampleCursor(), config_of())
    live = [one for one in first.responses if one.finish_reason is None]
    second = collected(live, first.cursor, config_of(), version=1)
    by_id = {one.sample_id: one for one in second.responses}
    assert len(by_id) == 12
    assert {one.sample_id for one in live} <= by_id.keys()
    assert second.cursor == SampleCursor(next_sample=12 + (12 - len(live)))
    for one in live:
        longer = by_id[one.sample_id]
        assert longer.windows == 2
        assert longer.tokens_n[: len(one.tokens_n)].tolist() == one.tokens_n.tolist()
        assert longer.versions_r.tolist() == [0] * 8 + [1] * longer.window_length


REFILL = "rollout.refill=true"


def follow(config, engine, steps, finish):
    """Go through steps with places refilled, check what holds after each, and call `finish` with what ended."""
    live, cursor, done, slots = [], SampleCursor(), set(), config.rollout.responses_per_step
    for step in range(steps):
        was_live = {one.sample_id: one for one in live}
        rollout = collected(live, cursor, config, engine, version=step)
        check_versions(rollout.responses, step)
        ids = [one.sample_id for one in rollout.responses]
        assert ids == sorted(set(ids)), "in order, and none twice"
        assert was_live.keys() <= set(ids), "a response that was under way is lost"
        assert not done & set(ids), "a response goes on after its end"
        for one in rollout.responses:
            before = was_live[one.sample_id].length if one.sample_id in was_live else 0
            assert one.length - before == one.window_length > 0, "a token is trained twice, or not at all"
            assert one.window_length <= config.rollout.window_tokens
            assert one.windows == len(np.unique(one.versions_r)) <= config.rollout.max_windows
            assert one.versions_r.tolist() == sorted(one.versions_r)
            assert one.group_id == one.sample_id // config.rollout.responses_per_prompt
        for one in rollout.responses:
            if one.finish_reason is not None:
                done.add(one.sample_id)
                finish(one)
        live, cursor = [one for one in rollout.responses if one.finish_reason is None], rollout.cursor
        assert len(live) <= slots
        assert cursor.started == len(done) + len(live)
        assert done | {one.sample_id for one in live} == set(range(cursor.next_sample)) - set(cursor.passed_over)
        check_live_responses(live, cursor=cursor, finished=len(done), settings=config.rollout)
    with pytest.raises(AssertionError, match="some were lost"):
        check_live_responses(live, cursor=cursor, finished=len(done) - 1, settings=config.rollout)
    return done


@settings(max_examples=8, deadline=None)
@given(st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 4), st.booleans())
def test_no_response_is_lost_or_trained_twice(window, prompts, refill):
    config = config_of(
        f"rollout.refill={str(refill).lower()}",
        f"rollout.window={window}",
        f"rollout.prompts_per_step={prompts}",
        "algorithm.tail_drop=0",
        "update.mini_batches=1",
    )
    lengths, engine = {}, ScriptedEngine()
    follow(config, engine, 30, lambda one: lengths.update({one.sample_id: one.length}))
    assert all(length == min(32, wanted_length(sample)) for sample, length in lengths.items())
    assert {len(served) for served in engine.served} == {3 * prompts}
    oldest_unfinished = min(set(range(len(lengths) + 1)) - set(lengths))
    assert oldest_unfinished >= max(lengths) - 3 * prompts * (32 + window), "nothing waits for long"


def test_a_first_window_that_is_cut_short_makes_one_window_more():
    """Window 8 of at most 32 tokens: a response that begins inside a step has five windows, and none has six."""
    windows = {}
    follow(
        config_of(REFILL), ScriptedEngine(), 60, lambda one: windows.update({one.sample_id: (one.windows, one.length)})
    )
    assert max(windows.values()) == (5, 32)
    assert (4, 32) in windows.values()


@pytest.mark.parametrize(("window", "keeps"), [(4, False), (4, True), (12, False), (12, True)])
def test_refills_give_the_responses_of_whole_rollouts(window, keeps):
    """With weights that stay, sample by sample, token by token; the embedded engine draws by sample and place."""
    settings = (
        "rollout.max_response=24",
        "rollout.prompts_per_step=2",
        "algorithm.tail_drop=0",
        "update.mini_batches=1",
    )
    engine = EmbeddedEngine(
        model=tiny_model("qwen3_moe").eval().requires_grad_(False),
        pad_id=0,
        stop_ids=(7, 11, 40),
        temperature=1.0,
        seed=3,
        max_batch=6,
        keeps=keeps,
    )
    ended = {}
    done = follow(
        config_of(*settings, REFILL, f"rollout.window={window}"),
        engine,
        72 // window,
        lambda one: ended.update({one.sample_id: one}),
    )
    assert {one.finish_reason for one in ended.values()} == {"stop", "length"}
    assert {one.windows for one in ended.values()} > {1, 2}
    whole = [
        new_response(sample, sample // 3, TOKENIZER.encode(TASK.prompt(sample // 3).text)) for sample in sorted(done)
    ]
    windows, _ = engine.generate(whole, window=24, max_response=24)
    for begun, window_of_all in zip(whole, windows, strict=True):
        one, at_once = ended[begun.sample_id], begun.extended(window_of_all, weight_version=0, max_response=24)
        assert one.tokens_n.tolist() == at_once.tokens_n.tolist()
        assert one.finish_reason == at_once.finish_reason
        np.testing.assert_allclose(one.log_probs_r, at_once.log_probs_r, atol=2e-5)
        assert np.array_equal(one.experts_mLK, at_once.experts_mLK)


def test_responses_are_cut_at_the_longest_allowed():
    config = config_of("rollout.window=0", "rollout.max_response=8")
    reasons = {one.sample_id: one.finish_reason for one in collected([], SampleCursor(), config).responses}
    assert reasons == {s: "stop" if wanted_length(s) <= 8 else "length" for s in range(12)}


def test_what_ends_is_rated_and_what_goes_on_is_not():
    digit = sum(TASK.prompt(0).row["terms"]) % 10
    right = TOKENIZER.encode_response(f"1+1={digit}")
    one = response_of(0, prompt=2, length=len(right), group=0, reward=None, routed=False)
    one.tokens_n[2:] = right
    cut = response_of(1, prompt=2, length=6, group=0, reward=None, finished=False, routed=False)
    rated, unrated = rewarded([one, cut], config_of())
    assert rated.reward == 1.0
    assert unrated is cut


def test_long_responses_lose_reward_evenly():
    config = load_config(None, ["rollout.max_response=20", "algorithm.overlong_buffer=10"])
    lengths = (5, 10, 15, 20)
    responses = [response_of(s, length=length, reward=None, routed=False) for s, length in enumerate(lengths)]
    for one in responses:
        one.tokens_n[one.prompt_length :] = 3
    assert [one.reward for one in rewarded(responses, config)] == [0.0, 0.0, -0.5, -1.0]
    lengths = (1, 16384, 16385, 18432, 20480)
    penalties = [length_penalty(response_of(0, length=n), max_response=20480, overlong_buffer=4096) for n in lengths]
    assert penalties == [0.0, 0.0, -1 / 4096, -0.5, -1.0]
    assert length_penalty(response_of(0, length=20), max_response=20, overlong_buffer=0) == 0.0


@pytest.mark.parametrize("limit", [2, 3])
def test_a_prompt_that_is_too_long_is_named(limit):
    with pytest.raises(ConfigError) as caught:
        collected([], SampleCursor(), config_of(f"rollout.max_prompt={limit}"))
    sentence = str(caught.value)
    assert sentence.startswith("prompt 0 of the task has ")
    assert f"allowed are 1 to {limit} (rollout.max_prompt)" in sentence
    assert "\n" not in sentence
