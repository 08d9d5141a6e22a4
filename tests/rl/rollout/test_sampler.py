"""Sampling beside training: updates of the weights cut answers at any token, and nothing is lost or doubled."""

import asyncio
import random
import threading
import time
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from relibra.errors import EngineError
from relibra.rl.rollout.response import new_response
from relibra.rl.rollout.served import requests
from relibra.rl.rollout.served.sampler import Sampler
from relibra.rl.rollout.served.sleep import PAUSE, PAUSE_KEEPING, RESUME, send
from tests.rl.rollout.stand_in_server import STOP, answer_of, client_of, ids_of, running

LIMIT = 24


@contextmanager
def sampling(dialect="vllm", pace=lambda _: 0.002, retry_seconds=0.0, rescores=False, keeps=False):
    """Yield a server, its client, and a sampler that waits for the first version."""
    with running(dialect=dialect) as server:
        server.pace = pace
        client = replace(client_of(server), keeps=keeps)
        sampler = Sampler([client], seed=3, max_batch=8, retry_seconds=retry_seconds, rescores=rescores)
        try:
            yield server, client, sampler
        finally:
            server.pause(paused=False)
            sampler.close()


def push(server, client, sampler, version, seconds=5.0):
    """Do what an update of the weights does."""
    sampler.hold()
    if client.keeps:
        sampler.drain(seconds)
    asyncio.run(send(PAUSE_KEEPING if client.keeps else PAUSE, client))
    sampler.drain(seconds)
    client.published.version, server.version = version, str(version)
    asyncio.run(send(RESUME, client))
    sampler.release()


