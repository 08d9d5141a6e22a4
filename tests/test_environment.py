"""Memory that is freed while a model loads."""

import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

from relibra.environment import host_memory, in_little_memory

MIB = 1 << 20


def resident_mib():
    """Return the memory of this process that no file backs, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


def freed_mib():
    """Return what the system gets back of every other of 64 blocks of a MiB, one of which was freed before."""
    blocks = np.ones(MIB, np.uint8)
    blocks = [np.ones(MIB, np.uint8) for _ in range(64)]
    before = resident_mib()
    del blocks[::2]
    return before - resident_mib()


def freed_inside_and_after():
    with in_little_memory():
        inside = freed_mib()
    return inside, freed_mib()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_freed_blocks_are_returned_while_a_model_loads():
    """In a process of its own: blocks that other tests freed would be taken again, and are not returned."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        inside, after = pool.submit(freed_inside_and_after).result()
    assert inside > 30
    assert after < 2


def test_memory_of_the_host_is_that_of_its_control_group(tmp_path):
    whole, free = (host_memory(tmp_path, free=free) for free in (False, True))
    assert 0 < free <= whole
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory(tmp_path, free=False) == whole
    (tmp_path / "memory.max").write_text("1048576\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 400000\ninactive_file 200000\n")
    assert host_memory(tmp_path, free=False) == 1048576
    assert host_memory(tmp_path, free=True) == 548576
    (tmp_path / "memory.stat").unlink()
    assert host_memory(tmp_path, free=False) == 1048576
    assert host_memory(tmp_path, free=True) is None
