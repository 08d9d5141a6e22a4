"""Ranks on nodes of Ray, without Ray: layouts, the ranks of one node, and what is refused before a run."""

import socket
import time

import pytest

import relibra
from relibra.environment import LaunchedRank
from relibra.errors import ClusterError, ConfigError
from relibra.rl.config.run_config import load_config
from relibra.rl.run import launch as launching
from relibra.rl.run.on_ray import connection
from relibra.rl.run.on_ray.layout import Layout, possible_layouts, resources_of_ranks, room_for_ranks
from relibra.rl.run.on_ray.node_ranks import NodeRanks
from relibra.rl.run.worker import Exit


@pytest.mark.parametrize(
    ("ranks", "room_N", "expected"),
    [
        (4, [4], [(1, 4)]),
        (4, [2, 2], [(2, 2)]),
        (4, [8, 8, 1, 1], [(1, 4), (2, 2), (4, 1)]),
        (4, [3, 1], []),
        (6, [2, 2, 3], [(3, 2)]),
        (1, [0, 1], [(1, 1)]),
        (2, [], []),
    ],
)
def test_nodes_get_equal_numbers_of_ranks_fewest_nodes_first(ranks, room_N, expected):
    assert possible_layouts(ranks, room_N) == [Layout(*one) for one in expected]


@pytest.mark.parametrize(
    ("resources", "threads", "gpus", "room"),
    [
        ({"CPU": 8.0}, 1, False, 8),
        ({"CPU": 8.0}, 3, False, 2),
        ({"CPU": 8.0, "GPU": 2.0}, 1, True, 2),
        ({"CPU": 8.0}, 1, True, 0),
        ({}, 1, False, 0),
    ],
)
def test_a_rank_takes_a_cpu_per_thread_and_a_gpu(resources, threads, gpus, room):
    assert room_for_ranks(resources, threads, gpus=gpus) == room
    assert resources_of_ranks(2, threads, gpus=gpus) == {"CPU": 2 * threads} | ({"GPU": 2} if gpus else {})


def test_a_node_that_cannot_train_says_why(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    node = NodeRanks([LaunchedRank(0, 0, 1, 1)])
    assert "0.0.1" in node.prepare(str(tmp_path), "run", "0.0.1")
    assert "cannot be entered" in node.prepare(str(tmp_path / "absent"), "run", relibra.__version__)
    assert "run.folder" in node.prepare(str(tmp_path), "run", relibra.__version__)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    assert node.prepare(str(tmp_path), "run", relibra.__version__) == ""


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(connection, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"needs the package 'ray': .*pip install -e '\.\[ray\]'"):
        launching.launch(load_config(None, ["parallel.launcher=ray"]))


def test_an_address_without_a_cluster_is_told_at_once(monkeypatch, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(connection, "find_spec", lambda _: object())
    with pytest.raises(ConfigError, match=f"no Ray cluster at {address} .*ray start --head"):
        launching.launch(load_config(None, ["parallel.launcher=ray", f"run.folder={tmp_path}"]))
    assert not list(tmp_path.iterdir())


def test_the_machine_of_the_driver_is_not_measured_for_the_nodes(monkeypatch, tmp_path):
    monkeypatch.setattr(connection, "find_spec", lambda _: object())
    words = ["parallel.launcher=ray", "plan.cluster=measure", f"run.folder={tmp_path}"]
    with pytest.raises((ConfigError, ClusterError), match="relibra calibrate"):
        launching.launch(load_config(None, words))


@pytest.mark.slow
def test_a_node_passes_on_what_its_ranks_print_and_how_they_ended(tmp_path):
    config = load_config(None, ["parallel.ranks=1", "run.steps=0", "warmup.steps=0", f"run.folder={tmp_path}"])
    node = NodeRanks([LaunchedRank(0, 0, 1, 1)])
    port = node.listen("127.0.0.1")
    with pytest.raises(OSError, match="in use"), socket.create_server(("127.0.0.1", port)):
        pass
    (tmp_path / "run").mkdir()
    address, run = ("127.0.0.1", port), str(tmp_path / "run")
    node.start(config.model_dump_json(), run, address=address, heartbeat_seconds=10.0, offline=False)
    lines, deadline = [], time.monotonic() + 120
    while (news := node.news(1.0)).ended is None:
        lines += news.lines
        assert time.monotonic() < deadline
    assert "device cpu" in [*lines, *news.lines]
    assert news.ended.codes == (Exit.DONE,)
