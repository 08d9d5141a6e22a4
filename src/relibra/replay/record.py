"""`record_routing`: record which experts each token takes while a model runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Integer
from torch import Tensor, nn

from relibra.errors import EngineError
from relibra.replay.routers import RouterSite, find_routers, is_recompute


class RoutingRecorder:
    """Collects one tensor of expert ids per forward pass; see `record_routing`."""

    def __init__(self, sites: tuple[RouterSite, ...]) -> None:
        """Start empty; `sites` are the routers whose calls are recorded."""
        self.layer_ids = tuple(site.layer_id for site in sites)
        self.num_experts = sites[0].num_experts
        self.top_k = sites[0].top_k
        self._sites = sites
        self._dtype = narrow_dtype(self.num_experts)
        self._forwards: list[Tensor] = []
        self._running: list[Tensor] = []  # ids of the current forward pass: its first layers, in order
        self._unchecked = set(range(len(sites)))

    def take(self) -> list[Integer[Tensor, "T L K"]]:
        """Return the ids `[T, L, K]` of each forward pass since the last call, oldest first, and drop them.

        Rows are all tokens of a forward pass as its routers saw them, padding included. The type is the narrowest one
        with full support in torch: uint8, int16 or int32.

        raises   EngineError when a forward pass stopped before its last router
        """
        if self._running:
            done, self._running = len(self._running), []
            raise EngineError(
                f"a forward pass ended after {done} of {len(self._sites)} routers, before {self._sites[done].name}: "
                "take routes only after whole forward passes, and record again"
            )
        taken, self._forwards = self._forwards, []
        return taken

    def _on_router(self, index: int, _router: nn.Module, _args: Any, output: tuple[Tensor, ...]) -> None:
        if is_recompute():
            return
        if index in self._unchecked:
            self._sites[index].check_rule(output)
            self._unchecked.discard(index)
        if index != len(self._running):
            expected, self._running = self._sites[len(self._running)].name, []
            raise EngineError(
                f"router {self._sites[index].name} ran where {expected} was due: a forward pass has to run every "
                "router once, in the order of the layers; record whole forward passes of one model at a time"
            )
        self._running.append(output[2])
        if len(self._running) == len(self._sites):
            with torch.inference_mode(False):  # else the caller could not change ids recorded in generation
                self._forwards.append(torch.stack(self._running, dim=1).to(self._dtype))
            self._running = []


@contextmanager
def record_routing(model: nn.Module) -> Iterator[RoutingRecorder]:
    """Record the experts that every forward pass of the model takes inside this context.

    Recomputation by activation checkpointing is not recorded. The first forward pass
    checks that relibra's gate rule reproduces each router's weights bit for bit.

    raises   EngineError for a model that cannot be recorded (`find_routers`), a rule that does not hold, or an
             unfinished forward pass

        with record_routing(model) as recorder:
            model(input_ids)
        [routes] = recorder.take()
    """
    sites = find_routers(model)
    recorder = RoutingRecorder(sites)
    handles = [
        site.module.register_forward_hook(partial(recorder._on_router, index)) for index, site in enumerate(sites)
    ]
    try:
        yield recorder
    finally:
        for handle in handles:
            handle.remove()
    if recorder._running:
        recorder.take()


def narrow_dtype(num_experts: int) -> torch.dtype:
    """Return the smallest type for expert ids; signed beyond uint8, because torch hardly computes with uint16."""
    return torch.uint8 if num_experts <= 1 << 8 else torch.int16 if num_experts <= 1 << 15 else torch.int32
