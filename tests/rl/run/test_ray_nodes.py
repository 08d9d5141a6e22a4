"""Ranks on nodes of Ray, without Ray: layouts, the ranks of one node, and what is refused before a run."""

import socket
import sys

import pytest

import relibra
from relibra.errors import ClusterError, ConfigError, EngineError
from relibra.rl.config.run_config import load_config
from relibra.rl.run import launch as launching
from relibra.rl.run import ray_nodes
from relibra.rl.run.ray_nodes import (
    possible_layouts,
    prepare_node,
    resources_of_ranks,
    room_for_ranks,
)
from relibra.rl.run.run_failure import LostRankError
from tests.rl.ranks_at_work import TINY
from tests.rl.run.ray_stand_in import Cluster
from tests.rl.runs import check_whole, make_user_task


@pytest.mark.parametrize(
    ("ranks", "room_N", "expected"),
    [
        (4, [4], [4]),
        (4, [2, 2], [2]),
        (4, [8, 8, 1, 1], [4, 2, 1]),
        (4, [3, 1], []),
        (6, [2, 2, 3], [2]),
        (1, [0, 1], [1]),
        (2, [], []),
    ],
)
def test_nodes_get_equal_numbers_of_ranks_fewest_nodes_first(ranks, room_N, expected):
    assert possible_layouts(ranks, room_N) == expected


@pytest.mark.parametrize(
    ("resources", "gpus", "room"),
    [({"CPU": 8.0}, False, 8), ({"CPU": 8.0, "GPU": 2.0}, True, 2), ({"CPU": 8.0}, True, 0), ({}, False, 0)],
)
def test_a_rank_takes_a_cpu_and_a_gpu(resources, gpus, room):
    assert room_for_ranks(resources, gpus=gpus) == room
    assert resources_of_ranks(2, gpus=gpus) == {"CPU": 2} | ({"GPU": 2} if gpus else {})


def test_a_node_that_cannot_train_says_why(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def reason(folder, version=relibra.__version__):
        return prepare_node(str(folder), "run", version, "127.0.0.1")[0]

    assert "0.0.1" in reason(tmp_path, "0.0.1")
    assert "cannot be entered" in reason(tmp_path / "absent")
    assert "run.folder" in reason(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    assert reason(tmp_path) == ""


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(ray_nodes, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"needs the package 'ray': .*pip install -e '\.\[ray\]'"):
        launching.launch(load_config(None, ["parallel.launcher=ray"]))


def test_an_address_without_a_cluster_is_told_at_once(monkeypatch, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(ray_nodes, "find_spec", lambda _: object())
    with pytest.raises(ConfigError, match=f"no Ray cluster at {address} .*ray start --head"):
        launching.launch(load_config(None, ["parallel.launcher=ray", f"run.folder={tmp_path}"]))
    assert not list(tmp_path.iterdir())


def test_the_machine_of_the_driver_is_not_measured_for_the_nodes(monkeypatch, tmp_path):
    monkeypatch.setattr(ray_nodes, "find_spec", lambda _: object())
    words = ["parallel.launcher=ray", "plan.cluster=measure", f"run.folder={tmp_path}"]
    with pytest.raises((ConfigError, ClusterError), match="relibra calibrate"):
        launching.launch(load_config(None, words))


REWARD = """
import os, pathlib, signal

def leave(response, row):
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return 0.5

def lose_task(response, row):
    if os.environ["RANK"] == "1":
        os.kill(os.getppid(), signal.SIGKILL)
    return 0.5

def ask_to_stop(response, row):
    pathlib.Path("run", ".running").unlink(missing_ok=True)
    return sum(map(ord, response)) % 3 / 2
"""


@pytest.fixture
def on_ray(monkeypatch, tmp_path):
    """Return a function that launches a run on a stand-in for Ray with nodes of one CPU."""
    cluster = Cluster(1, 1)
    for name, module in cluster.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(ray_nodes, "find_spec", lambda _: object())
    monkeypatch.chdir(tmp_path)
    task = make_user_task(tmp_path)
    (tmp_path / "my_rewards.py").write_text(REWARD)

    def launched(reward, **options):
        words = [*TINY, *task, f"run.folder={tmp_path}", "parallel.launcher=ray", f"task.reward=my_rewards:{reward}"]
        finished = launching.launch(
            load_config(None, [*words, "run.steps=50", "parallel.timeout_seconds=60"]), **options
        )
        assert not cluster.groups, "what was reserved is given back"
        return finished

    return launched


@pytest.mark.slow
def test_ranks_of_two_nodes_make_one_run_and_stop_together(on_ray, tmp_path, capfd):
    assert not on_ray("ask_to_stop").complete
    assert check_whole(tmp_path / "run") == 1
    assert (tmp_path / "run" / "policy" / "model.safetensors").is_file()
    assert "rank 0 on node 127.0.0.1 (00000000), rank 1 on node 127.0.0.1 (00000001)" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reward", "cause"),
    [
        ("leave", "rank 1 was killed by SIGKILL"),
        ("lose_task", r"the process of Ray that has rank 1 on node 127.0.0.1 \(00000001\) ended"),
    ],
)
def test_a_lost_rank_ends_the_ranks_of_other_nodes_and_is_named(reward, cause, on_ray):
    with pytest.raises(LostRankError, match=cause):
        on_ray(reward)


def test_a_run_that_does_not_fit_says_so(on_ray, monkeypatch):
    monkeypatch.setattr(ray_nodes, "PLACE_SECONDS", 0.0)
    monkeypatch.setattr(ray_nodes, "possible_layouts", lambda *_: [])
    with pytest.raises(EngineError, match=r"2 ranks, each with 1 CPU, need nodes .* room for 1, 1: add nodes"):
        on_ray("leave")
