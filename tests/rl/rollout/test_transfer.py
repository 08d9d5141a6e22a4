"""Weights that go to a server without files: all of them, in whole layers, once per version."""

import copy
import threading
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

from relibra.errors import EngineError
from relibra.parallel import relocate
from relibra.rl.model.sharding import full_parameters
from relibra.rl.rollout.served import ipc_handles, requests, transfer, weight_group
from relibra.rl.rollout.served.transfer import send_weights
from relibra.rl.rollout.served.weight_group import BucketLayout, layout_of, whole_layers
from tests.replay.tiny_models import tiny_model
from tests.rl.joined import alone, on_ranks, policy_of, tiny_config
from tests.rl.rollout.stand_in_memory import with_garbage
from tests.rl.rollout.stand_in_server import engine_of, running


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    with alone():
        yield


@pytest.fixture
def small_buckets(monkeypatch):
    monkeypatch.setattr(requests, "PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(transfer, "whole_layers", lambda *args, **kw: whole_layers(*args, **kw, bucket_bytes=1))


def send(server, model, version=3, how="gloo", **changes):
    engine = engine_of(server, "vllm", transfer=how, **changes)
    send_weights(full_parameters(model), engine, version)
    return engine


def same(model, other):
    pairs = zip(model.named_parameters(), other.named_parameters(), strict=True)
    return all(name == twin and torch.equal(one, two) for (name, one), (twin, two) in pairs)


SHARED = {}


def rebuild(*arguments):
    return SHARED[arguments[6].decode()]


def shared(tensor):
    """Stand in for CUDA: tensors of this process are found by a key."""
    SHARED[str(id(tensor))] = tensor
    return rebuild, (*range(6), str(id(tensor)).encode(), 7, False)


@pytest.fixture
def shared_memory(monkeypatch):
    monkeypatch.setattr(ipc_handles, "gpu_handles", lambda bucket: ("GPU-0", [shared(tensor) for _, tensor in bucket]))
    yield
    SHARED.clear()


@pytest.mark.parametrize("how", ["gloo", "ipc"])
def test_a_server_holds_what_was_sent_bit_for_bit(small_buckets, shared_memory, how):
    model = tiny_model("qwen3_moe").eval()
    with running(with_garbage(model), "vllm") as server:
        for version in (3, 4):
            send(server, model, version, how)
            assert same(server.model, model)
            assert server.version == str(version)
            with torch.no_grad():
                model.lm_head.weight += 1
        layers = model.config.num_hidden_layers
        assert len(server.buckets) == 2 * (layers + 3), "embedding, layers, norm, head"
        told = [path for path in server.paths if path.startswith(("/start", "/finish", "/reset", "/weight_info"))]
        assert told == 2 * ["/start_weight_update", "/finish_weight_update", "/reset_prefix_cache", "/weight_info"]


def test_buckets_are_whole_layers_and_experts_stay_together():
    model = tiny_model("qwen3_moe")
    named = list(full_parameters(model))
    one_layer = sum(tensor.nbytes for name, tensor in named if name.startswith("model.layers.0."))
    for limit in (1, one_layer + 1, 1 << 40):
        buckets = list(whole_layers(iter(named), bucket_bytes=limit))
        assert [pair for bucket in buckets for pair in bucket] == named, "once each, in order"
        for layer in range(model.config.num_hidden_layers):
            holding = [bucket for bucket in buckets if any(f"layers.{layer}." in name for name, _ in bucket)]
            assert len(holding) == 1
        assert len(buckets) == {1: 6, one_layer + 1: 3, 1 << 40: 1}[limit] or limit == one_layer + 1
    fused = dict(named)["model.layers.0.mlp.experts.gate_up_proj"]
    assert fused.shape == (8, 32, 32), "[E, 2I, H]"
    assert [len(bucket) for bucket in whole_layers(iter(named), keep=False, bucket_bytes=1)] == [0] * 6


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dtype_names": ["float64"]}, "allowed are float32"),
        ({"shapes": [[1 << 40, 4]]}, "at most 17,179,869,184"),
        ({"shapes": [[-1, 4]]}, "whole numbers from 0"),
        ({"names": ["a", "b"]}, "differ in length"),
        ({"names": ["a", "a"], "dtype_names": ["float32"] * 2, "shapes": [[1]] * 2}, "twice"),
    ],
)
def test_layouts_are_checked_before_anything_is_allocated(change, says):
    with pytest.raises(ValueError, match=says):
        BucketLayout(**{"names": ["a"], "dtype_names": ["float32"], "shapes": [[2, 3]]} | change)


