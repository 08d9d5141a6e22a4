"""The canary: what it says of servers that are stale, corrupt or raw, and that rounding alone ends nothing."""

import copy
import logging
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from relibra.errors import EngineError
from relibra.replay import record_routing
from relibra.rl.rollout.response import new_response
from relibra.rl.rollout.served import canary_probe, requests
from relibra.rl.rollout.served.canary import CanaryScores, find_fault, share_made
from relibra.rl.rollout.served.canary_probe import Canary, WatchedServer
from relibra.rl.rollout.served.client import ServedRoutes
from relibra.rl.rollout.served.engine import ServerEngine
from relibra.rl.rollout.served.preflight import check_servers, missing_flags
from tests.replay.tiny_models import tiny_model
from tests.rl.rollout.published import compare, publish_weights
from tests.rl.rollout.stand_in_server import CONFIG, client_of, running

both = pytest.mark.parametrize("dialect", ["sglang", "vllm"])


def scores(*, noise=0.0, update=0.0, fault="", temperature=0.7, exact=True, seed=0):
    """Scores of a server whose log-probs differ by noise after an update of some size."""
    rng = np.random.default_rng(seed)
    before, way = -rng.exponential(1.0, 2000), rng.normal(0.0, 1.0, 2000)
    after, raw = before + update * way, -rng.exponential(1.0, 100)
    tempered = raw * 1.3
    served = before if fault == "stale" else after + (2 * way if fault == "corrupt" else 0)
    sampled = raw if fault == "raw" else tempered + (0.5 if fault == "cache" else 0)
    return CanaryScores(
        served_T=served + rng.normal(0, noise, 2000),
        trained_T=after,
        earlier_T={3: before},
        sampled_S=sampled + rng.normal(0, noise, 100),
        tempered_S=tempered,
        raw_S=raw,
        temperature=temperature,
        exact=exact,
        equal_routes=0.1 if fault == "routes" else 1.0,
    )


@pytest.mark.parametrize(("noise", "update", "exact"), [(1e-7, 1e-6, True), (1e-7, 1e-1, True), (1e-2, 1e-2, False)])
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("", None),
        ("stale", "still computes with the weights of version 3"),
        ("corrupt", "the reload corrupts weights"),
        ("raw", "--logprobs-mode processed_logprobs"),
        ("cache", "kept keys and values of earlier weights"),
        ("routes", "only 10% of its routes"),
    ],
)
def test_each_fault_has_its_name_whatever_the_engine_rounds(noise, update, exact, fault, says):
    found = find_fault(scores(noise=noise, update=update, fault=fault, exact=exact))
    assert found is None if says is None else says in found


@pytest.mark.parametrize("seed", range(50))
def test_updates_below_the_rounding_of_the_engine_end_nothing(seed):
    for update in (0.0, 1e-6, 1e-4):
        assert find_fault(scores(noise=1e-2, update=update, exact=False, seed=seed)) is None


def test_scores_that_are_no_numbers_are_corrupt():
    broken = scores()
    broken.served_T[5] = np.nan
    assert "corrupts" in find_fault(broken)


def test_share_tells_how_much_of_an_update_a_server_made():
    before, after = np.zeros(4), np.array([1.0, -1.0, 2.0, 0.5])
    for share in (0.0, 0.25, 1.0):
        found = share_made(before + share * after, before, after)
        assert found.share == pytest.approx(share)
        assert (found.is_unmade, found.is_made) == (share < 0.5, share > 0.5)
    assert not share_made(before, after, after).is_unmade, "no update: nothing to say"


TOKENS = 50


@pytest.fixture
def small(monkeypatch):
    sizes = {"SEQUENCES": 2, "SEQUENCE_TOKENS": 14, "SAMPLED_TOKENS": 4, "PROMPTS_AT_ONCE": 4, "ANSWER_TOKENS": 4}
    for name, value in sizes.items():
        monkeypatch.setattr(canary_probe, name, value)
    monkeypatch.setattr(requests, "PAUSE_SECONDS", 0.001)


