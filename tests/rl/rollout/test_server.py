"""The client of served engines against a small server that speaks both dialects, and now and then fails."""

import asyncio
import base64
import io
import json
import threading
import time
import tracemalloc
from functools import partial

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from relibra.errors import EngineError
from relibra.rl.rollout.response import RolloutEngine, new_response
from relibra.rl.rollout.served import requests, weights
from relibra.rl.rollout.served.client import ServedRoutes, ServerClient
from relibra.rl.rollout.served.dialects import PATHS
from relibra.rl.rollout.served.engine import ServerEngine
from relibra.rl.rollout.served.requests import RequestFailed, open_connections, request_json
from tests.fuzz.servers import RawServer, answer_body, http
from tests.replay.tiny_models import tiny_model
from tests.rl.rollout.published import publish_weights
from tests.rl.rollout.stand_in_server import STOP, answer_of, engine_of, ids_of, running


@pytest.fixture
def served(monkeypatch):
    monkeypatch.setattr(requests, "PAUSE_SECONDS", 0.001)
    with running() as server:
        yield server


@pytest.mark.parametrize("dialect", ["sglang", "vllm"])
def test_tokens_log_probs_and_routes_keep_the_order_of_responses(served, dialect):
    responses = [new_response(n, 0, [n, n + 1]) for n in (2, 20, 30, 4, 5, 40, 11)]
    engine = engine_of(served, dialect)
    assert isinstance(engine, RolloutEngine)
    windows, cost = engine.generate(responses, window=5, max_response=8)
    for response, window in zip(responses, windows, strict=True):
        added = answer_of(response.tokens_n.tolist(), 5)
        assert window.tokens_w.tolist() == added
        assert window.stopped == (added[-1] == STOP)
        np.testing.assert_allclose(window.log_probs_w, [-0.5 - token / 100 for token in added], rtol=1e-6)
        expected = ids_of([*response.tokens_n.tolist(), *added])[:, [1, 2]]
        assert window.experts_mLK.dtype == np.uint8
        assert np.array_equal(window.experts_mLK, expected)
        one = response.extended(window, weight_version=0, max_response=8)
        assert one.experts_mLK is window.experts_mLK
    lengths = [len(window.tokens_w) for window in windows]
    steps = -(-sum(lengths) // 4)
    assert (cost.decode_steps, cost.slot_steps, cost.prefilled_tokens) == (steps, 4 * steps, 14)
    assert max(lengths) <= steps
    assert cost.busy_slot_steps == sum(lengths)
    seeds = {
        body["sampling_params"].get("seed", body["sampling_params"].get("sampling_seed")) for _, body in served.asked
    }
    assert len(seeds) == 7
    assert all(body["sampling_params"]["stop_token_ids"] == [STOP] for _, body in served.asked)


def test_a_window_is_cut_at_the_longest_response(served):
    response = new_response(1, 0, [20])
    window = engine_of(served).generate([response], window=4, max_response=6)[0][0]
    response = response.extended(window, weight_version=0, max_response=6)
    [window] = engine_of(served).generate([response], window=4, max_response=6)[0]
    assert len(window.tokens_w) == 2
    assert len(window.experts_mLK) == 1 + 6 - 1


def test_a_model_without_experts_has_no_routes(served):
    [window], _ = engine_of(served, routes=None).generate([new_response(1, 0, [20])], window=4, max_response=6)
    assert window.experts_mLK is None
    assert served.asked[0][1]["return_routed_experts"] is False


def traced_answer(dialect, new):
    """Return the bytes of an answer of a model with 48 layers and 8 choices, and the peak of memory that reads it."""
    shape = ServedRoutes(num_experts=128, layer_ids=tuple(range(1, 49)), num_layers=49, top_k=8)
    prompt = new // 2
    ids = np.broadcast_to(np.arange(8, dtype=np.uint8), (prompt + new - 1, 49, 8))
    body = answer_body(dialect, ids, new)
    if dialect == "vllm":
        entry = {"logprob": -0.5, "token": "token_id:3", "bytes": None, "top_logprobs": []}
        body["choices"][0]["logprobs"]["content"] = [entry] * new
    text = json.dumps(body).encode()
    server = RawServer()
    server.answer = {PATHS[dialect]: http(text), "": http(b"{}")}
    client = ServerClient(url=server.url, dialect=dialect, routes=shape, stop_ids=(7,), vocab_size=50, temperature=1.0)
    engine = ServerEngine(servers=(client,), seed=0)
    ask = partial(engine.generate, [new_response(1, 0, [2] * prompt)], window=new, max_response=new)
    ask()  # compiles kernels
    tracemalloc.start()
    try:
        [window], _ = ask()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert np.array_equal(window.experts_mLK, ids[:, 1:])
    assert len(window.log_probs_w) == new
    return len(text), peak


@pytest.mark.parametrize("dialect", ["sglang", "vllm"])
def test_an_answer_takes_at_most_twice_its_bytes_in_memory(dialect):
    """Most of it are routes, some of it log-probs; what a request takes at any length is not the answer's."""
    (short, least), (long, most) = (traced_answer(dialect, new) for new in (10, 1200))
    assert least < 500_000
    assert most - least <= 2 * (long - short)


def test_no_responses_ask_for_nothing(served):
    windows, cost = engine_of(served).generate([], window=4, max_response=4)
    assert (windows, cost.slot_steps, served.asked) == ([], 0, [])


def test_a_busy_server_is_asked_again_and_a_refusal_is_told(served):
    one = [new_response(1, 0, [20])]
    served.failures = [503, 429, 502]
    assert len(engine_of(served).generate(one, window=4, max_response=4)[0]) == 1
    served.failures = [503] * requests.ATTEMPTS
    with pytest.raises(EngineError, match=rf"{served.url}/generate failed: status 503.*\(4 attempts\)"):
        engine_of(served).generate(one, window=4, max_response=4)
    served.asked.clear()
    served.failures = [400]
    with pytest.raises(EngineError, match=r"status 400, .*not now"):
        engine_of(served).generate(one, window=4, max_response=4)
    assert len(served.asked) == 1, "what is wrong stays wrong"


def test_a_server_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr(requests, "PAUSE_SECONDS", 0.001)
    with running() as gone:
        url = gone.url
    engine = engine_of(gone, "vllm", routes=None)
    with pytest.raises(EngineError, match=rf"the server did not answer: {url}/health failed: .*refused"):
        engine.generate([new_response(1, 0, [20])], window=4, max_response=4)


def test_a_server_that_never_answers_is_asked_twice(served):
    waiting = threading.Event()
    served.change = lambda answer: waiting.wait(5) and answer
    engine = engine_of(served, timeout_seconds=0.2)
    with pytest.raises(EngineError, match=rf"{served.url}/generate .*timed out after 0.2 s; increase rollout.timeout"):
        engine.generate([new_response(1, 0, [20])], window=4, max_response=4)
    waiting.set()
    assert len(served.asked) == 2


def test_a_request_that_took_too_long_once_is_repeated(served):
    turns = iter([0.5])
    served.change = lambda answer: (time.sleep(next(turns, 0)), answer)[1]
    windows, _ = engine_of(served, timeout_seconds=0.2).generate([new_response(1, 0, [20])], window=4, max_response=4)
    assert len(windows) == 1
    assert len(served.asked) == 2


def test_longer_requests_have_more_time_and_larger_answers(served):
    [engine] = engine_of(served, timeout_seconds=60.0).servers
    assert [engine.request_seconds(tokens) for tokens in (0, 1024, 8192)] == [60, 60, 480]
    assert engine.max_answer_bytes(8192, 9000) - engine.max_answer_bytes(0, 0) == 8192 * 1024 + 9000 * 3 * 2 * 11


def post_json(url, body, *, seconds, max_bytes):
    """Send JSON over a connection of its own and return the JSON of the answer."""

    async def send():
        async with open_connections(url, "", 1) as client:
            return await request_json(client, "", body, seconds=seconds, max_bytes=max_bytes)

    return asyncio.run(send())


HEAD = b"HTTP/1.1 200 OK\r\n"


def drip(start):
    def answer(connection):
        connection.sendall(start)
        for _ in range(200):
            connection.sendall(b"1")
            time.sleep(0.02)

    return answer


def pour(start, piece=b"1" * (1 << 16)):
    def answer(connection):
        connection.sendall(start)
        for _ in range(1 << 10):
            connection.sendall(piece)

    return answer


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (drip(HEAD + b"Content-Length: 10000\r\n\r\n"), "timed out after 0.3 s"),
        (drip(HEAD + b"X: "), "timed out after 0.3 s"),
        (drip(b""), "timed out after 0.3 s"),
        (pour(HEAD + b"Content-Length: 5200000000\r\n\r\n"), "longer than 1,000,000 bytes"),
        (pour(HEAD + b"\r\n"), "longer than 1,000,000 bytes"),
        (pour(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"8000\r\n" + b"1" * 32768 + b"\r\n"), "1,000,000 bytes"),
        (HEAD + b"Content-Length: 10\r\n\r\n123", "received 3 bytes, expected 10"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://elsewhere/\r\n\r\n", "'http://elsewhere/'"),
        (HEAD + b"\r\n" + b"[" * 100_000, "recursion"),
        (HEAD + b"\r\n" + b"1" * 5000, "cannot be read"),
    ],
)
def test_slow_large_or_redirected_answers_are_refused(answer, message):
    server, began = RawServer(), time.monotonic()
    server.answer = {"": answer}
    with pytest.raises(RequestFailed, match=message):
        post_json(f"{server.url}/x", {}, seconds=0.3, max_bytes=1_000_000)
    assert time.monotonic() - began < 2


