"""Workers that are killed while they serve: what is lost, what comes back, and with which weights."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.serving.models import greedy_answer, greedy_request, write_model
from tests.serving.server_process import relibra_serve, workers_of
from tests.serving.test_server import answered, complete

pytestmark = pytest.mark.slow
PROMPT = greedy_request(1, 6, 8).prompt
BODY = {"prompt": list(PROMPT), "max_tokens": 8, "temperature": 0, "return_token_ids": True, "ignore_eos": True}


def tokens_of(answer):
    return answer["choices"][0]["token_ids"]


def write_other_weights(model, folder):
    """Write a model that answers otherwise; return its greedy tokens."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter) * parameter.std().nan_to_num(0.0))
    model.save_pretrained(folder)
    return greedy_answer(AutoModelForCausalLM.from_pretrained(folder).eval(), PROMPT, 8).tokens


def load_weights(url, folder):
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
    return httpx.post(f"{url}/collective_rpc", json=body, timeout=60, trust_env=False)


def await_health(url, status, seconds=60.0):
    end = time.monotonic() + seconds
    while (answer := httpx.get(f"{url}/health", trust_env=False)).status_code != status:
        assert time.monotonic() < end, answer.text
        time.sleep(0.05)
    return answer.json()


def test_restarted_attention_worker_lost_only_its_own_requests(tmp_path):
    model = write_model("Qwen3MoeForCausalLM", tmp_path / "model")
    first = greedy_answer(model, PROMPT, 8).tokens
    options = ("--attention", "2", "--experts", "2", "--timeout", "20", "--max-length", "1000")
    options += ("--updates", str(tmp_path))
    with relibra_serve(tmp_path / "model", *options) as (url, process), ThreadPoolExecutor(8) as pool:
        other = write_other_weights(model, tmp_path / "other")
        assert other != first
        long = {"prompt": list(PROMPT), "max_tokens": 600, "ignore_eos": True}
        answers = [pool.submit(complete, url, **long) for _ in range(6)]
        while httpx.get(f"{url}/health", trust_env=False).json()["running"] < 6:
            time.sleep(0.01)
        killed = sorted(workers_of(process))[2]
        os.kill(killed, signal.SIGKILL)
        statuses = [answer.result().status_code for answer in answers]
        assert sorted(statuses) == [200] * 3 + [503] * 3
        [sentence] = {one.result().json()["error"]["message"] for one in answers if one.result().status_code == 503}
        assert "attention worker 0 is gone" in sentence
        await_health(url, 200)
        assert load_weights(url, tmp_path / "other").status_code == 200
        for worker in sorted(workers_of(process))[-2:]:  # those of attention: both come back with the new weights
            if worker != killed:
                os.kill(worker, signal.SIGKILL)
                await_health(url, 503)
                await_health(url, 200)
        for _ in range(4):
            assert tokens_of(answered(url, **BODY)) == other


def test_queued_requests_wait_for_the_only_attention_worker(tmp_path):
    model = write_model("Qwen3MoeForCausalLM", tmp_path)
    options = ("--max-batch", "1", "--micro-batches", "1", "--timeout", "20", "--max-length", "1000")
    with relibra_serve(tmp_path, *options) as (url, process), ThreadPoolExecutor(4) as pool:
        long = {"prompt": list(PROMPT), "max_tokens": 900, "ignore_eos": True}
        running = [pool.submit(complete, url, **long) for _ in range(2)]
        while httpx.get(f"{url}/health", trust_env=False).json()["running"] < 2:
            time.sleep(0.01)
        queued = pool.submit(complete, url, **BODY)
        while "relibra_waiting 1.0" not in httpx.get(f"{url}/metrics", trust_env=False).text:
            time.sleep(0.01)
        os.kill(max(workers_of(process)), signal.SIGKILL)
        assert {one.result().status_code for one in running} == {503}
        assert queued.result().status_code == 200
        assert tokens_of(queued.result().json()) == greedy_answer(model, PROMPT, 8).tokens


