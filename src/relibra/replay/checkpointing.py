"""Activation checkpointing as a router sees it: its backward pass runs the layers, and their routers, once more."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from relibra.errors import EngineError


def is_recompute() -> bool:
    """Tell whether we are inside a backward pass, where nothing but a recomputation runs a router."""
    return torch._C._current_graph_task_id() != -1


def awaits_recompute(logits_TE: Tensor, *, with_grad: bool) -> bool:
    """Tell inside a forward pass whether the backward pass will recompute the layer of this router.

    A reentrant checkpoint runs its layer without gradients inside a decoder that has them (`with_grad`). A
    non-reentrant one hooks the tensors saved for backward; so do others, such as offloading: then we expect one
    recomputation too many, which only keeps the guard up.
    """
    if not torch.is_grad_enabled():
        return with_grad
    hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    return hooked and logits_TE.requires_grad


class RecomputeGuard:
    """Forward pre-hook that stays on a replayed router and refuses a recomputation outside of any replay.

    That recomputation would silently take native routes, and gradients would belong to other experts than the loss.

    pending   replayed forward passes that are still to be recomputed
    """

    def __init__(self, pending: int) -> None:
        """Guard a router with `pending` recomputations to come."""
        self.pending = pending

    def __call__(self, router: nn.Module, _args: Any) -> None:
        """Let a forward pass through, and raise EngineError in a recomputation."""
        if is_recompute():
            raise EngineError(
                f"{type(router).__name__}: activation checkpointing recomputes a forward pass that was replayed, but "
                "no replay is active: call backward() inside replay_routing over the same routes"
            )


def arm_guard(router: nn.Module, pending: int) -> None:
    """Leave a guard on the router if a replayed forward pass is still to be recomputed."""
    if pending > 0:
        router.register_forward_pre_hook(RecomputeGuard(pending))


def disarm_guard(router: nn.Module) -> int:
    """Take the guard off the router and return how many recomputations were still to come."""
    # By looking rather than by handle: a handle would not follow a deep copy of the model.
    hooks = router._forward_pre_hooks
    guards = {key: hook for key, hook in hooks.items() if isinstance(hook, RecomputeGuard)}
    for key in guards:
        del hooks[key]
    return sum(guard.pending for guard in guards.values())