def test_an_address_without_a_server_is_told():
    for url in ("127.0.0.1:3000", "ftp://127.0.0.1/", "http://a:b/"):
        with pytest.raises(EngineError, match=r"rollout\.url"):
            open_connections(url, "", 1)


def change_meta(**changes):
    return lambda answer: {"meta_info": answer["meta_info"] | changes}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _: b"<html>", "cannot be read: JSON is malformed"),
        (lambda _: {"text": "hello"}, "missing required field `meta_info`"),
        (change_meta(routed_experts=None), "without the requested fields"),
        (change_meta(output_token_logprobs=[]), "0 of 4 tokens"),
        (change_meta(output_token_logprobs=[[-1.0, 3, None]]), "1 of 4 tokens, ended by 'length'"),
        (change_meta(output_token_logprobs=[[float("-inf"), 3, None]] * 4), "JSON is malformed"),
        (change_meta(output_token_logprobs=[[5.0, 3, None]] * 4), "log-prob 5.0"),
        (change_meta(output_token_logprobs=[["-1", 3, None]] * 4), "Expected `float`, got `str`"),
        (change_meta(output_token_logprobs=[[-1.0, -5, None]] * 4), "token -5: expected whole numbers from 0 to 49"),
        (change_meta(output_token_logprobs=[[-1.0, 1.9, None]] * 4), "Expected `int`, got `float`"),
        (change_meta(output_token_logprobs=[[-1.0, 10**9, None]] * 4), "token 1000000000"),
        (change_meta(output_token_logprobs=[[-1.0, True, None]] * 4), "Expected `int`, got `bool`"),
        (change_meta(finish_reason={"type": [[]]}), "Expected `str`, got `array`"),
        (change_meta(finish_reason=3), "Expected `object [|] null`, got `int`"),
        (change_meta(routed_experts="!" * 128), "no base64"),
        (change_meta(routed_experts=base64.b64encode(b"\1\0\0\0" * 24).decode()), r"\[1, 1\] of a token: they must"),
        (change_meta(finish_reason={"type": "abort"}), "ended by 'abort'"),
        (change_meta(routed_experts=base64.b64encode(b"\0" * 40).decode()), r"shape \(10,\): expected 4 rows"),
        (change_meta(routed_experts=base64.b64encode(b"\x09" * 96).decode()), "expert ids 151587081"),
    ],
)
def test_answers_that_cannot_be_trained_on_are_refused(served, change, message):
    served.change = change
    with pytest.raises(EngineError, match=message) as refusal:
        engine_of(served).generate([new_response(1, 0, [20])], window=4, max_response=4)
    assert served.url in str(refusal.value)