def test_a_layout_allocates_what_it_describes():
    bucket = [("a", torch.zeros(2, 3, dtype=torch.bfloat16)), ("b", torch.zeros(()))]
    layout = layout_of(bucket)
    found = layout.allocate(torch.device("cpu"))
    assert [(name, one.dtype, one.shape) for name, one in found] == [(n, t.dtype, t.shape) for n, t in bucket]


@pytest.mark.parametrize(
    ("fault", "says"),
    [("refuses", "/update_weights failed.*no such parameter"), ("absent", "/init_weight_.*no route to the trainer")],
)
def test_what_a_server_refuses_ends_the_update_at_once(small_buckets, fault, says):
    model = tiny_model("qwen3_moe").eval()
    with running(copy.deepcopy(model), "vllm") as server:
        server.fault = fault
        began = time.monotonic()
        with pytest.raises(EngineError, match=says):
            send(server, model)
        assert time.monotonic() - began < 5.0, "not the time-out"


def test_a_worker_that_never_comes_is_named(small_buckets, monkeypatch):
    model = tiny_model("qwen3_moe").eval()
    with running(copy.deepcopy(model), "vllm") as server:
        stop = threading.Event()
        monkeypatch.setattr(server, "join", lambda _: stop.wait(10) or ({}, 200))
        try:
            with pytest.raises(
                EngineError, match=rf"(waited 0.3 s .* for workers of {server.url}|timed out after 0.3 s)"
            ):
                send(server, model, timeout_seconds=0.3)
        finally:
            stop.set()


def test_a_restarted_server_waits_for_the_next_version(small_buckets, caplog):
    """There are no files that it could load the last version from."""
    model = tiny_model("qwen3_moe").eval()
    with running(copy.deepcopy(model), "vllm") as one, running(copy.deepcopy(model), "vllm") as other:
        engine = send([one, other], model)
        engine.published.version = 3
        assert same(one.model, other.model)
        other.begin_anew()
        assert other.version == "default"
        lost = engine.servers[1]

        async def look():
            async with lost.connections(1) as connection:
                await lost.bring_up(connection)

        with pytest.raises(requests.ServerLost, match="was started again and lacks version 3"):
            transfer.asyncio.run(look())
        other.die(looks=1 << 30)
        send_weights(full_parameters(model), engine, 4)
        assert (one.version, other.version) == ("4", "default")
        assert "the run goes on with the other servers" in caplog.text


def test_a_worker_without_its_trainer_gives_up_in_time():
    address = weight_group.GroupAddress("gloo", "127.0.0.1", 1, 2, 1, 0.2)
    with pytest.raises(RuntimeError):
        weight_group.join_group(torch.distributed.HashStore(), address, 1)


def send_shards(folder):
    """Send a model that two ranks hold, its experts away from home; return whether the server has the whole of it."""
    policy = policy_of(tiny_config(ranks=2), folder)
    relocate(policy.trained, np.tile([2, 3, 0, 1], (2, 1)))
    policy.sync()
    transfer.whole_layers = lambda *args, **kw: whole_layers(*args, **kw, bucket_bytes=1)
    found = {}
    with running(with_garbage(policy.copy), "vllm") as server:
        for how in ("gloo", "ipc"):
            ipc_handles.gpu_handles = lambda bucket: (f"GPU-{dist.get_rank()}", [shared(one) for _, one in bucket])
            engine = engine_of(server, "vllm", transfer=how)  # rank 1 asks no server
            send_weights(full_parameters(policy.trained), engine, 5)
            found[how] = same(server.model, policy.copy), server.version, len(server.buckets)
            server.model = with_garbage(policy.copy)
    return found


@pytest.mark.slow
def test_shards_of_several_ranks_arrive_in_logical_order(tmp_path):
    sender, other = on_ranks(2, send_shards, tmp_path)
    assert sender == {"gloo": (True, "5", 5), "ipc": (True, "5", 10)}
    assert other["gloo"] == (False, "default", 0)
