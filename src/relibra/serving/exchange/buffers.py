"""`RowBuffer`: rows in memory that is allocated once; channels send from it and receive into it."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class RowBuffer:
    """Rows `[X, H]` and the bytes that hold them."""

    rows_XH: Tensor

    def bytes_of(self, first: int, count: int) -> memoryview:
        """Return the bytes of rows, to be sent or filled."""
        rows = self.rows_XH[first : first + count].view(torch.uint8)
        return rows.numpy().data.cast("B") if count else memoryview(b"")

    def holds(self, rows_YH: Tensor, first: int) -> bool:
        """Return whether rows lie in this buffer from row `first` on."""
        return rows_YH.data_ptr() == self.rows_XH.data_ptr() + first * self.row_bytes and rows_YH.is_contiguous()

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.rows_XH.shape[1] * self.rows_XH.element_size()


def private_buffer(rows: int, hidden: int, dtype: torch.dtype) -> RowBuffer:
    """Return a buffer of this process."""
    return RowBuffer(torch.zeros((rows, hidden), dtype=dtype))


def shared_file(rows: int, hidden: int, dtype: torch.dtype) -> int:
    """Return the descriptor of a file in memory for two buffers, which both ends map with `mapped_buffers`.

    The file has no name, so nothing is left behind by a process that is killed.
    """
    file = os.memfd_create("relibra-rows", os.MFD_CLOEXEC)
    os.ftruncate(file, 2 * rows * hidden * dtype.itemsize)
    return file


def mapped_buffers(file: int, rows: int, hidden: int, dtype: torch.dtype) -> tuple[RowBuffer, RowBuffer]:
    """Map the two buffers of a file; its descriptor is not needed for them afterwards.

    raises   ValueError when the file has another size
    """
    size = 2 * rows * hidden * dtype.itemsize
    if os.fstat(file).st_size != size:
        raise ValueError(f"the shared memory has {os.fstat(file).st_size} bytes instead of {size}")
    both = torch.frombuffer(mmap.mmap(file, size), dtype=dtype).view(2, rows, hidden)
    return RowBuffer(both[0]), RowBuffer(both[1])