def npy(array):
    np.save(file := io.BytesIO(), array, allow_pickle=True)
    return file.getvalue()


HUGE = npy(np.zeros((4, 3, 2), np.uint8)).replace(b"(4, 3, 2), }          ", b"(4, 3, 2000000000000)}")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (npy(np.zeros((4, 3, 2), np.complex64)), "routes of type complex64"),
        (npy(np.zeros((4, 3, 2), np.float32)), "routes of type float32"),
        (npy(np.zeros((4, 3, 2), object)), "does not fit"),
        (HUGE, "does not fit"),
        (b"no array", "magic string"),
    ],
)
def test_routes_of_vllm_that_are_no_ids_are_refused(served, data, message):
    text = base64.b64encode(data).decode()
    served.change = lambda answer: {"choices": [answer["choices"][0] | {"routed_experts": text}]}
    with pytest.raises(EngineError, match=message):
        engine_of(served, "vllm").generate([new_response(1, 0, [20])], window=4, max_response=4)


@pytest.mark.parametrize("dialect", ["sglang", "vllm"])
def test_published_weights_are_a_fresh_folder_the_server_loads(served, dialect, tmp_path):
    model, folder, engine = tiny_model("qwen3_moe"), tmp_path / "weights", engine_of(served, dialect)
    publish_weights(model, folder, engine, 11)
    [first] = folder.iterdir()
    publish_weights(model, folder, engine, 12)
    [last] = folder.iterdir()
    assert first != last, "a server may still read the folder before"
    assert [oct(path.stat().st_mode & 0o777) for path in (last, last / "model.safetensors")] == ["0o755", "0o644"]
    loaded = AutoModelForCausalLM.from_pretrained(last).state_dict()
    assert all((loaded[name] == value).all() for name, value in model.state_dict().items())
    if dialect == "vllm":
        load = {"method": "reload_weights", "kwargs": {"weights_path": str(last)}}
        told = [
            ("/collective_rpc", load),
            ("/reset_prefix_cache", {}),
            ("/update_weight_version", {"new_version": "12"}),
        ]
        assert served.asked[3:] == told
        assert engine.published.version == 12
    else:
        [_, (path, body)] = served.asked
        assert engine.published.version == 12
        assert path == "/update_weights_from_disk"
        assert body == {"model_path": str(last), "weight_version": "12", "flush_cache": True}
        served.change = lambda _: {"success": False, "message": "shapes differ"}
        with pytest.raises(EngineError, match=r"did not load .*weights.*: 'shapes differ'"):
            publish_weights(model, folder, engine_of(served), 13)


