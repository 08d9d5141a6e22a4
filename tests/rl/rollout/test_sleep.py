"""A GPU that trainer and server share: the server sleeps while the trainer works, and wakes in order."""

import copy
from contextlib import ExitStack

import pytest
import torch
from transformers import AutoModelForCausalLM

from relibra.errors import EngineError
from relibra.rl.rollout.served import sleep
from relibra.rl.rollout.served.canary_probe import Canary, WatchedServer
from relibra.rl.rollout.served.preflight import check_servers, missing_for_weights
from relibra.rl.rollout.served.sleep import put_servers_to_sleep, wake, wake_after_failure
from relibra.rl.run.checkpoints.policy_folder import write_start_folder
from tests.replay.tiny_models import tiny_model
from tests.rl.joined import CPU, alone
from tests.rl.ranks_at_work import assert_same_bits, assert_trained, outcome_of, run_alone, tiny_config
from tests.rl.rollout.published import compare
from tests.rl.rollout.stand_in_server import CONFIG, engine_of, running
from tests.rl.rollout.test_engines import small_canary as small_canary
from tests.rl.test_resume import rewound

ABLE = {
    "vllm": {"model_config": CONFIG["vllm"]["model_config"] | {"enable_sleep_mode": True}},
    "sglang": CONFIG["sglang"] | {"enable_memory_saver": True},
}
FELL = {
    "vllm": ["/sleep"],
    "sglang": ["/flush_cache", "/release_memory_occupation"],
}
WOKE = {"vllm": "/wake_up", "sglang": "/resume_memory_occupation"}
LOADS = {"vllm": "/collective_rpc", "sglang": "/update_weights_from_disk"}


def orders(server):
    """What was asked that concerns memory and weights, with the tags of waking."""
    wanted = {*FELL[server.dialect], WOKE[server.dialect], LOADS[server.dialect]}
    for path, body in server.asked:
        bare = path.partition("?")[0]
        if bare == WOKE[server.dialect]:
            yield body["tags"][0] if body else path.partition("tags=")[2]
        elif bare in wanted:
            yield bare


@pytest.mark.parametrize("dialect", ["vllm", pytest.param("sglang", marks=pytest.mark.slow)])
def test_a_run_sleeps_and_wakes_in_order_at_every_step(tmp_path, small_canary, monkeypatch, dialect):
    settings = (
        f"rollout.engine={dialect}",
        f"rollout.server_weights={tmp_path / 'weights'}",
        "rollout.sleep=true",
        "update.offload=all",
        "update.learning_rate=1e-2",
        "algorithm.group_filter=off",
    )
    write_start_folder(tiny_config(*settings, "rollout.url=http://h:1", ranks=1), tmp_path / "start")
    with running(AutoModelForCausalLM.from_pretrained(tmp_path / "start").eval(), dialect) as server:
        server.config = ABLE[dialect]
        held = []
        monkeypatch.setattr(sleep, "free_bytes", lambda _: 20 - server.held)
        run = (*settings, f"rollout.url={server.url}")
        rows = run_alone(run, tmp_path / "run", note=lambda *_: held.append(server.held))
        assert held == [1, 1], "its memory is the trainer's"
        assert server.asked_asleep == 0
        assert not server.asleep, "it is awake at the end"
        assert list(orders(server)) == 3 * [*FELL[dialect], "weights", LOADS[dialect], "kv_cache"]
    assert len(rows) == 2
    for row in rows:
        assert row["k3_kl"] < 1e-9
        assert row["canary"]["difference"] < 1e-5
        assert row["canary"]["share_made"] == pytest.approx(1.0, abs=1e-3)


@pytest.mark.slow
def test_a_resumed_run_beside_a_server_has_the_same_bits(tmp_path, small_canary, monkeypatch):
    """Policy, value model and reference are on the host while others need the GPU."""
    settings = (
        *("rollout.engine=vllm", f"rollout.server_weights={tmp_path / 'weights'}", "rollout.sleep=true"),
        *("algorithm.preset=ppo", "algorithm.kl_coefficient=0.2", "update.offload=all", "update.activations=host"),
        *("run.steps=4", "checkpoint.every=2", "checkpoint.keep=9"),
    )
    write_start_folder(tiny_config(*settings, "rollout.url=http://h:1", ranks=1), tmp_path / "start")
    with running(AutoModelForCausalLM.from_pretrained(tmp_path / "start").eval(), "vllm") as server:
        server.config, run = ABLE["vllm"], tmp_path / "run"
        monkeypatch.setattr(sleep, "free_bytes", lambda _: 20 - server.held)
        settings = (*settings, f"rollout.url={server.url}")
        whole = outcome_of(run, [run_alone(settings, run)])
        assert_trained(whole)
        rewound(run, 2)
        again = outcome_of(run, [run_alone(settings, run)])
    assert len(again.of_ranks[0]) == 2
    assert_same_bits(whole, again, "canary")