@pytest.mark.parametrize("spare", [0, 2])
def test_killed_experts_are_named_and_return_with_last_weights(spare, tmp_path):
    model = write_model("Qwen3MoeForCausalLM", tmp_path / "model")
    options = ("--experts", "2", "--spare-experts", str(spare), "--updates", str(tmp_path), "--timeout", "10")
    with relibra_serve(tmp_path / "model", *options) as (url, process):
        other = write_other_weights(model, tmp_path / "other")
        assert load_weights(url, tmp_path / "other").status_code == 200
        assert tokens_of(answered(url, **BODY)) == other
        os.kill(min(workers_of(process)), signal.SIGKILL)  # expert workers are started first
        if not spare:
            began, answer = time.monotonic(), complete(url, **BODY)
            assert answer.status_code == 503
            assert "expert workers [0] are lost" in answer.json()["error"]["message"]
            assert time.monotonic() - began < 10
        await_health(url, 503)
        assert load_weights(url, tmp_path / "model").status_code == 503, "a worker is missing"
        await_health(url, 200)
        assert tokens_of(answered(url, **BODY)) == other


@pytest.mark.parametrize("number", [0, 1], ids=["attention", "experts"])
def test_hanging_worker_is_shown_given_up_and_started_again(number, tmp_path):
    write_model("Qwen3MoeForCausalLM", tmp_path)
    options = ("--timeout", "4", "--max-length", "4000", "--kv-tokens", "8192")
    with relibra_serve(tmp_path, *options) as (url, process), ThreadPoolExecutor(1) as pool:
        before = answered(url, **BODY)

        def worker():
            return httpx.get(f"{url}/health", trust_env=False).json()["workers"][number]

        hanging = worker()
        asked = pool.submit(complete, url, prompt=list(PROMPT), max_tokens=3900, ignore_eos=True)
        while not httpx.get(f"{url}/health", trust_env=False).json()["running"]:
            time.sleep(0.01)
        os.kill(hanging["pid"], signal.SIGSTOP)
        end = time.monotonic() + 9
        while (shown := worker())["state"] != "silent":
            assert time.monotonic() < end
            time.sleep(0.1)
        assert 3.0 <= shown["silent_seconds"] < 10.0
        assert shown["pid"] == hanging["pid"]
        assert asked.result().status_code == 503, "it is told within ten seconds and some"
        assert time.monotonic() < end + 9
        assert "hangs" in await_health(url, 503)["error"]
        await_health(url, 200)
        back = worker()
        assert back["state"] == "ready"
        assert back["pid"] != hanging["pid"]
        assert back["pid"] in workers_of(process)
        assert hanging["pid"] not in workers_of(process)
        assert tokens_of(answered(url, **BODY)) == tokens_of(before)


def test_server_with_a_stopped_worker_stops_within_five_seconds(tmp_path):
    write_model("Qwen3MoeForCausalLM", tmp_path)
    for stopped in (0, 1):
        with relibra_serve(tmp_path) as (url, process):
            os.kill(workers_of(process)[stopped], signal.SIGSTOP)
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{url}/v1/completions", json=BODY, timeout=1, trust_env=False)
            began = time.monotonic()
            process.send_signal(signal.SIGINT)
            process.wait(30)
            assert time.monotonic() - began < 5
            assert "Traceback" not in process.stderr.read()


def test_worker_does_not_come_back_with_changed_files(tmp_path):
    model = write_model("Qwen3MoeForCausalLM", tmp_path / "model")
    with relibra_serve(tmp_path / "model", "--updates", str(tmp_path), "--timeout", "5") as (url, process):
        write_other_weights(model, tmp_path / "other")
        assert load_weights(url, tmp_path / "other").status_code == 200
        write_other_weights(model, tmp_path / "other")
        os.kill(min(workers_of(process)), signal.SIGKILL)
        end = time.monotonic() + 60
        while "have changed" not in (said := httpx.get(f"{url}/health", trust_env=False).text):
            assert time.monotonic() < end, said
            time.sleep(0.1)
        assert complete(url, **BODY).status_code == 503


def test_worker_killed_during_updates_leaves_one_version(tmp_path):
    model = write_model("Qwen3MoeForCausalLM", tmp_path / "model")
    first = greedy_answer(model, PROMPT, 8).tokens
    options = ("--experts", "2", "--updates", str(tmp_path), "--timeout", "10")
    with relibra_serve(tmp_path / "model", *options) as (url, process):
        other = write_other_weights(model, tmp_path / "other")
        ended = threading.Event()

        def update():
            while not ended.is_set():
                for folder in ("other", "model"):
                    load_weights(url, tmp_path / folder)

        updating = threading.Thread(target=update)
        updating.start()
        try:
            for delay in (0.31, 0.17):
                time.sleep(delay)
                os.kill(min(workers_of(process)), signal.SIGKILL)
                await_health(url, 503)
                await_health(url, 200)
                for _ in range(5):
                    assert tokens_of(answered(url, **BODY)) in (first, other)
        finally:
            ended.set()
            updating.join()