@pytest.mark.parametrize("dialect", ["sglang", "vllm"])
def test_adapters_have_a_new_name_in_each_version(served, dialect, tmp_path):
    engine = engine_of(served, dialect)
    first, last = (tmp_path / f"adapter-00000{version}-0123abcd" for version in (3, 4))
    first.mkdir()
    last.mkdir()
    engine.published.folder = first
    weights.publish_weights(last, engine, 4)
    assert [one.name for one in tmp_path.iterdir()] == [last.name]
    prefix = "" if dialect == "sglang" else "/v1"
    version = {"new_version": "4"} | ({"abort_all_requests": False} if dialect == "sglang" else {})
    assert served.asked == [
        (f"{prefix}/load_lora_adapter", {"lora_name": last.name, "lora_path": str(last)}),
        (f"{prefix}/unload_lora_adapter", {"lora_name": first.name}),
        ("/update_weight_version", version),
    ]
    engine.generate([new_response(1, 0, [20])], window=4, max_response=4)
    assert served.asked[-1][1]["lora_path" if dialect == "sglang" else "model"] == last.name
    served.version = "default"  # it was started again
    served.asked.clear()
    engine.generate([new_response(1, 0, [20])], window=4, max_response=4)
    assert [path for path, _ in served.asked][:2] == [f"{prefix}/load_lora_adapter", "/update_weight_version"]


