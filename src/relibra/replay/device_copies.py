"""Copies between host and device for which the host does not wait: from and to page-locked memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNMENT = 16
"""Bytes: a tensor of any type may begin at its multiples."""


@torch.compiler.disable  # the compiler cannot trace page-locked memory
def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host on a device; on a CPU, the same tensor."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def upload_together(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return tensors of the host on a device, all in one transfer; on a CPU, the same tensors."""
    if device.type == "cpu":
        return list(tensors)
    padded_sizes = [-(-one.nbytes // _ALIGNMENT) * _ALIGNMENT for one in tensors]
    packed = torch.empty(sum(padded_sizes), dtype=torch.uint8, pin_memory=True)
    for part, one in zip(packed.split(padded_sizes), tensors, strict=True):
        part[: one.nbytes].view(one.dtype).copy_(one.flatten())
    arrived = packed.to(device, non_blocking=True).split(padded_sizes)
    return [part[: one.nbytes].view(one.dtype).view(one.shape) for part, one in zip(arrived, tensors, strict=True)]


def download(tensor: Tensor) -> Tensor:
    """Return a copy on the host, which is complete after `wait_for_copies`; on a CPU, the same tensor."""
    return tensor.detach().to("cpu", non_blocking=True)


def wait_for_copies(device: torch.device) -> None:
    """Wait until the copies from a device that this thread has begun are complete."""
    if device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()
