"""The pool holds what the homes hold, notices when it does not, and leaves nothing behind."""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch.multiprocessing as mp

from relibra import EngineError
from relibra.parallel.replicas.host_pool import assign_writers
from tests.parallel.pools import (
    SHARED_MEMORY,
    die_with_a_pool,
    inodes_mapped_by,
    pools_through_training,
    prefetch,
    use_a_pool,
)
from tests.parallel.ranks_at_work import on_ranks
from tests.parallel.steps import step

slow = pytest.mark.slow

MACHINES = {2: {"None": [0, 0], "1": [0, 1]}, 4: {"None": [0] * 4, "2": [0, 0, 1, 1]}}
BYTES_QWEN3 = 3 * 8 * (2 * 16 * 32 + 32 * 16) * 4  # layers, experts, gate and up, down, float32


def assert_right_all_along(results_R):
    num_ranks = len(results_R)
    for name, machines in MACHINES[num_ranks].items():
        found_R = [result[name] for result in results_R]
        for found in found_R:
            message, current = found["too early"]
            assert message.startswith("EngineError: the host pool has no weights yet: call refresh()")
            assert not current
            assert all(wrong == [] for wrong in found["wrong"].values()), found["wrong"]
            expected = dict.fromkeys(found["current"], (False, True))
            expected |= {"at first": (None, True), "moved homes, then trained": (True, True)}
            assert found["current"] == expected
            assert found["machines"] == machines
            assert found["closed"].startswith("EngineError: the host pool is closed")
            assert found["view after close"]
            assert found["named"] == []
            assert len(found["inodes"]) == 1
            assert found["inodes afterwards"] == []
        pairs = {(machine, *found["inodes"]) for machine, found in zip(machines, found_R, strict=True)}
        assert len(pairs) == len({inode for _, inode in pairs}) == max(machines) + 1


@slow
def test_two_ranks_share_what_their_homes_hold(tmp_path):
    cases = {"qwen3": step(), "gpt-oss, with biases": step(family="gpt_oss")}
    found = on_ranks(2, cases, tmp_path, pools_through_training)
    for results_R in found.values():
        assert_right_all_along(results_R)
    assert {result["None"]["bytes"] for result in found["qwen3"]} == {BYTES_QWEN3}


@slow
def test_four_ranks_share_also_where_fsdp_shares_out_the_homes(tmp_path):
    schedule = ([0] * 4 + [1] * 4, [0, 1, 2, 3] * 2)
    groups = step(2, lengths=range(5, 13), schedule=([0, 0, 1, 1, 2, 2, 3, 3], [0, 1] * 4))
    cases = {
        "one group of four": step(4, lengths=range(5, 13), schedule=schedule),
        "two groups of two": replace(groups, num_ranks=4),
    }
    for results_R in on_ranks(4, cases, tmp_path, pools_through_training).values():
        assert_right_all_along(results_R)


@slow
def test_what_cannot_be_done_is_said_on_every_rank(tmp_path):
    expected = {
        "uneven machines": ("EngineError: 2 ranks do not make machines of 3",),
        "little memory": (
            f"EngineError: rank 0: a pool of all expert weights needs {BYTES_QWEN3} bytes",
            "1000 are free",
        ),
        "memory gone": (
            f"EngineError: rank 1: a pool of all expert weights needs {BYTES_QWEN3} bytes",
            "No space left",
        ),
        "out of reach": ("EngineError: ranks [1] cannot open the shared memory",),
        "no such layer": ("no expert 0 in layer position 3", "layer positions 0 to 2"),
        "no such expert": ("no expert 8 in layer position 0: it holds experts 0 to 7",),
        "other names": ("EngineError: layer position 0, expert 0: the weights have shapes", "gate"),
        "homes in dispute": ("EngineError: layer position 0: expert ", "disagree on the homes"),
    }
    for rank, found in enumerate(on_ranks(2, {"use": step()}, tmp_path, use_a_pool)["use"]):
        for name, parts in expected.items():
            assert all(part in found[name] for part in parts), (name, found[name])
        assert found["inodes of failures"] == []
        assert found["copied"]
        assert found["cast"]
        assert found["no copy"]
        assert all(found["written to"])
        assert found["current"] == (rank == 0)


@slow
def test_a_killed_rank_leaves_no_shared_memory_behind(tmp_path):
    with pytest.raises((mp.ProcessExitedException, mp.ProcessRaisedException)):
        on_ranks(2, {"die": step()}, tmp_path, die_with_a_pool)
    inodes = {int((tmp_path / f"inode-{rank}").read_text()) for rank in range(2)}
    assert len(inodes) == 1
    holders = [p for p in os.listdir("/proc") if p.isdigit() and inodes & inodes_mapped_by(p)]
    assert not holders
    assert not [entry.name for entry in os.scandir(SHARED_MEMORY) if entry.inode() in inodes]


@slow
def test_prefetching_runs_beside_what_the_rank_computes(tmp_path):
    for found in on_ranks(2, {"prefetch": step()}, tmp_path, prefetch)["prefetch"]:
        overlap = found["overlap"]
        assert overlap["right"]
        assert overlap["threads"] == {"relibra-prefetch"}
        assert overlap["late"].startswith("EngineError: prefetch ('layer', 2) has not finished after 0.05 s")
        assert overlap["again"].startswith("EngineError: prefetch ('layer', 2) is under way already")
        assert overlap["after close"].startswith("EngineError: prefetch 'more' comes after close()")
        assert found["queue"] == [True, False]
        begun, behind, num_threads = found["closed"]
        assert begun.startswith("EngineError: the prefetcher was closed before")
        assert behind == begun
        assert num_threads == 0
        assert all(message.startswith("EngineError: the host pool has no expert 99") for message in found["wrong"])
        assert found["right"] == "no error"
        assert found["unknown"].startswith("EngineError: prefetch 'unknown' was never started")
        assert found["threads"] == [1, 0]


def test_each_machine_writes_an_expert_once_and_gets_what_it_lacks():
    """Two data-parallel replicas of two ranks; the machines are (0, 1, 2) and (3), then (0, 1) and (2, 3)."""
    held_RLE = np.zeros((4, 1, 4), dtype=np.int64)
    held_RLE[[0, 2], :, :2], held_RLE[[1, 3], :, 2:] = 1, 1
    writes_RLE, source_LE = assign_writers(held_RLE, np.array([0, 0, 0, 1]))
    assert writes_RLE[:, 0].tolist() == [[1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 0, 0], [0, 0, 1, 1]]
    assert source_LE.tolist() == [[0, 0, -1, -1]]
    writes_RLE, source_LE = assign_writers(held_RLE, np.array([0, 0, 1, 1]))
    assert writes_RLE.astype(int).tolist() == held_RLE.tolist()
    assert source_LE.tolist() == [[-1] * 4]


@pytest.mark.parametrize("stored", [[[1, 1, 0]], [[1, 1, 2]], [[0, 0, 0]]])
def test_experts_stored_unequally_often_are_refused(stored):
    held_RLE = np.stack([np.array(stored) > r for r in range(2)]).astype(np.int64)
    with pytest.raises(EngineError, match=r"layer position 0: expert \d is at home on ranks"):
        assign_writers(held_RLE, np.array([0, 0]))
