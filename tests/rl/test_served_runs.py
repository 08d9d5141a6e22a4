"""Runs that sample from a server of relibra: attention and experts on other processes than the trainer's."""

import json
import subprocess

import pytest

from relibra.reporting.data.metrics import read_metrics
from tests.rl.ranks_at_work import TINY
from tests.rl.runs import run_command, train
from tests.serving.server_process import relibra_serve

pytestmark = pytest.mark.slow


def assert_as_embedded(run, steps):
    """Check that routes and log-probs of the server are those of the trainer, at every step."""
    rows = read_metrics(run / "metrics.jsonl").rows
    assert [row["step"] for row in rows] == list(range(steps))
    compared = [row["k3_kl"] for row in rows if row["k3_kl"] is not None]  # None: no group differed in reward
    assert compared
    assert max(map(abs, compared)) < 1e-8
    for row in rows:
        assert row["router_disagreement"] == 0.0
        assert row["canary"]["difference"] < 1e-5
        assert row["canary"]["equal_routes"] == 1.0


def test_a_run_starts_its_own_server_and_stops_it(tmp_path):
    done = train(
        tmp_path,
        "rollout.engine=serve",
        "algorithm.preset=ppo",
        "rollout.server_options=--experts 2",
        "update.offload=all",
        "run.steps=3",
        "parallel.ranks=2",
    )
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    assert_as_embedded(run, 3)
    assert len(list((run / "server" / "weights").iterdir())) == 1, "folders of earlier versions are gone"
    for line in map(json.loads, (run / "samples.jsonl").read_text().splitlines()):
        assert line["finish"] == "length" or line["tokens"] == len(line["response"]) + 1, "its own token ended it"
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(run) not in listed, "the server ended with the run"


def test_options_refused_by_a_server_end_the_run_with_its_words(tmp_path):
    done = train(tmp_path, "rollout.engine=serve", "rollout.server_options=--experts 63")
    assert done.returncode != 0
    assert "--experts 63 is more than the" in done.stderr


def test_vllm_client_trains_with_a_server_already_running(tmp_path):
    start = tmp_path / "start"
    of_model = [one for one in TINY if one.startswith("model.")]
    served = ["rollout.engine=vllm", "rollout.url=http://h:1", "rollout.server_weights=w"]
    assert run_command(["export", str(start), *of_model, *served], tmp_path).returncode == 0
    with relibra_serve(start, "--updates", str(tmp_path), "--max-length", "400", "--attention", "2") as (url, _):
        settings = [f"rollout.url={url}", f"rollout.server_weights={tmp_path / 'weights'}"]
        done = train(tmp_path, "rollout.engine=vllm", "algorithm.preset=ppo", *settings)
        assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["steps"] == 2
    assert_as_embedded(tmp_path / "run", 2)
