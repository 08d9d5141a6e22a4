"""`relibra serve` as a user runs it: worker processes, and answers over HTTP."""

import contextlib
import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from benchmarks.reliability.started_run import are_gone
from tests.serving.models import greedy_answer, greedy_request, write_model
from tests.serving.server_process import relibra_serve, workers_of, write_text_model


def complete(url, **body):
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60, trust_env=False)


def test_completions_equal_the_whole_model(served):
    model, url, _ = served
    request = greedy_request(1, 6, 8)
    asked = {"max_tokens": 8, "temperature": 0, "logprobs": 1, "return_token_ids": True, "ignore_eos": True}
    answer = complete(url, prompt=list(request.prompt), **asked).json()
    expected = greedy_answer(model, request.prompt, 8)
    [choice] = answer["choices"]
    assert choice["token_ids"] == expected.tokens
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected.log_probs.tolist(), abs=1e-5)
    assert choice["finish_reason"] == "length"
    assert answer["usage"] == {"prompt_tokens": 6, "completion_tokens": 8, "total_tokens": 14}


def test_streams_hold_the_same_tokens(served):
    _, url, _ = served
    body = {"prompt": [5, 6, 7], "max_tokens": 5, "seed": 3, "return_token_ids": True, "n": 2}
    whole = complete(url, **body).json()["choices"]
    with httpx.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}, timeout=60) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    streamed = {0: [], 1: []}
    for line in lines[:-1]:
        [choice] = json.loads(line)["choices"]
        streamed[choice["index"]] += choice["token_ids"]
    assert streamed == {choice["index"]: choice["token_ids"] for choice in whole}
    assert streamed[0] != streamed[1]


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"prompt": [[3], []]}, "empty"),
        ({"prompt": [999]}, "token"),
        ({"prompt": "a\u00e4", "model": "other"}, "other"),
        ({"prompt": [3], "max_tokens": 4096}, "4096"),
        ({"prompt": [[3]] * 100, "n": 100}, "256"),
        ({"prompt": [3], "presence_penalty": 1}, "presence_penalty"),
        ({"prompt": [3], "stop_token_ids": [999]}, "token"),
    ],
    ids=str,
)
def test_wrong_requests_are_refused_with_a_sentence(served, body, named):
    _, url, _ = served
    answer = complete(url, **body)
    error = answer.json()["error"]
    assert answer.status_code == error["code"] == (404 if "model" in body else 400)
    assert named in error["message"]


def test_the_least_temperatures_are_greedy(served):
    _, url, _ = served
    body = {"prompt": [3, 5], "max_tokens": 6, "return_token_ids": True}
    [greedy] = complete(url, **body, temperature=0).json()["choices"]
    for temperature in (1e-300, 1e-40, 9e-6, 1e-5):
        [choice] = complete(url, **body, temperature=temperature).json()["choices"]
        assert choice["token_ids"] == greedy["token_ids"]


def test_an_answer_says_which_stop_ended_it(served):
    _, url, _ = served
    body = {"prompt": [3, 5], "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    [plain] = complete(url, **body).json()["choices"]
    assert (plain["finish_reason"], plain["stop_reason"]) == ("length", None)
    for stop, reason in (
        ({"stop_token_ids": [plain["token_ids"][2]]}, plain["token_ids"][2]),
        ({"stop": [plain["text"][1:3], "never"]}, plain["text"][1:3]),
    ):
        [choice] = complete(url, **body, **stop).json()["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", reason)
        messages = [{"role": "user", "content": plain["text"]}]
        chat = httpx.post(f"{url}/v1/chat/completions", json={"messages": messages, "max_tokens": 4}, timeout=60)
        assert "stop_reason" in chat.json()["choices"][0]


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"", "application/json", 400),
        (b"{", "application/json", 400),
        (b'{"prompt": "' + b"\xff" + b'"}', "application/json", 400),
        (b'{"prompt": [3], "temperature": NaN}', "application/json", 400),
        (b'{"prompt": ' + b"[" * 10_000, "application/json", 400),
        (b'{"prompt": [3]}', "text/plain", 415),
    ],
    ids=lambda one: str(one)[:40],
)
def test_bodies_that_are_no_json_are_refused(served, content, kind, status):
    _, url, _ = served
    answer = httpx.post(f"{url}/v1/completions", content=content, headers={"Content-Type": kind}, timeout=60)
    assert answer.status_code == status
    assert len(answer.json()["error"]["message"]) > 10


def test_other_paths_and_methods_are_refused(served):
    _, url, _ = served
    unknown, unasked = httpx.get(f"{url}/nowhere"), httpx.get(f"{url}/v1/completions")
    assert unknown.status_code == unknown.json()["error"]["code"] == 404
    assert unasked.status_code == unasked.json()["error"]["code"] == 405
    assert unasked.headers["Allow"] == "POST"
    assert "--updates" in httpx.post(f"{url}/collective_rpc", json={}).json()["error"]["message"]


def test_a_model_is_listed_and_found_by_its_name(served):
    _, url, _ = served
    [model] = httpx.get(f"{url}/v1/models").json()["data"]
    assert model["max_model_len"] == 96
    assert httpx.get(f"{url}/v1/models/tiny").json() == model
    assert httpx.get(f"{url}/v1/models/other").status_code == 404


