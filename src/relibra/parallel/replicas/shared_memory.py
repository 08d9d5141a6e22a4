"""Memory that the ranks of a machine share: a file without a name in /dev/shm.

The first rank of a machine makes it, the others open it through that process. So there is no name to clean up, and the
system frees the memory when the last process that has it ends. All pages are reserved at the start: without that, a
machine that runs out of memory later kills the next process that writes.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Int, Int64
from numpy import ndarray

from relibra.errors import EngineError

FOLDER = "/dev/shm"


def reserve(num_bytes: int, machine_R: Int[ndarray, " R"], group: dist.ProcessGroup) -> mmap.mmap:
    """Return zeroed memory shared by the ranks of a machine; collective, and raises on all ranks alike.

    machine_R   machine of each rank of the group
    group       of a backend for host memory (gloo)
    raises      EngineError when a machine has too little memory, or a rank cannot open that of its machine's first rank
    """
    rank = dist.get_rank(group)
    first_ranks = np.unique(machine_R, return_index=True)[1]
    first = int(first_ranks[machine_R[rank]])
    made = _make(num_bytes) if rank == first else _NOTHING
    handle = made.handle
    try:
        made_R = [_Made(*row) for row in gather_integers(made, group).tolist()]
        for other in first_ranks.tolist():
            if made_R[other].handle < 0:
                raise _too_little(other, num_bytes, made_R[other].free, made_R[other].error)
        if rank != first:
            handle = open_memory(made_R[first])
        memory, error = _attach(handle, num_bytes, _range_to_reserve(num_bytes, machine_R, rank))
        error_R = gather_integers([error, free_bytes()], group)
        for other in np.flatnonzero(error_R[:, 0] > 0).tolist():
            raise _too_little(other, num_bytes, int(error_R[other, 1]), int(error_R[other, 0]))
        if lost := np.flatnonzero(error_R[:, 0] == _UNREACHABLE).tolist():
            raise EngineError(
                f"ranks {lost} cannot open the shared memory that the first rank of their machine made: start all "
                "ranks of a machine as one user in one container, or pass ranks_per_machine=1 for a pool per rank"
            )
        assert memory is not None, "an error was raised where there is no memory"
        return memory
    finally:
        if handle >= 0:
            os.close(handle)  # the mapping stays


def gather_integers(values: Sequence[int], group: dist.ProcessGroup) -> Int64[ndarray, "R X"]:
    """Return the integers of all ranks, as many from each; collective over a group of host memory (gloo)."""
    own = torch.tensor(list(values), dtype=torch.int64)
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, own, group=group)
    return torch.stack(gathered).numpy()


class _Made(NamedTuple):
    """What the first rank of a machine sends to the others; handle -1: nothing was made, because of `error`."""

    handle: int
    process: int
    inode: int
    free: int
    error: int


_NOTHING = _Made(-1, 0, 0, 0, 0)
_UNREACHABLE = -1
"""In place of an `errno`, which is positive: the file of the first rank cannot be opened."""


def free_bytes() -> int:
    """Return the free bytes of shared memory, 0 if there is none."""
    try:
        status = os.statvfs(FOLDER)
    except OSError:
        return 0
    return status.f_bavail * status.f_frsize


def _make(num_bytes: int) -> _Made:
    free = free_bytes()
    if num_bytes > free:
        return _NOTHING._replace(free=free)
    try:
        handle = os.open(FOLDER, os.O_TMPFILE | os.O_RDWR, 0o600)
    except OSError as error:
        return _NOTHING._replace(free=free, error=error.errno or errno.EIO)
    return _Made(handle, os.getpid(), os.fstat(handle).st_ino, free, 0)


def open_memory(made: _Made) -> int:
    """Open the file of another process of this machine; return -1 if that fails."""
    try:
        handle = os.open(f"/proc/{made.process}/fd/{made.handle}", os.O_RDWR)
    except OSError:
        return -1
    if os.fstat(handle).st_ino != made.inode:  # a process of that number in another container
        os.close(handle)
        return -1
    return handle


def _range_to_reserve(num_bytes: int, machine_R: Int[ndarray, " R"], rank: int) -> tuple[int, int]:
    """Return the bytes [start, stop) that a rank reserves: whole pages, so that they lie on its NUMA node."""
    mates = np.flatnonzero(machine_R == machine_R[rank]).tolist()
    pages, own = math.ceil(num_bytes / mmap.PAGESIZE), mates.index(rank)
    start, stop = (pages * n // len(mates) * mmap.PAGESIZE for n in (own, own + 1))
    return start, min(stop, num_bytes)


def _attach(handle: int, num_bytes: int, share: tuple[int, int]) -> tuple[mmap.mmap | None, int]:
    """Map the file and reserve pages of it; return the memory, and 0 or the error number."""
    if handle < 0:
        return None, _UNREACHABLE
    start, stop = share
    try:
        os.ftruncate(handle, num_bytes)
        if start < stop:
            os.posix_fallocate(handle, start, stop - start)
        return mmap.mmap(handle, num_bytes), 0
    except OSError as error:
        return None, error.errno or errno.EIO


def _too_little(rank: int, num_bytes: int, free: int, error: int) -> EngineError:
    why = f" ({os.strerror(error)})" if error else ""
    return EngineError(
        f"rank {rank}: a pool of all expert weights needs {num_bytes} bytes of shared memory, and {free} are free in "
        f"{FOLDER}{why}: enlarge it (docker run --shm-size, mount -o remount,size=...), or use no pool"
    )
