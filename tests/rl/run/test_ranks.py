"""Joining ranks, exchanging JSON, and what the process that starts them needs and says."""

import socket
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

import relibra.rl.run.launch
from relibra.errors import ConfigError, EngineError, LostPeerError
from relibra.rl.config.run_config import RunConfig
from relibra.rl.run import ranks
from relibra.rl.run.ranks import (
    broadcast_json,
    connect_ranks,
    gather_arrays,
    gather_json,
    gather_several,
    joined_ranks,
    largest_over_ranks,
    sum_over_ranks,
)
from tests.rl.joined import CPU, alone, free_port, on_ranks


def test_a_rank_alone_gets_back_what_it_gives(monkeypatch):
    value = {"text": "ä\n", "numbers": [1, 0.1, None], "empty": {}}
    with alone():
        assert broadcast_json(value) == value
        assert gather_json(value) == [value]
        assert sum_over_ranks(torch.tensor([1, 2])).tolist() == [1, 2]
        assert largest_over_ranks(-3) == -3
        monkeypatch.setattr(ranks, "MAX_ARRAY_BYTES", 10)
        with pytest.raises(EngineError, match="sends 12 bytes: at most 10"):
            gather_json("x" * 10)
    assert not dist.is_initialized()


def test_arrays_of_any_type_and_shape_come_back_as_they_were(monkeypatch):
    arrays = [
        np.arange(6, dtype=np.int16).reshape(2, 3),
        np.zeros((0, 4), dtype=np.float32),
        np.array([True, False]),
        np.array(["a", "bc"]),
        np.arange(8).reshape(2, 4).T,
    ]
    with alone():
        for array in arrays:
            [found] = gather_arrays(array)
            assert found.dtype == array.dtype
            assert found.shape == array.shape
            assert found.tolist() == array.tolist()
        [together] = gather_several(arrays)
        for found, array in zip(together, arrays, strict=True):
            assert (found.dtype, found.shape, found.tolist()) == (array.dtype, array.shape, array.tolist())
        monkeypatch.setattr(ranks, "MAX_ARRAY_BYTES", 10)
        with pytest.raises(EngineError, match="sends 16 bytes: at most 10"):
            gather_arrays(np.zeros(2))


def _exchange_on_a_rank(_folder):
    """Exchange arrays whose sizes differ between ranks, and JSON, on one of two ranks."""
    rank = dist.get_rank()
    arrays = gather_arrays(np.arange(3 * rank, dtype=np.int32).reshape(-1, 3))
    return {
        "arrays": [array.tolist() for array in arrays],
        "together": [
            [array.tolist() for array in of_rank]
            for of_rank in gather_several([np.arange(rank, dtype=np.int16), np.full((1, 2 - rank), 0.5)])
        ],
        "json": gather_json({"rank": rank, "text": "x" * rank}),
        "told": broadcast_json(rank),
        "sum": sum_over_ranks(torch.tensor([rank, 1])).tolist(),
        "largest": largest_over_ranks(5 - rank),
    }


@pytest.mark.slow
def test_ranks_exchange_pieces_of_different_sizes(tmp_path):
    first, second = on_ranks(2, _exchange_on_a_rank, tmp_path)
    assert first == second
    assert first == {
        "arrays": [[], [[0, 1, 2]]],
        "together": [[[], [[0.5, 0.5]]], [[0], [[0.5]]]],
        "json": [{"rank": 0, "text": ""}, {"rank": 1, "text": "x"}],
        "told": 0,
        "sum": [1, 2],
        "largest": 5,
    }


@pytest.mark.parametrize("rank", [0, 1])
def test_missing_peer_is_waited_for_as_long_as_configured(rank):
    start = time.monotonic()
    with pytest.raises(LostPeerError, match=r"longer than 1 s \(parallel.timeout_seconds\)"):
        connect_ranks(1.0, f"tcp://127.0.0.1:{free_port()}?rank={rank}&world_size=2")
    assert time.monotonic() - start < 20


@pytest.mark.usefixtures("_leave_group")
def test_a_port_in_use_is_one_sentence(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        about = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": taken.getsockname()[1]}
        for name, value in about.items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(ConfigError, match=r"MASTER_PORT.* is in use"), joined_ranks(5.0, CPU):
            raise AssertionError("nobody can listen there")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer [127.0.0.1]:1. GLHF!"), LostPeerError),
        (RuntimeError("Timed out waiting 1000ms for recv operation to complete"), LostPeerError),
        (dist.DistNetworkError("no route"), LostPeerError),
        (RuntimeError("shape mismatch in a gloomy place"), RuntimeError),
        (EngineError("the server timed out"), EngineError),
        (ValueError("something else"), ValueError),
    ],
)
@pytest.mark.usefixtures("_leave_group")
def test_only_trouble_between_processes_counts_as_a_lost_peer(error, expected):
    with pytest.raises(expected) as caught, alone():
        raise error
    assert type(caught.value) is expected
    assert "GLHF" not in str(caught.value)


def test_a_launcher_loads_neither_torch_nor_numba():
    program = "import sys, relibra.rl.run.launch, relibra.cli.main; print({'torch', 'numba'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_a_missing_package_is_named_with_what_to_install(monkeypatch):
    monkeypatch.setattr(relibra.rl.run.launch, "find_spec", lambda name: None if name == "tensorboard" else object())
    with pytest.raises(ConfigError, match=r"needs the package 'tensorboard': .*pip install -e '\.\[train\]'"):
        relibra.rl.run.launch.launch(RunConfig())
