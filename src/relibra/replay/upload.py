"""`upload`: the one way in which a tensor of the host gets to a device without a wait."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.compiler.disable  # the compiler cannot trace page-locked memory
def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host on a device; a GPU copies it from page-locked memory, beside its work."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
