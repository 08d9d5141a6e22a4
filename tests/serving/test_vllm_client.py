"""Our client of vLLM's token endpoint, unchanged, against `relibra serve`."""

import asyncio
import time
from dataclasses import replace

import httpx
import numpy as np
import pytest
import torch

from relibra.errors import EngineError
from relibra.rl.rollout.response import new_response
from relibra.rl.rollout.served.canary_probe import Canary, WatchedServer
from relibra.rl.rollout.served.client import ServedRoutes, ServerClient
from relibra.rl.rollout.served.engine import ServerEngine
from relibra.rl.rollout.served.preflight import check_servers
from relibra.rl.rollout.served.sampler import Sampler
from relibra.rl.rollout.served.sleep import PAUSE, RESUME, send
from tests.rl.rollout.against_transformers import largest_difference
from tests.rl.rollout.published import compare, publish_weights
from tests.serving.models import write_model
from tests.serving.server_process import relibra_serve

pytestmark = pytest.mark.slow

TEMPERATURE, CONTEXT, STOP, VOCAB = 0.7, 320, 14, 64
PARTS = ("self_attn.q_proj", "mlp.gate.", "experts", "lm_head", "embed_tokens")


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    folder = tmp_path_factory.mktemp("start")
    return folder, write_model("Qwen3MoeForCausalLM", folder)


@pytest.fixture(scope="module")
def server(start):
    options = ("--experts", "2", "--updates", str(start[0].parent), "--max-length", str(CONTEXT))
    with relibra_serve(start[0], *options) as (url, _):
        yield url


def engine_at(url, model):
    config = model.config
    client = ServerClient(
        url=url,
        dialect="vllm",
        routes=ServedRoutes(
            num_experts=config.num_experts,
            layer_ids=tuple(range(config.num_hidden_layers)),
            num_layers=config.num_hidden_layers,
            top_k=config.num_experts_per_tok,
        ),
        stop_ids=(STOP,),
        vocab_size=VOCAB,
        temperature=TEMPERATURE,
    )
    return ServerEngine(servers=(client,), seed=3)


def prompts_of(length, number):
    rng = np.random.default_rng(length)
    return [rng.integers(0, VOCAB, length + index).tolist() for index in range(number)]


def test_log_probs_and_routes_equal_transformers_after_updates(server, start, tmp_path):
    model, engine = start[1], engine_at(server, start[1])
    [served] = check_servers(engine.servers, start_seconds=60.0, longest=CONTEXT, dtype="float32")
    assert (served.context, served.dtype) == (CONTEXT, "float32")
    watched = [WatchedServer(engine.servers[0], exact=True)]
    canary = Canary(watched, lambda index: prompts_of(8, 32)[index % 32], CONTEXT)
    for version, part in enumerate((None, *PARTS)):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if part and part in name:
                    parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(version))
        canary.before_update()
        publish_weights(model, tmp_path / "weights", engine, version)
        report = compare(canary, model, version)
        assert report.difference < 1e-5, part
        assert report.equal_routes == 1.0, part
        difference, equal = largest_difference(model, engine, prompts_of(8, 8), 12, TEMPERATURE)
        assert difference < 2e-5, part
        assert equal == 1.0, part
        if part:
            assert report.share_made == pytest.approx(1.0, abs=1e-3), part
    assert httpx.get(f"{server}/weight_info").json() == {"weight_version": str(len(PARTS))}


def test_equal_seeds_give_equal_windows(server, start):
    engine = engine_at(server, start[1])
    responses = [new_response(index, 0, prompt) for index, prompt in enumerate(prompts_of(9, 4))]
    one, _ = engine.generate(responses, window=16, max_response=16)
    other, _ = engine.generate(responses[::-1], window=16, max_response=16)
    for first, second in zip(one, other[::-1], strict=True):
        assert (first.tokens_w == second.tokens_w).all()


def test_greedy_answers_that_are_cut_are_those_of_uncut_ones(server, start):
    engine = engine_at(server, start[1])
    client = replace(engine.servers[0], temperature=0.0, stop_ids=())
    responses = [new_response(index, 0, prompt) for index, prompt in enumerate(prompts_of(9, 12))]
    whole, _ = replace(engine, servers=(client,)).generate(responses, window=200, max_response=200)
    sampler = Sampler([client], seed=3, max_batch=8, retry_seconds=0.0)
    found, version = sampler.begin(responses, [200] * 12), 0
    while not found.done():
        sampler.hold()
        asyncio.run(send(PAUSE, client))
        sampler.drain()
        client.published.version = version = version + 1
        httpx.post(f"{server}/update_weight_version", json={"new_version": str(version)})
        asyncio.run(send(RESUME, client))
        sampler.release()
        time.sleep(0.1)
    windows, _ = found.result()
    sampler.close()
    assert max(window.versions_w[-1] for window in windows) > 1, "answers were cut"
    for one, other in zip(whole, windows, strict=True):
        assert one.tokens_w.tolist() == other.tokens_w.tolist()
        np.testing.assert_allclose(one.log_probs_w, other.log_probs_w, atol=2e-5)
        assert np.array_equal(one.experts_mLK, other.experts_mLK)


def test_weights_of_another_model_leave_the_old_ones(server, start, tmp_path):
    engine = engine_at(server, start[1])
    prompt = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 8, "temperature": 0.0}}
    before = httpx.post(f"{server}/inference/v1/generate", json=prompt).json()["choices"]
    write_model("MixtralForCausalLM", tmp_path)
    with pytest.raises(EngineError, match="the weights stay as they were"):
        publish_weights(write_model("MixtralForCausalLM", tmp_path), tmp_path / "weights", engine, 7)
    assert httpx.post(f"{server}/inference/v1/generate", json=prompt).json()["choices"] == before


def test_a_request_that_is_too_long_is_named_before_a_run(server, start):
    engine = engine_at(server, start[1])
    with pytest.raises(EngineError, match="raise --max-model-len to 9999"):
        check_servers(engine.servers, start_seconds=60.0, longest=9999, dtype="float32")