class Updates:
    """Publishes a model to servers, each time changed a little, with a canary around it."""

    def __init__(self, servers, model, folder, *, retry_seconds=0.0):
        first = client_of(servers[0])
        clients = tuple(replace(first, url=server.url) for server in servers)
        self.engine = ServerEngine(servers=clients, seed=0, retry_seconds=retry_seconds)
        watched = [WatchedServer(client, exact=True) for client in clients]
        self.canary = Canary(watched, lambda index: [1 + index % 9, 2, 3], context=64, retry_seconds=retry_seconds)
        self.model, self.folder, self.version, self.written = model, folder, -1, None

    def make(self, scale=0.03):
        """Change the model and publish it; return what the canary says."""
        perturb(self.model, scale)
        self.version += 1
        self.canary.before_update()
        self.written = publish_weights(self.model, self.folder, self.engine, self.version)
        return compare(self.canary, self.model, self.version)


def perturb(model, scale):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += scale * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))


FAULTS = {
    "stale": "still computes with the weights of version",
    "corrupt": "the reload corrupts weights",
    "raw": r"log-probs are those of temperature 1, not of rollout\.temperature 0\.7",
    "cache": "kept keys and values of earlier weights",
    "shifted": "routes of other tokens or layers",
}


@both
def test_a_server_that_goes_wrong_in_an_update_is_named(small, tmp_path, dialect):
    model = tiny_model("qwen3_moe").eval()
    with running(copy.deepcopy(model), dialect) as server:
        updates = Updates([server], model, tmp_path)
        assert updates.make().share_made is None
        for fault, says in FAULTS.items():
            server.fault = ""
            report = updates.make()
            assert report.difference < 1e-5
            assert report.share_made == pytest.approx(1.0, abs=1e-3)
            assert report.equal_routes == 1.0
            assert report.servers == 1
            server.fault = fault
            with pytest.raises(EngineError, match=rf"{server.url} cannot be trained from .*: .*{says}"):
                updates.make()


@pytest.mark.parametrize(("enough", "sequences"), [(0.0, 2), (1.01, 5)])
def test_sequences_are_added_until_most_experts_are_reached(small, tmp_path, monkeypatch, enough, sequences):
    monkeypatch.setattr(canary_probe, "ENOUGH_EXPERTS", enough)
    monkeypatch.setattr(canary_probe, "MOST_SEQUENCES", 5)
    model = tiny_model("qwen3_moe").eval()
    with running(copy.deepcopy(model)) as server, record_routing(model) as recorder:
        updates = Updates([server], model, tmp_path)
        report = updates.make()
        assert len(updates.canary.sequences) == sequences
        recorder.take()
        reached = set()
        for sequence in updates.canary.sequences:
            with torch.inference_mode():
                model(torch.tensor([sequence]))
            experts_TLK = recorder.take()[0]
            reached |= {
                (layer, int(e)) for layer in range(experts_TLK.shape[1]) for e in experts_TLK[:, layer].unique()
            }
    pairs = model.config.num_hidden_layers * model.config.num_experts
    assert len(reached) / pairs <= report.reached <= 1.0, "sampled tokens after the sequences may reach more"


def test_a_tied_head_that_stays_behind_is_caught(small, tmp_path):
    model = tiny_model("qwen3_moe", tie_word_embeddings=True).eval()
    with running(copy.deepcopy(model)) as server:
        updates = Updates([server], model, tmp_path)
        for _ in range(2):
            assert updates.make().difference < 1e-5
            published = load_file(updates.written / "model.safetensors")
            assert "lm_head.weight" not in published, "tied weights are published once"
        server.fault = "head"
        with pytest.raises(EngineError, match="its log-probs differ from the trainer's by"):
            updates.make()


def test_server_that_loads_nothing_is_caught_at_the_first_update(small, tmp_path):
    model = tiny_model("qwen3_moe").eval()
    with running(copy.deepcopy(model)) as server:
        server.fault = "stale"
        with pytest.raises(EngineError, match=r"did not change with the update\. it did not load"):
            Updates([server], model, tmp_path).make(0.1)


def test_each_of_several_servers_is_compared(small, tmp_path):
    model = tiny_model("qwen3_moe").eval()
    with running(copy.deepcopy(model)) as one, running(copy.deepcopy(model)) as other:
        updates = Updates([one, other], model, tmp_path)
        for _ in range(2):
            assert updates.make().servers == 2
        assert len(list(tmp_path.iterdir())) == 1, "weights are written once"
        other.fault = "stale"
        with pytest.raises(EngineError, match=rf"^{other.url} cannot be trained from .* weights of version 1"):
            updates.make()


