"""Host memory for what a GPU holds only now and then, and copies between both."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor

from relibra.errors import EngineError


def host_memory(num_bytes: int, device: torch.device) -> Tensor:
    """Return host memory `[num_bytes]` of type uint8, page-locked if the device is a GPU, until it is freed.

    torch's page-locked allocator rounds blocks up to a power of two: this takes ordinary memory, and locks it.

    raises    EngineError if the memory cannot be locked
    """
    memory = torch.zeros(num_bytes, dtype=torch.uint8)
    if device.type == "cuda" and num_bytes:
        cudart, address = torch.cuda.cudart(), memory.data_ptr()
        status = int(cudart.cudaHostRegister(address, num_bytes, 0))
        if status:
            raise EngineError(
                f"{num_bytes / 2**30:.1f} GiB of host memory cannot be page-locked (CUDA error {status}): raise the "
                "limit of locked memory (ulimit -l), give the node more memory, or set update.offload=off"
            )
        weakref.finalize(memory, cudart.cudaHostUnregister, address)
    return memory


class CopyStream:
    """Copies beside the kernels of a GPU, one after another; on a CPU each is made at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = None if device.type == "cpu" else torch.Stream(device)

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]], after: torch.Event | None) -> torch.Event | None:
        """Copy (target, source) pairs once an event has happened, and return the event of their end."""
        if self._stream is None:
            for target, source in pairs:
                target.copy_(source)
            return None
        with self._stream:
            if after is not None:
                self._stream.wait_event(after)
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            return self._stream.record_event()

    def kernels_wait(self, event: torch.Event | None) -> None:
        """Let kernels that are started from now on wait for an event."""
        if event is not None:
            torch.accelerator.current_stream(self._device).wait_event(event)

    def kernels_end(self) -> torch.Event | None:
        """Return the event of the end of all kernels that were started."""
        return None if self._stream is None else torch.accelerator.current_stream(self._device).record_event()

    def synchronize(self) -> None:
        """Wait on the host for all copies."""
        if self._stream is not None:
            self._stream.synchronize()