def test_weights_are_gone_until_they_are_loaded_again(monkeypatch):
    model = tiny_model("qwen3_moe").eval()
    with alone(), running(copy.deepcopy(model), "vllm") as server:
        engine = engine_of(server, "vllm", sleeps=True)
        put_servers_to_sleep(engine, None, CPU)
        assert server.asleep == {"weights", "kv_cache"}
        assert not torch.equal(server.model.lm_head.weight, model.lm_head.weight)
        assert engine.published.asleep
        with pytest.raises(AssertionError, match="no requests before the update"):
            engine.generate([], window=4, max_response=4)
        wake(engine, "weights")
        assert server.asleep == {"kv_cache"}
        assert engine.published.asleep, "until all have memory"
        wake(engine, "kv_cache")
        assert not engine.published.asleep


def test_weights_that_nobody_loads_again_are_noticed(small_canary):
    model = tiny_model("qwen3_moe").eval()
    with alone(), running(copy.deepcopy(model), "vllm") as server:
        engine = engine_of(server, "vllm", sleeps=True)
        canary = Canary([WatchedServer(engine.servers[0], exact=True)], lambda index: [1 + index % 9, 2, 3], context=64)
        canary.before_update()
        assert compare(canary, model, 0).difference < 1e-5
        put_servers_to_sleep(engine, canary, CPU)
        for tag in ("weights", "kv_cache"):
            wake(engine, tag)
        with pytest.raises(EngineError, match="corrupts weights"):
            compare(canary, model, 1)


def test_a_server_on_other_gpus_is_told_by_their_memory(monkeypatch):
    model = tiny_model("qwen3_moe").eval()
    with alone(), running(copy.deepcopy(model), "vllm") as server:
        server.fault = "sleepless"
        monkeypatch.setattr(sleep, "free_bytes", lambda _: 20 - server.held)
        with pytest.raises(EngineError, match=f"{server.url} went to sleep, and no GPU of the trainer has more free"):
            put_servers_to_sleep(engine_of(server, "vllm", sleeps=True), None, CPU)


def test_a_failed_run_wakes_the_server_and_says_so(caplog):
    model = tiny_model("qwen3_moe").eval()
    with alone(), running(copy.deepcopy(model), "vllm") as server:
        engine = engine_of(server, "vllm", sleeps=True)
        with ExitStack() as servers:  # as training leaves it
            servers.callback(wake_after_failure, engine)
            put_servers_to_sleep(engine, None, CPU)
        assert not server.asleep
        assert "slept when the run failed: it is awake, without weights" in caplog.text
        put_servers_to_sleep(engine, None, CPU)
        server.failures = [500]
        wake_after_failure(engine)
        assert "it sleeps since this run failed: start it again" in caplog.text


@pytest.mark.parametrize(("dialect", "flag"), [("vllm", "--enable-sleep-mode"), ("sglang", "--enable-memory-saver")])
def test_a_server_that_cannot_sleep_is_refused_first(dialect, flag):
    assert not list(missing_for_weights(dialect, ABLE[dialect], "folder", sleeps=True))
    [said] = missing_for_weights(dialect, CONFIG[dialect], "folder", sleeps=True)
    assert said.startswith(f"add {flag} (rollout.sleep;")


@pytest.mark.parametrize("how", ["gloo", "nccl", "ipc"])
def test_a_server_without_the_back_end_is_refused_first(how):
    wanted = "ipc" if how == "ipc" else "relibra"
    assert not list(missing_for_weights("vllm", {"weight_transfer_config": {"backend": wanted}}, how, sleeps=False))
    for other in ({"backend": "sparse_nccl"}, None):
        [said] = missing_for_weights("vllm", {"weight_transfer_config": other}, how, sleeps=False)
        assert said.startswith(f'add --weight-transfer-config \'{{"backend": "{wanted}"}}\'')


def test_a_server_that_was_left_asleep_is_refused(small_canary):
    model = tiny_model("qwen3_moe").eval()
    with running(copy.deepcopy(model), "vllm") as server:
        server.config, server.asleep = ABLE["vllm"], {"kv_cache"}
        servers = engine_of(server, "vllm", sleeps=True).servers
        with pytest.raises(EngineError, match=f"{server.url} sleeps or is paused.*POST /wake_up"):
            check_servers(servers, start_seconds=0.0, longest=64, dtype="float32")
        assert server.asked_asleep == 0