@both
def test_server_gone_during_an_update_gets_the_weights_on_return(small, tmp_path, caplog, dialect):
    model = tiny_model("qwen3_moe").eval()
    with running(copy.deepcopy(model), dialect) as one, running(copy.deepcopy(model), dialect) as other:
        updates = Updates([one, other], model, tmp_path)
        updates.make()
        other.die(looks=1 << 30)
        assert updates.make().servers == 1
        assert f"{other.url}/" in caplog.text
        assert "the run goes on with the other servers" in caplog.text
        other.begin_anew()
        assert other.version == "default"
        windows, _ = updates.engine.generate([new_response(n, n, [1, 2]) for n in range(4)], window=2, max_response=2)
        assert len(windows) == 4
        assert (one.version, other.version) == ("1", "1")
        report = updates.make()
        assert report.servers == 2
        assert report.difference < 1e-5


@pytest.mark.parametrize("after", [0, 2, 3])
def test_an_update_waits_for_the_only_server(small, tmp_path, after):
    """It ends before the update, in it, or while it is compared, and begins anew with the weights of its start."""
    model = tiny_model("qwen3_moe").eval()
    with running(copy.deepcopy(model)) as server:
        updates = Updates([server], model, tmp_path, retry_seconds=20.0)
        updates.make()
        server.die(looks=5, after=after)
        assert updates.make().difference < 1e-5
        assert server.lives is None, "it began anew"
        server.die(looks=1 << 30)
        with pytest.raises(EngineError, match=rf"the server did not answer: {server.url}/.*disconnected"):
            Updates([server], model, tmp_path).make()


def check(server, longest=64, start_seconds=5.0, **changes):
    client = client_of(server, **changes)
    return check_servers([client], start_seconds=start_seconds, longest=longest, dtype="float32")[0]


def test_a_server_that_starts_is_waited_for(small, caplog):
    model = tiny_model("qwen3_moe").eval()
    with running(model) as server:
        server.starting = 3
        with caplog.at_level(logging.WARNING):
            served = check(server)
        assert (served.context, served.dtype) == (64, "float32")
        [said] = caplog.messages
        assert "waiting up to 5 s (rollout.start_seconds)" in said
        assert server.paths == ["/health"] * 4 + ["/server_info", "/inference/v1/generate"]
        server.starting = 1 << 30
        with pytest.raises(EngineError, match=r"did not answer within 0.05 s \(rollout.start_seconds\).*status 503"):
            check(server, start_seconds=0.05)


NO_ROUTES = {"enable_return_routed_experts": False}


@pytest.mark.parametrize(
    ("dialect", "change", "longest", "says"),
    [
        ("vllm", NO_ROUTES, 64, "add --enable-return-routed-experts"),
        ("vllm", {"logprobs_mode": "raw_logprobs"}, 64, "add --logprobs-mode processed_logprobs .*, got 'raw_"),
        ("vllm", {}, 65, "raise --max-model-len to 65 .*, got 64"),
        ("vllm", {"enable_eplb": True}, 64, "leave out --enable-eplb"),
        ("sglang", NO_ROUTES, 64, "add --enable-return-routed-experts"),
        ("sglang", {}, 123, "raise --context-length to 129 .*, got 122 in all"),
        ("sglang", {"max_req_input_len": 63}, 64, r".*room for as many \(--mem-fraction-static\), got 63 in all"),
        ("sglang", {"preferred_sampling_params": '{"min_p": 0.1}'}, 64, "leave out --preferred-sampling-params"),
        ("sglang", {"enable_hierarchical_cache": True}, 64, "leave out --enable-hierarchical-cache"),
        ("sglang", {"weight_version": "3", "launch_command": "x --weight-version 3"}, 64, "leave out --weight-version"),
        ("sglang", {"hicache_storage_backend": "file"}, 64, "leave out --hicache-storage-backend"),
    ],
)
def test_each_missing_flag_is_named_before_anything_is_trained(dialect, change, longest, says):
    config = CONFIG["sglang"] if dialect == "sglang" else CONFIG["vllm"]["model_config"]
    [found] = missing_flags(dialect, config | change, longest=longest, wants_routes=True)
    assert re.match(says, found)