def test_health_names_role_number_and_process_of_each_worker(served):
    _, url, process = served
    answer = httpx.get(f"{url}/health")
    assert answer.status_code == 200
    workers = answer.json()["workers"]
    assert [(one["role"], one["number"]) for one in workers] == [("attention", 0), ("experts", 0), ("experts", 1)]
    assert {one["state"] for one in workers} == {"ready"}
    assert sorted(one["pid"] for one in workers) == workers_of(process)
    for one in workers:
        words = Path(f"/proc/{one['pid']}/cmdline").read_bytes().split(b"\0")
        assert words[-3:-1] == [one["role"].encode(), str(one["number"]).encode()], "who looks at ps sees it"


def answered(url, seconds=60.0, **body):
    """Ask until an answer comes."""
    end = time.monotonic() + seconds
    while (answer := complete(url, **body)).status_code != 200:
        assert time.monotonic() < end, answer.text
        time.sleep(0.5)
    return answer.json()


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared", "tcp"])
@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGSTOP])
def test_no_request_is_lost_where_experts_have_copies(transport, stop, tmp_path):
    model = write_model("Qwen3MoeForCausalLM", tmp_path)
    options = ("--experts", "2", "--spare-experts", "4", "--transport", transport, "--timeout", "4")
    with relibra_serve(tmp_path, *options) as (url, process), ThreadPoolExecutor(6) as pool:
        requests = [greedy_request(number, 4 + number, 80) for number in range(6)]
        bodies = [
            {"prompt": list(one.prompt), "max_tokens": 80, "temperature": 0, "return_token_ids": True}
            for one in requests
        ]
        answers = [pool.submit(complete, url, **body) for body in bodies]
        time.sleep(0.3)
        stopped = sorted(workers_of(process))[0]
        os.kill(stopped, stop)
        for request, answer in zip(requests, answers, strict=True):
            assert answer.result().status_code == 200, answer.result().text
            [choice] = answer.result().json()["choices"]
            assert choice["token_ids"] == greedy_answer(model, request.prompt, 80).tokens
        if stop == signal.SIGSTOP:
            with contextlib.suppress(ProcessLookupError):  # it was given up before
                os.kill(stopped, signal.SIGKILL)


@pytest.mark.slow
def test_copies_are_placed_anew_while_requests_run(tmp_path):
    model = write_model("Qwen3MoeForCausalLM", tmp_path)
    options = ("--experts", "4", "--spare-experts", "1", "--rebalance-seconds", "1", "--max-batch", "8")
    with relibra_serve(tmp_path, *options) as (url, _), ThreadPoolExecutor(4) as pool:
        request = greedy_request(3, 12, 80)
        body = {"prompt": list(request.prompt), "max_tokens": 80, "temperature": 0, "return_token_ids": True}
        expected = greedy_answer(model, request.prompt, 80).tokens
        end = time.monotonic() + 25
        while time.monotonic() < end:
            for answer in [pool.submit(complete, url, **body) for _ in range(4)]:
                assert answer.result().status_code == 200, answer.result().text
                assert answer.result().json()["choices"][0]["token_ids"] == expected
        assert httpx.get(f"{url}/health").json()["rebalanced"] >= 1


def figures(url):
    """Return the lines of /metrics by their beginnings."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def test_metrics_tell_busy_workers_and_how_full_the_cache_is(served):
    _, url, _ = served
    before = figures(url)
    complete(url, prompt=[3, 4, 5], max_tokens=60, ignore_eos=True)
    after = figures(url)
    for worker in ('role="attention",worker="0"', 'role="experts",worker="0"', 'role="experts",worker="1"'):
        assert after[f"relibra_busy_seconds_total{{{worker}}}"] > before[f"relibra_busy_seconds_total{{{worker}}}"]
    assert 0 < after['relibra_busy_share{role="attention"}'] <= 1
    assert 0 < after['relibra_busy_share{role="experts"}'] <= 1
    assert after['relibra_kv_cache_most_bytes{worker="0"}'] > 0
    assert after['relibra_kv_cache_usage{worker="0"}'] == after['relibra_kv_cache_bytes{worker="0"}'] == 0


def test_stopped_server_ends_its_answers_with_a_sentence(tmp_path):
    write_text_model(tmp_path)
    with relibra_serve(tmp_path, "--max-length", "12000", "--kv-tokens", "24000") as (url, process):
        asked, workers = {"prompt": [5, 6, 7], "max_tokens": 11900, "ignore_eos": True}, workers_of(process)
        with ThreadPoolExecutor() as pool, httpx.Client(timeout=60, trust_env=False) as client:
            whole = pool.submit(complete, url, **asked)
            with client.stream("POST", f"{url}/v1/completions", json={**asked, "stream": True}) as answer:
                lines = (line for line in answer.iter_lines() if line)
                next(lines)
                while "relibra_running 2.0" not in httpx.get(f"{url}/metrics", trust_env=False).text:
                    assert not whole.done()
                stopped = time.monotonic()
                process.send_signal(signal.SIGINT)
                *_, last = lines
            refused = whole.result()
        assert "being stopped" in json.loads(last.removeprefix("data: "))["error"]["message"]
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, 503)
        process.wait(30)
        assert time.monotonic() - stopped < 5, "no answer is waited for"
        assert process.stderr.read() in ("", "stopped\n"), "no traceback"
        assert len(workers) == 2
        assert are_gone(workers)
