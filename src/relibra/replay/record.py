"""`record_routing`: record which experts each token takes while a model runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Integer, Shaped
from torch import Tensor, nn

from relibra.errors import EngineError, TraceError
from relibra.replay.routers import RouterSite, RuleChecks, find_routers, is_recompute
from relibra.routing.trace import RoutingTrace


class RoutingRecorder:
    """Collects one tensor of expert ids per forward pass; see `record_routing`.

    layer_ids     decoder layer of each entry of the layer axis: dense layers have none
    num_experts   experts per layer
    top_k         choices per token
    """

    def __init__(self, sites: tuple[RouterSite, ...]) -> None:
        """Start empty; `sites` are the routers whose calls are recorded."""
        self.layer_ids = tuple(site.layer_id for site in sites)
        self.num_experts = sites[0].num_experts
        self.top_k = sites[0].top_k
        self._sites = sites
        self._dtype = narrow_dtype(self.num_experts)
        self._forwards: list[Tensor] = []
        self._running: list[Tensor] = []  # ids of the current forward pass: its first layers, in order
        self._checks = RuleChecks()

    def take(self) -> list[Integer[Tensor, "T L K"]]:
        """Return the ids `[T, L, K]` of each forward pass since the last call, oldest first, and drop them.

        Rows are all tokens of a forward pass as its routers saw them, padding included. The type is the narrowest one
        with full support in torch: uint8, int16 or int32.

        raises   EngineError when a forward pass stopped before its last router, or a gate rule does not hold
        """
        if self._running:
            done, self._running = len(self._running), []
            raise EngineError(
                f"a forward pass ended after {done} of {len(self._sites)} routers, before {self._sites[done].name}: "
                "take routes only after whole forward passes, and record again"
            )
        self._checks.read()
        taken, self._forwards = self._forwards, []
        return taken

    def take_trace(
        self,
        input_ids_BN: Integer[Tensor, "B N"],
        attention_mask_BN: Shaped[Tensor, "B N"] | None = None,
        *,
        weight_version: int = 0,
        source: str = "record_routing",
    ) -> RoutingTrace:
        """Return the routes since the last call as a trace with layer ids and token hashes, and drop them.

        input_ids_BN        tokens of the forward passes, one after another: a sample per row, padded on either side
        attention_mask_BN   non-zero for tokens; default: all
        weight_version      policy version that the model has
        source              where the trace says it comes from
        raises              TraceError when the passes saw another number of tokens, as in generation with a cache, and
                            nothing is dropped; EngineError as `take`
        """
        rows, (B, N) = sum(len(experts_TLK) for experts_TLK in self._forwards), input_ids_BN.shape
        if not self._running and (rows != B * N or not rows):
            raise TraceError(
                f"{len(self._forwards)} forward passes of {rows} tokens were recorded, and the batch has {B} x {N}: "
                "pass the tokens of these passes, padding included; after generation with a cache, put the rows of "
                "`take` in order, and give RoutingTrace.from_samples the recorder's layer_ids"
            )
        mask_BN = torch.ones(B, N) if attention_mask_BN is None else attention_mask_BN
        real_BN = mask_BN.detach().cpu().numpy() != 0
        experts_BNLK = torch.cat(self.take()).cpu().numpy().reshape(B, N, len(self.layer_ids), self.top_k)
        tokens_BN = input_ids_BN.detach().cpu().numpy()
        return RoutingTrace.from_samples(
            [experts_NLK[real_N] for experts_NLK, real_N in zip(experts_BNLK, real_BN, strict=True)],
            num_experts=self.num_experts,
            layer_ids=self.layer_ids,
            tokens=[tokens_N[real_N] for tokens_N, real_N in zip(tokens_BN, real_BN, strict=True)],
            weight_versions=[weight_version] * B,
            source=source,
        )

    def _on_router(self, index: int, _router: nn.Module, _args: Any, output: tuple[Tensor, ...]) -> None:
        if is_recompute():
            return
        self._checks.compare(self._sites[index], output)
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

    Recomputation by activation checkpointing is not recorded. Taking the routes of the first forward pass, or leaving
    the context, checks that relibra's gate rule reproduces each router's weights bit for bit.

    raises   EngineError for a model that cannot be recorded (`find_routers`), a rule that does not hold, or an
             unfinished forward pass

        with record_routing(model) as recorder:
            model(input_ids)
        trace = recorder.take_trace(input_ids)  # or recorder.take(): a tensor per forward pass
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
    recorder._checks.read()


def narrow_dtype(num_experts: int) -> torch.dtype:
    """Return the smallest type for expert ids; signed beyond uint8, because torch hardly computes with uint16."""
    return torch.uint8 if num_experts <= 1 << 8 else torch.int16 if num_experts <= 1 << 15 else torch.int32