def test_dev_mode_and_another_dtype_are_told(small, caplog):
    model = tiny_model("qwen3_moe").eval()
    with running(model) as server:
        server.config = {"model_config": CONFIG["vllm"]["model_config"] | {"dtype": "torch.bfloat16"}}
        with caplog.at_level(logging.WARNING):
            assert check(server).dtype == "bfloat16"
        assert "start it with --dtype float32" in caplog.text
        server.config = {"model_config": CONFIG["vllm"]["model_config"] | NO_ROUTES}
        with pytest.raises(EngineError, match="was not started as this run needs it: add --enable-return-routed"):
            check(server)
        server.config = None
        with pytest.raises(EngineError, match="VLLM_SERVER_DEV_MODE=1"):
            check(server)


def test_another_model_is_refused_before_anything_is_trained(small):
    model = tiny_model("qwen3_moe").eval()
    with running(model) as server:
        routes = ServedRoutes(num_experts=8, layer_ids=(1, 5), num_layers=6, top_k=2)
        with pytest.raises(EngineError, match=r"sent routes of shape .* of 6 or 2 layers"):
            check(server, routes=routes)


def check_sglang(model, *, longest=64, **changes):
    with running(model, "sglang") as server:
        server.config = CONFIG["sglang"] | changes
        served = check(server, longest)
        assert server.paths == ["/ready", "/server_info", "/generate"]
        return served


def test_what_fits_the_longest_request_of_sglang_can_be_sampled(small):
    model = tiny_model("qwen3_moe").eval()
    longest = check_sglang(model, longest=122).context
    assert longest == 122
    with running(model, "sglang") as server:
        engine = ServerEngine(servers=(client_of(server),), seed=0)
        for given in (longest - 1, longest - 10):
            response = new_response(0, 0, [index % TOKENS for index in range(given)])
            [window], _ = engine.generate([response], window=longest - given, max_response=longest - given)
            assert len(window.tokens_w) == longest - given
        with pytest.raises(EngineError, match=r"5 of 6 tokens, ended by 'length'.*longest context"):
            engine.generate([new_response(0, 0, [1] * 121)], window=6, max_response=6)


def test_a_type_that_sglang_chooses_and_another_engine_are_told(small, caplog):
    model = tiny_model("qwen3_moe").eval()
    with caplog.at_level(logging.WARNING):
        assert check_sglang(model, dtype="auto").dtype == "auto"
    assert "chooses the type that it computes in (--dtype auto) and training in float32" in caplog.text
    with running(model, "sglang") as server:
        server.config = None
        with pytest.raises(EngineError, match="check that this is an SGLang server itself"):
            check(server)
    match = r"without a configuration of sglang .* rollout\.engine"
    with running(model) as server, pytest.raises(EngineError, match=match):
        check(server, dialect="sglang")


def published(server, model, folder):
    engine = ServerEngine(servers=(client_of(server),), seed=0)
    publish_weights(model, folder, engine, 0)
    return engine.published.version


def test_what_sglang_says_of_an_update_that_it_refuses_is_told(small, tmp_path):
    model = tiny_model("qwen3_moe").eval()
    with running(model, "sglang") as server:
        server.sees_folders = False
        with pytest.raises(EngineError, match=r"/update_weights_from_disk failed: status 400, .*does not exist"):
            published(server, model, tmp_path)


def test_update_that_drops_no_caches_aborts_requests_of_sglang(small, tmp_path):
    model = tiny_model("qwen3_moe").eval()
    with running(model, "sglang") as server:
        server.busy = True
        assert published(server, model, tmp_path) == 0
        assert server.paths == ["/update_weights_from_disk"] * 2 + ["/model_info"]


def test_weights_loaded_by_sglang_without_version_end_the_update(small, tmp_path):
    model = tiny_model("qwen3_moe").eval()
    with running(model, "sglang") as server:
        server.fault = "unversioned"
        with pytest.raises(EngineError, match="weights have version 'default': expected 0"):
            published(server, model, tmp_path)