def responses_of(number):
    return [new_response(n, n // 4, [10 + n % 30, 11 + n]) for n in range(number)]


def check(server, responses, windows):
    """Check windows against an uncut answer, and each token against the server's record of who sampled it."""
    recorded = {}
    for asked, added, version in server.sampled:
        for place, token in enumerate(added):
            recorded[(asked[:2], len(asked) + place, version)] = token
    for response, window in zip(responses, windows, strict=True):
        prompt, tokens = response.tokens_n.tolist(), window.tokens_w.tolist()
        assert tokens == answer_of(prompt, LIMIT), "as without cuts"
        assert window.stopped == (tokens[-1] == STOP)
        np.testing.assert_allclose(window.log_probs_w, [-0.5 - token / 100 for token in tokens], rtol=1e-6)
        assert len(window.experts_mLK) == len(prompt) + len(tokens) - 1
        assert np.array_equal(window.experts_mLK, ids_of([*prompt, *tokens])[:, [1, 2]])
        assert window.versions_w.tolist() == sorted(window.versions_w)
        for place, (token, version) in enumerate(zip(tokens, window.versions_w.tolist(), strict=True)):
            assert recorded[(tuple(prompt), len(prompt) + place, str(version))] == token


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_answers_cut_at_random_are_those_of_uncut_ones(dialect):
    rng = random.Random(0)
    with sampling(dialect) as (server, client, sampler):
        responses = responses_of(20)
        push(server, client, sampler, 0)
        found = [sampler.begin(part, [LIMIT] * 10) for part in (responses[:10], responses[10:])]
        for version in range(1, 10):
            asked = len(server.asked) + 2
            wait_until(lambda most=asked: len(server.asked) > most or found[1].done())
            time.sleep(rng.random() * 0.02)
            push(server, client, sampler, version)
        windows, costs = zip(*(one.result() for one in found), strict=True)
    check(server, responses, [*windows[0], *windows[1]])
    assert max(len(set(window.versions_w.tolist())) for window in windows[0]) >= 3, "two cuts in one window"
    assert all(cost.prefilled_tokens > 20 for cost in costs), "what was fed again is counted"
    one = responses[0].extended(windows[0][0], weight_version=99, max_response=LIMIT)
    assert one.versions_r.tolist() == windows[0][0].versions_w.tolist()
    assert one.mixed_r.tolist() == [v != one.versions_r[-1] for v in one.versions_r.tolist()]
    assert (one.windows, one.finish_reason) == (1, "length")


def blocks_at(*places):
    """Wait for a pause before these tokens."""
    return lambda number: 10.0 if number in places else 0.0


@pytest.mark.parametrize("place", [0, 1, LIMIT - 1])
def test_a_push_at_any_token_and_two_at_once(place):
    with sampling(pace=blocks_at(place)) as (server, client, sampler):
        [response] = responses_of(1)
        push(server, client, sampler, 0)
        found = sampler.begin([response], [LIMIT])
        wait_until(lambda: len(server.asked) > 2 and server.asked[-1][0].startswith("/inference"))
        push(server, client, sampler, 1)
        server.pace = blocks_at(0)
        push(server, client, sampler, 2)  # before a token of version 1
        server.pace = None
        push(server, client, sampler, 3)
        [window] = found.result(10)[0]
    check(server, [response], [window])
    assert window.versions_w[-1] > 0, "the last token came after a push"


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_tokens_before_a_cut_are_scored_by_the_weights_after_it(dialect):
    with sampling(dialect, pace=blocks_at(4), rescores=True) as (server, client, sampler):
        responses = responses_of(5)
        push(server, client, sampler, 0)
        found = sampler.begin(responses, [LIMIT] * 5)
        for version in (1, 2):  # each part has four tokens
            wait_until(lambda asked=5 * version: sum("seed" in str(body) for _, body in server.asked) >= asked)
            time.sleep(0.05)
            if version == 2:
                server.pace = None
            push(server, client, sampler, version)
        windows, _ = found.result(10)
    for window in windows:
        last = window.versions_w[-1]
        by_its_weights = np.array([-0.5 - token / 100 for token in window.tokens_w.tolist()])
        before_cut_w = window.versions_w != last
        assert 0 < before_cut_w.sum() < len(before_cut_w)
        np.testing.assert_allclose(window.log_probs_w, by_its_weights - last * before_cut_w, rtol=1e-6)


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_kept_answers_are_asked_for_once_and_count_as_mixed(dialect):
    with sampling(dialect, keeps=True, pace=None) as (server, client, sampler):
        responses = responses_of(21)
        push(server, client, sampler, 0)
        sampler.begin(responses[20:], [LIMIT]).result()  # what is compiled at the first answer
        server.pace = lambda _: 0.02
        found = [sampler.begin(part, [LIMIT] * 10) for part in (responses[:10], responses[10:20])]
        for version in range(1, 6):
            asked = len(server.asked) + 2
            wait_until(lambda most=asked: len(server.asked) > most or found[1].done())
            push(server, client, sampler, version)
        windows = [window for one in found for window in one.result()[0]]
    assert len(server.sampled) == 21, "each is asked for once"
    mixed = 0
    for response, window in zip(responses, windows, strict=False):
        assert window.tokens_w.tolist() == answer_of(response.tokens_n.tolist(), LIMIT)
        [*first, last] = window.versions_w.tolist()
        [by] = [int(one[2]) for one in server.sampled if one[0] == tuple(response.tokens_n.tolist())]
        assert len({*first}) == 1
        assert first[0] <= by <= last, "the oldest that may have sampled them, and the newest"
        extended = response.extended(window, weight_version=99, max_response=LIMIT)
        assert extended.mixed_r.tolist() == [last > first[0]] * len(first) + [False]
        mixed += last > by
    assert mixed >= 5


@pytest.mark.parametrize("version", ["7", "-1"])
def test_kept_answers_have_no_version_but_those_of_their_time(version):
    def changed(answer):
        answer.get("meta_info", {}).update(weight_versions=[{"version": version}])
        return answer

    with sampling("sglang", keeps=True, pace=lambda _: 0.02) as (server, client, sampler):
        server.change = changed
        push(server, client, sampler, 1)
        found = sampler.begin(responses_of(1), [LIMIT])
        wait_until(lambda: any("input_ids" in body for _, body in server.asked))
        push(server, client, sampler, 2)
        with pytest.raises(EngineError, match=f"version '{version}'"):
            found.result(20)


def wait_until(done):
    deadline = time.monotonic() + 10
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_an_answer_that_never_comes_is_asked_for_anew():
    with sampling(pace=blocks_at(5)) as (server, client, sampler):
        [response] = responses_of(1)
        push(server, client, sampler, 0)
        found, waiting = sampler.begin([response], [LIMIT]), threading.Event()
        wait_until(lambda: server.asked[-1][0].startswith("/inference"))
        server.change = lambda answer: ("choices" in answer and waiting.wait(5), answer)[1]
        push(server, client, sampler, 1, seconds=0.1)
        server.pace, server.change = None, lambda answer: answer
        waiting.set()
        [window] = found.result(10)[0]
    check(server, [response], [window])
    assert set(window.versions_w.tolist()) == {1}, "the tokens that did not come were sampled again"


def test_a_stop_token_in_a_cut_answer_is_sampled_again():
    with running() as server:
        client = client_of(server)
        choice = {"token_ids": [5, 6, STOP], "logprobs": {"content": [{"logprob": -1.0}] * 3}, "finish_reason": "abort"}
        answer = {"choices": [choice]}
        server.change = lambda _: answer
        window = asyncio.run(window_of(client, may_be_cut=lambda: True))
        assert (window.tokens_w.tolist(), window.cut, window.experts_mLK) == ([5, 6], True, None)
        choice |= {"token_ids": [5, 6], "logprobs": None}
        window = asyncio.run(window_of(client, may_be_cut=lambda: True))
        assert len(window.tokens_w) == 0, "no log-prob is made up"
        with pytest.raises(EngineError, match="ended by 'abort'"):
            asyncio.run(window_of(client))


async def window_of(client, **options):
    async with client.connections(1) as connection:
        return await client.window(connection, new_response(1, 0, [20]), limit=4, seed=0, **options)


def test_a_server_that_refuses_ends_all_windows_with_its_words(monkeypatch):
    monkeypatch.setattr(requests, "PAUSE_SECONDS", 0.001)
    with sampling() as (server, client, sampler):
        push(server, client, sampler, 0)
        server.failures = [400]
        for _ in range(2):  # also what is asked for later
            with pytest.raises(EngineError, match="status 400"):
                sampler.begin(responses_of(3), [LIMIT] * 3).result(10)


def test_a_lost_server_loses_no_window(monkeypatch):
    """It ends while answers are cut, and comes back with the weights that it began with."""
    monkeypatch.setattr(requests, "PAUSE_SECONDS", 0.001)
    with sampling(retry_seconds=10.0) as (server, client, sampler):
        responses = responses_of(6)
        push(server, client, sampler, 0)
        found = sampler.begin(responses, [LIMIT] * 6)
        time.sleep(0.02)
        begin_anew = server.begin_anew
        server.begin_anew = lambda: (begin_anew(), setattr(server, "version", "0"))
        server.die(looks=8)
        windows, _ = found.result(20)
    check(server, responses, windows)


def test_no_responses_are_whole_at_once():
    with sampling() as (_, _, sampler):
        assert sampler.begin([], []).result(1)[0] == []
