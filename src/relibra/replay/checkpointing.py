"""Detect activation checkpointing, whose backward pass runs the layers and their routers once more."""

from __future__ import annotations

import torch
from torch import Tensor


def is_recompute() -> bool:
    """Return whether a backward pass is running, in which only a recomputation runs a router."""
    return torch._C._current_graph_task_id() != -1


def awaits_recompute(logits_TE: Tensor, *, with_grad: bool) -> bool:
    """Return, inside a forward pass, whether the backward pass will recompute the layer of this router.

    A reentrant checkpoint runs its layer without gradients inside a decoder that has them (`with_grad`). A
    non-reentrant one hooks the tensors saved for backward. Offloading uses the same
    hooks and is taken for a checkpoint: its backward pass has to run inside a replay too, without a recomputation.
    """
    if not torch.is_grad_enabled():
        return with_grad
    hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    return hooked and logits_TE.requires_grad
