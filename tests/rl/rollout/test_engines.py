"""A whole run whose responses come from a server: it samples with the weights that were published last."""

from contextlib import ExitStack

import pytest
from transformers import AutoModelForCausalLM

from relibra.errors import EngineError
from relibra.rl.config.run_config import load_config
from relibra.rl.model.policy import Policy
from relibra.rl.rollout.engines import make_engine
from relibra.rl.rollout.served import canary_probe, requests
from relibra.rl.rollout.served.dialects import HEALTH_PATHS, PATHS
from relibra.rl.run.checkpoints.policy_folder import write_start_folder
from relibra.rl.toy.character_tokenizer import CharacterTokenizer
from relibra.rl.toy.tasks import Arithmetic
from tests.replay.tiny_models import tiny_model
from tests.rl.ranks_at_work import run_alone, tiny_config
from tests.rl.rollout.stand_in_server import running


@pytest.fixture
def small_canary(monkeypatch):
    sizes = {"SEQUENCES": 2, "SEQUENCE_TOKENS": 24, "SAMPLED_TOKENS": 4, "PROMPTS_AT_ONCE": 4, "ANSWER_TOKENS": 4}
    for name, value in sizes.items():
        monkeypatch.setattr(canary_probe, name, value)
    monkeypatch.setattr(requests, "PAUSE_SECONDS", 0.01)


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_server_is_checked_first_and_compared_after_each_update(tmp_path, small_canary, engine):
    served = [f"rollout.engine={engine}", "rollout.url=http://h:1", f"rollout.server_weights={tmp_path / 'weights'}"]
    write_start_folder(tiny_config(*served, ranks=1), tmp_path / "start")
    with running(AutoModelForCausalLM.from_pretrained(tmp_path / "start").eval(), engine) as server:
        rows = run_alone(
            (*served, f"rollout.url={server.url}", "update.learning_rate=1e-2", "algorithm.group_filter=off"),
            tmp_path / "run",
        )
    assert server.version == "2"
    assert server.paths[:3] == [HEALTH_PATHS[engine], "/server_info", PATHS[engine]]
    assert [path.name[:14] for path in (tmp_path / "weights").iterdir()] == ["version-000002"]
    for row in rows:
        assert row["k3_kl"] < 1e-9
        assert row["router_disagreement"] == 0.0
        assert row["canary"]["difference"] < 1e-5
        assert row["canary"]["share_made"] == pytest.approx(1.0, abs=1e-3)
        assert row["canary"]["equal_routes"] == 1.0
        assert 0.5 < row["canary"]["reached"] <= 1.0


TRANSFERRED = ("rollout.engine=vllm", "rollout.transfer=gloo", "update.learning_rate=1e-2")


def run_with_transfer(folder, fault=""):
    settings = (*TRANSFERRED, "algorithm.group_filter=off")
    write_start_folder(tiny_config(*settings, "rollout.url=http://h:1", ranks=1), folder / "start")
    with running(AutoModelForCausalLM.from_pretrained(folder / "start").eval(), "vllm") as server:
        server.config = server.config | {"weight_transfer_config": {"backend": "relibra"}}
        server.fault = fault
        return run_alone((*settings, f"rollout.url={server.url}"), folder / "run"), server


def test_weights_sent_without_files_are_those_that_sample(tmp_path, small_canary):
    rows, server = run_with_transfer(tmp_path)
    assert server.version == "2"
    assert server.paths.count("/start_weight_update") == 4, "once per version, and once more before step 0"
    assert not [path for path in server.paths if path == "/collective_rpc"]
    for row in rows:
        assert row["k3_kl"] < 1e-9
        assert row["canary"]["difference"] < 1e-5
        assert row["canary"]["share_made"] == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize(
    ("fault", "says"),
    [("half", "the reload corrupts weights"), ("drifting", "the same weights, sent once more, moved")],
)
@pytest.mark.usefixtures("_leave_group")
def test_weights_that_do_not_arrive_whole_end_the_run(tmp_path, small_canary, fault, says):
    with pytest.raises(EngineError, match=says):
        run_with_transfer(tmp_path, fault)


@pytest.mark.parametrize("how", ["nccl", "ipc"])
def test_gpu_to_gpu_transfer_is_refused_without_gpus(how):
    rollout = load_config(None, [*TRANSFERRED, "rollout.url=http://127.0.0.1:1", f"rollout.transfer={how}"]).rollout
    model, tokenizer = tiny_model(), CharacterTokenizer(Arithmetic.characters)
    policy = Policy(trained=model, meta=model, num_experts=8, layer_ids=(0,), top_k=2, balanced=False)
    with pytest.raises(EngineError, match=f"rollout.transfer {how} sends weights from GPUs.* on cpu"):
        make_engine(rollout, policy, tokenizer, seed=0, shortest=1, replays_rollout=True)


def test_windows_go_on_at_other_servers_when_one_ends(tmp_path, small_canary):
    """What is trained on does not depend on which server sampled it, nor on one that ended and began anew."""
    settings = ("rollout.engine=vllm", "algorithm.preset=tppo", "rollout.window=4", "run.steps=3", "checkpoint.every=0")
    weights = f"rollout.server_weights={tmp_path / 'weights'}"
    write_start_folder(tiny_config(*settings, weights, "rollout.url=http://h:1", ranks=1), tmp_path / "start")
    found = []
    for number, ends in ((1, False), (2, True)):
        with ExitStack() as stack:
            servers = [
                stack.enter_context(running(AutoModelForCausalLM.from_pretrained(tmp_path / "start").eval()))
                for _ in range(number)
            ]
            if ends:
                servers[1].die(after=6, looks=3, version="1")  # in the rollout of step 1, after the canary
            urls = ",".join(server.url for server in servers)
            rows = run_alone((*settings, weights, f"rollout.url={urls}"), tmp_path / f"run-{number}")
        assert [server.version for server in servers] == ["3"] * number
        assert all(server.lives is None for server in servers), "it began anew"
        assert all(server.paths.count("/inference/v1/generate") > 20 for server in servers)
        for row in rows:
            assert row["k3_kl"] < 1e-9
            assert row["canary"]["difference"] < 1e-5
            assert row["canary"]["servers"] == number
        found.append([(row["sampled_tokens"], row["finished"], row["response_length"]) for row in rows])
    assert found[0] == found[1]


def test_spares_begin_only_where_the_time_left_is_enough():
    rollout = load_config(None, ["algorithm.preset=tppo", "rollout.window=20"]).rollout
    model = tiny_model()
    policy = Policy(trained=model, meta=model, copy=model, num_experts=8, layer_ids=(0,), top_k=2, balanced=False)
    tokenizer = CharacterTokenizer(Arithmetic.characters)
    assert make_engine(rollout, policy, tokenizer, seed=0, shortest=6, replays_rollout=True).shortest == 6