def test_a_server_that_loads_no_adapters_is_told_how_to(served, tmp_path):
    served.failures = [404]
    with pytest.raises(EngineError, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"):
        weights.publish_weights(tmp_path / "adapter-000003-0123abcd", engine_of(served, "vllm"), 3)


@pytest.mark.parametrize("dialect", ["sglang", "vllm"])
def test_restarted_server_loads_last_weights_before_it_answers(served, tmp_path, caplog, dialect):
    engine = engine_of(served, dialect, retry_seconds=20.0)
    folder = publish_weights(tiny_model("qwen3_moe"), tmp_path, engine, 3)
    served.asked.clear()
    served.version, served.failures = "default", [503] * (requests.ATTEMPTS + 2)  # longer than without retry_seconds
    responses = [new_response(n, 0, [n, n + 1]) for n in (2, 20, 30)]
    windows, _ = engine.generate(responses, window=4, max_response=4)
    assert [one.tokens_w.tolist() for one in windows] == [answer_of(one.tokens_n.tolist(), 4) for one in responses]
    load = {
        "sglang": (
            "/update_weights_from_disk",
            {"model_path": str(folder), "weight_version": "3", "flush_cache": True},
        ),
        "vllm": ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}),
    }
    assert load[dialect] in served.asked
    assert [path for path, _ in served.asked[-3:]] == [PATHS[dialect]] * 3, "no answer of other weights"
    assert served.version == "3"
    assert "was started again: it loads version 3" in caplog.text


def test_a_cache_that_is_not_dropped_ends_the_update(served, tmp_path):
    served.change = lambda _: {"success": False}
    with pytest.raises(EngineError, match="did not drop its caches"):
        publish_weights(tiny_model("qwen3_moe"), tmp_path, engine_of(served, "vllm"), 1)
    assert served.asked[-1][0] == "/reset_prefix_cache?reset_running_requests=true"


@pytest.mark.parametrize("dialect", ["sglang", "vllm"])
def test_another_version_than_the_one_set_ends_the_update(served, tmp_path, dialect):
    served.change = lambda answer: setattr(served, "version", "other") or answer
    with pytest.raises(EngineError, match="version 'other': expected 4"):
        publish_weights(tiny_model("qwen3_moe"), tmp_path, engine_of(served, dialect), 4)


def test_samples_of_other_weights_are_refused(served):
    spans = [{"version": "7", "start": 0, "end": 2}, {"version": "8", "start": 2, "end": 4}]
    served.change = lambda answer: {"choices": [answer["choices"][0] | {"weight_versions": spans}]}
    engine, one = engine_of(served, "vllm"), [new_response(1, 0, [20])]
    assert len(engine.generate(one, window=4, max_response=4)[0]) == 1, "nothing was published yet"
    engine.published.version = 7
    with pytest.raises(EngineError, match="weights of version '8': expected 7"):
        engine.generate(one, window=4, max_response=4)


def test_version_of_a_sample_counts_only_if_its_parts_have_none(served):
    engine, one = engine_of(served), [new_response(1, 0, [20])]
    engine.published.version = 8
    served.version = "8"
    assert len(engine.generate(one, window=4, max_response=4)[0]) == 1
    spans = [{"version": "7", "start": 0, "end": 2}, {"version": "8", "start": 2, "end": 4}]
    served.change = change_meta(weight_versions=spans)
    with pytest.raises(EngineError, match="weights of version '7': expected 8"):
        engine.generate(one, window=4, max_response=4)
    served.change = change_meta(weight_version="9", weight_versions=[])
    with pytest.raises(EngineError, match="weights of version '9': expected 8"):
        engine.generate(one, window=4, max_response=4)


def test_the_key_is_sent_and_never_shown(served):
    engine, one = engine_of(served, key="secret-key"), [new_response(1, 0, [20])]
    engine.generate(one, window=4, max_response=4)
    assert served.keys == ["Bearer secret-key"]
    assert "secret-key" not in repr(engine)
    served.failures = [401]
    with pytest.raises(EngineError, match="status 401") as refusal:
        engine.generate(one, window=4, max_response=4)
    assert "secret" not in str(refusal.value)
    assert "secret-key" not in engine.servers[0].hide_key("status 500, 'wrong key secret-key'")


def test_routes_of_zeros_say_that_nothing_was_recorded(served):
    text = base64.b64encode(npy(np.zeros((4, 3, 2), np.uint8))).decode()
    served.change = lambda answer: {"choices": [answer["choices"][0] | {"routed_experts": text}]}
    with pytest.raises(EngineError, match=r"only zeros as routes.*--enforce-eager"):
        engine_of(served, "vllm").generate([new_response(1, 0, [20])], window=4, max_response=4)
