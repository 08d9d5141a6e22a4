"""Buffers of rows, allocated once: channels send from them and receive into them."""

from __future__ import annotations

import mmap
import os

import torch
from torch import Tensor


def shared_file(rows: int, hidden: int, dtype: torch.dtype) -> int:
    """Return the descriptor of a file in memory for two buffers, which both ends map with `make_buffers`.

    The file has no name, so nothing is left behind by a process that is killed.
    """
    file = os.memfd_create("relibra-rows", os.MFD_CLOEXEC)
    os.ftruncate(file, 2 * rows * hidden * dtype.itemsize)
    return file


def make_buffers(rows: int, hidden: int, dtype: torch.dtype, file: int | None = None) -> tuple[Tensor, Tensor]:
    """Return the buffers `[X, H]` of rows and of results.

    file     of both, whose descriptor is not needed afterwards; None: memory of this process
    raises   ValueError when the file has another size
    """
    if file is None:
        both = torch.zeros((2, rows, hidden), dtype=dtype)
    else:
        size = 2 * rows * hidden * dtype.itemsize
        if os.fstat(file).st_size != size:
            raise ValueError(f"the shared memory has {os.fstat(file).st_size} bytes instead of {size}")
        both = torch.frombuffer(mmap.mmap(file, size), dtype=dtype).view(2, rows, hidden)
    return both[0], both[1]


def bytes_of(rows_YH: Tensor) -> memoryview:
    """Return the bytes of rows that lie together, to be sent or filled."""
    return rows_YH.view(torch.uint8).numpy().data.cast("B") if len(rows_YH) else memoryview(b"")
