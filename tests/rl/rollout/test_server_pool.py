"""Several servers: requests are spread, those of a server that ends are repeated elsewhere, none is lost or doubled."""

import logging
import threading
import time
from contextlib import ExitStack
from itertools import count

import pytest

from relibra.errors import EngineError
from relibra.rl.rollout.response import new_response
from relibra.rl.rollout.served import pool, requests
from tests.replay.tiny_models import tiny_model
from tests.rl.rollout.published import publish_weights
from tests.rl.rollout.stand_in_server import answer_of, engine_of, running

PATH = "/inference/v1/generate"


@pytest.fixture
def servers(monkeypatch):
    monkeypatch.setattr(requests, "PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(requests, "LONGEST_PAUSE_SECONDS", 0.05)
    with ExitStack() as stack:
        yield [stack.enter_context(running()) for _ in range(3)]


def sampled(server):
    """Return the prompts that a server was asked to go on from."""
    return [tuple(body["token_ids"]) for path, body in server.asked if path == PATH]


def responses_of(number):
    return [new_response(n, n // 4, [n % 40, n // 40]) for n in range(number)]


def check_windows(engine, number, limit=4):
    """Sample; every response has the one answer that there is to it, in order."""
    responses = responses_of(number)
    windows, _ = engine.generate(responses, window=limit, max_response=limit)
    for response, window in zip(responses, windows, strict=True):
        assert window.tokens_w.tolist() == answer_of(response.tokens_n.tolist(), limit)


def test_requests_are_spread_evenly_and_each_is_sent_once(servers):
    check_windows(engine_of(servers, "vllm", max_batch=64), 48)
    asked = [sampled(server) for server in servers]
    assert [len(one) for one in asked] == [16, 16, 16]
    assert len({prompt for one in asked for prompt in one}) == 48


def test_few_requests_of_several_ranks_go_to_different_servers(servers):
    engine = engine_of(servers, "vllm")
    for group in range(3):
        engine.generate([new_response(group, group, [group])], window=2, max_response=2)
    assert [len(sampled(server)) for server in servers] == [1, 1, 1]


@pytest.mark.parametrize("lives", [(0, 9, None), (None, 0, 0), (1, 2, None), (5, None, 7)])
def test_a_server_that_ends_is_replaced_by_the_others(servers, lives, caplog):
    for server, number in zip(servers, lives, strict=True):
        server.lives = number
    check_windows(engine_of(servers, "vllm", max_batch=16), 60)
    answered = [prompt for server in servers for prompt in sampled(server)]
    assert len(answered) == len(set(answered)) == 60, "each was answered once"
    for server, number in zip(servers, lives, strict=True):
        assert number is None or len(sampled(server)) == number
        told = [text for text in caplog.messages if text.startswith(server.url)]
        assert len(told) == (number is not None), "said once"
        assert all("its requests go to" in text for text in told)


def test_one_sentence_when_no_server_is_left(servers):
    for server, number in zip(servers, (3, 0, 8), strict=True):
        server.lives = number
    engine = engine_of(servers, "vllm", max_batch=16, retry_seconds=0.1)
    with pytest.raises(EngineError, match=r"none of the 3 servers of rollout.url answered within 0\.1 s") as refusal:
        check_windows(engine, 60)
    assert all(server.url in str(refusal.value) for server in servers)
    assert "\n" not in str(refusal.value)


def test_all_servers_may_be_gone_for_a_while(servers, tmp_path):
    engine = engine_of(servers, "vllm", max_batch=16, retry_seconds=20.0)
    publish_weights(tiny_model("qwen3_moe"), tmp_path, engine, 7)
    for server in servers:
        server.lives, server.asked = 3, []

    def start_again():
        """Once no request is under way: those that reach a real server before it ends get no answer."""
        before = None
        while before != (before := [server.lives for server in servers]):
            time.sleep(0.5)
        for server in servers:
            server.version, server.lives = "default", None

    starter = threading.Thread(target=start_again)
    starter.start()
    check_windows(engine, 60)
    starter.join()
    for server in servers:
        later = [path for path, _ in server.asked[3:]]
        assert "/collective_rpc" in later
        if "/update_weight_version" in later:
            later = later[: later.index("/update_weight_version")]  # else the others had finished before it was up
        assert PATH not in later, "no answer of other weights"
    assert any("/update_weight_version" in [path for path, _ in server.asked[3:]] for server in servers)


def test_a_server_that_hangs_gets_no_more_requests_than_it_has(servers):
    ended = threading.Event()
    servers[0].change = lambda answer: ended.wait(5) and answer
    engine = engine_of(servers, "vllm", max_batch=6, timeout_seconds=0.5)
    began = time.monotonic()
    check_windows(engine, 24)
    ended.set()
    assert time.monotonic() - began < 3
    assert len(sampled(servers[0])) <= 4
    assert set(sampled(servers[0])) <= {*sampled(servers[1]), *sampled(servers[2])}


def test_a_request_that_takes_too_long_everywhere_ends_the_run(servers):
    ended = threading.Event()
    for server in servers:
        server.change = lambda answer: ended.wait(5) and answer
    engine = engine_of(servers, "vllm", timeout_seconds=0.2, retry_seconds=60.0)
    with pytest.raises(EngineError, match=r"timed out after 0\.2 s; increase rollout.timeout_seconds.*\(2 attempts\)"):
        check_windows(engine, 1)
    ended.set()
    assert sum(len(sampled(server)) for server in servers) == 2


def test_a_dead_engine_behind_a_living_server_is_a_lost_server(servers):
    servers[0].failures = [500] * 1000
    with pytest.raises(EngineError, match=rf"{servers[0].url}{PATH} failed: status 500"):
        check_windows(engine_of(servers, "vllm"), 12)
    looks = count()
    servers[0].on_get = lambda: setattr(servers[0], "health", 503 if next(looks) else 200)
    check_windows(engine_of(servers, "vllm"), 12)
    assert next(looks) > 1


def test_weights_are_written_once_and_loaded_by_all(servers, tmp_path, caplog):
    engine, model = engine_of(servers, "vllm", max_batch=16), tiny_model("qwen3_moe")
    folder = publish_weights(model, tmp_path, engine, 1)
    load = ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
    assert [server.asked[0] for server in servers] == [load] * 3
    assert [server.version for server in servers] == ["1"] * 3
    servers[1].lives = 0
    with caplog.at_level(logging.WARNING):
        folder = publish_weights(model, tmp_path, engine, 2)
    assert [server.version for server in servers] == ["2", "1", "2"]
    [said] = caplog.messages
    assert said.startswith(servers[1].url)
    servers[1].lives, servers[1].version, servers[1].asked = None, "default", []
    check_windows(engine, 30)
    assert servers[1].version == "2"
    assert servers[1].asked[0] == ("/collective_rpc", load[1] | {"kwargs": {"weights_path": str(folder)}})
    for server in servers:
        server.lives = 0
    with pytest.raises(EngineError, match=r"none of the 3 servers of rollout\.url answered: \(1\) "):
        publish_weights(model, tmp_path, engine, 3)


def test_server_restarted_unseen_gets_the_weights_too(servers, tmp_path, monkeypatch):
    monkeypatch.setattr(pool, "SEEN_SECONDS", 0.0)
    server, engine = servers[0], engine_of(servers[:1], "vllm", max_batch=1)
    publish_weights(tiny_model("qwen3_moe"), tmp_path, engine, 1)
    server.asked.clear()

    def begin_anew_after(answer):
        server.version = "default" if "choices" in answer else server.version
        return answer

    server.change = begin_anew_after
    check_windows(engine, 4)
    load = ["/collective_rpc", "/reset_prefix_cache", "/update_weight_version"]
    assert [path for path, _ in server.asked] == [PATH, *[*load, PATH] * 3]


def test_a_server_that_refuses_new_weights_ends_the_update(servers, tmp_path):
    servers[2].failures = [400]
    with pytest.raises(EngineError, match=rf"{servers[2].url}/collective_rpc failed: status 400"):
        publish_weights(tiny_model("qwen3_moe"), tmp_path, engine_of(servers, "vllm"), 1)


def test_server_that_is_silent_at_first_delays_others_briefly(servers, monkeypatch):
    monkeypatch.setattr(pool, "SETTLE_SECONDS", 0.1)
    ended = threading.Event()
    servers[0].on_get = lambda: ended.wait(5)
    began = time.monotonic()
    check_windows(engine_of(servers, "vllm", max_batch=16), 20)
    took = time.monotonic() - began
    ended.set()
    assert took < 2
    assert sampled(servers[0]) == []
