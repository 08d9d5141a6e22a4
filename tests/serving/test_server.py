"""`relibra serve` as a user runs it: worker processes, and answers over HTTP."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.serving.models import greedy_answer, greedy_request, write_model

READY = re.compile(r"at (http://[\d.]+:\d+)/v1")
START_SECONDS = 90


@contextlib.contextmanager
def relibra_serve(folder, *options):
    """Run the command; yield its address and its process."""
    command = [sys.executable, "-m", "relibra", "serve", str(folder), "--port", "0", "--max-length", "96", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        line = process.stderr.readline()
        while line and not READY.search(line):
            line = process.stderr.readline()
        assert line, "the server ended before it was ready"
        yield READY.search(line).group(1), process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.wait(30)
        process.stderr.close()


def workers_of(process):
    """Return the process ids of a server's workers: roles are told apart by what the front prints about them."""
    listed = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True, check=True
    )
    return [int(pid) for pid in listed.stdout.split()]


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model = write_model("Qwen3MoeForCausalLM", folder)
    with relibra_serve(folder, "--experts", "2", "--timeout", "10") as (url, process):
        yield model, url, process


def complete(url, **body):
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60, trust_env=False)


def test_completions_equal_the_whole_model(served):
    model, url, _ = served
    request = greedy_request(1, 6, 8)
    answer = complete(
        url, prompt=list(request.tokens), max_tokens=8, temperature=0, logprobs=1, return_token_ids=True
    ).json()
    expected = greedy_answer(model, request.tokens, 8)
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
    "body",
    [
        {},
        {"prompt": []},
        {"prompt": [999]},
        {"prompt": "text"},
        {"prompt": [3], "max_tokens": 0},
        {"prompt": [3], "max_tokens": 4096},
        {"prompt": [3], "temperature": -1},
        {"prompt": [3], "stop": [""]},
    ],
    ids=str,
)
def test_wrong_requests_are_refused_with_a_sentence(served, body):
    _, url, _ = served
    answer = complete(url, **body)
    assert answer.status_code == 400
    assert len(answer.json()["error"]["message"]) > 10


def test_models_and_health(served):
    _, url, _ = served
    assert httpx.get(f"{url}/health").status_code == 200
    [model] = httpx.get(f"{url}/v1/models").json()["data"]
    assert model["max_model_len"] == 96


def answered(url, seconds=60.0, **body):
    """Ask until an answer comes."""
    end = time.monotonic() + seconds
    while (answer := complete(url, **body)).status_code != 200:
        assert time.monotonic() < end, answer.text
        time.sleep(0.5)
    return answer.json()


@pytest.mark.slow
def test_a_killed_expert_worker_is_told_within_the_timeout_and_comes_back(tmp_path):
    write_model("Qwen3MoeForCausalLM", tmp_path)
    body = {"prompt": [3, 4], "max_tokens": 4, "temperature": 0, "return_token_ids": True}
    with relibra_serve(tmp_path, "--timeout", "5") as (url, process):
        before = complete(url, **body).json()
        os.kill(min(workers_of(process)), signal.SIGKILL)  # expert workers are started first
        began = time.monotonic()
        answer = complete(url, **body)
        assert answer.status_code == 500
        assert "expert workers [0] are lost" in answer.json()["error"]["message"]
        assert time.monotonic() - began < 10
        assert httpx.get(f"{url}/health").status_code == 503
        after = answered(url, **body)
        assert after["choices"][0]["token_ids"] == before["choices"][0]["token_ids"]
        assert httpx.get(f"{url}/health").status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared", "tcp"])
@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGSTOP])
def test_no_request_is_lost_where_experts_have_copies(transport, stop, tmp_path):
    model = write_model("Qwen3MoeForCausalLM", tmp_path)
    options = ("--experts", "2", "--spare-experts", "4", "--transport", transport, "--timeout", "4")
    with relibra_serve(tmp_path, *options) as (url, process), ThreadPoolExecutor(6) as pool:
        requests = [greedy_request(number, 4 + number, 80) for number in range(6)]
        bodies = [
            {"prompt": list(one.tokens), "max_tokens": 80, "temperature": 0, "return_token_ids": True}
            for one in requests
        ]
        answers = [pool.submit(complete, url, **body) for body in bodies]
        time.sleep(0.3)
        stopped = sorted(workers_of(process))[0]
        os.kill(stopped, stop)
        for request, answer in zip(requests, answers, strict=True):
            assert answer.result().status_code == 200, answer.result().text
            [choice] = answer.result().json()["choices"]
            assert choice["token_ids"] == greedy_answer(model, request.tokens, 80).tokens
        if stop == signal.SIGSTOP:
            os.kill(stopped, signal.SIGKILL)


@pytest.mark.slow
def test_copies_are_placed_anew_while_requests_run(tmp_path):
    model = write_model("Qwen3MoeForCausalLM", tmp_path)
    options = ("--experts", "4", "--spare-experts", "1", "--rebalance-seconds", "1", "--max-batch", "8")
    with relibra_serve(tmp_path, *options) as (url, _), ThreadPoolExecutor(4) as pool:
        request = greedy_request(3, 12, 80)
        body = {"prompt": list(request.tokens), "max_tokens": 80, "temperature": 0, "return_token_ids": True}
        expected = greedy_answer(model, request.tokens, 80).tokens
        end = time.monotonic() + 25
        while time.monotonic() < end:
            for answer in [pool.submit(complete, url, **body) for _ in range(4)]:
                assert answer.result().status_code == 200, answer.result().text
                assert answer.result().json()["choices"][0]["token_ids"] == expected
        assert httpx.get(f"{url}/health").json()["rebalanced"] >= 1


@pytest.mark.slow
def test_ctrl_c_ends_all_workers(tmp_path):
    write_model("Qwen3MoeForCausalLM", tmp_path)
    with relibra_serve(tmp_path) as (_, process):
        workers = workers_of(process)
        assert len(workers) == 2
        process.send_signal(signal.SIGINT)
        process.wait(30)
        assert not any(map(is_alive, workers))
