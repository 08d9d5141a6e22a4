"""Replaying: run a model with recorded expert choices and live gate weights (R3, arXiv 2510.11370)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from relibra.errors import EngineError, TraceError
from relibra.replay.batch import BatchRoutes
from relibra.replay.checkpointing import arm_guard, awaits_recompute, disarm_guard, is_recompute
from relibra.replay.routers import RouterSite, decoder_of, find_routers, num_decoder_layers

_SUSPICIOUS_ROWS = 16
"""With one choice per token, this many rows that all took expert 0 are an empty capture rather than a decision."""

_RULE_CHECKED = "_relibra_rule_checked"
"""Set on a router once its gate rule has been seen to hold, so that replay synchronises the device for it only once."""


class RoutingReplay:
    """What one replay context did; see `replay_routing`."""

    def __init__(self, sites: tuple[RouterSite, ...], routes: BatchRoutes, columns: Sequence[int]) -> None:
        """Prepare one hook per router; `columns` are the layers of the routes that belong to the routers."""
        self._experts_LTK = routes.experts_TLK[:, list(columns)].transpose(0, 1).contiguous()
        self._valid_T = routes.valid_T
        self._hooks = [_RouterReplay(site, self, position) for position, site in enumerate(sites)]
        self._with_grad = False
        """Whether the caller of the decoder records gradients; inside a reentrant checkpoint nobody else can tell."""

    @property
    def disagreement(self) -> float:
        """Share of (replayed row, layer) where the router itself would have taken another *set* of experts.

        Counted in the forward pass, read back from the device only here; 0.0 when nothing was replayed.
        """
        differing = [hook.differing for hook in self._hooks if hook.differing is not None]
        compared = int(self._valid_T.sum()) * len(differing)
        return float(torch.stack(differing).sum()) / compared if compared else 0.0

    def _routes_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return (experts `[L, T, K]`, valid `[T]`) on a device, moving all layers at once when it changes."""
        if self._experts_LTK.device != device:
            self._experts_LTK, self._valid_T = self._experts_LTK.to(device), self._valid_T.to(device)
        return self._experts_LTK, self._valid_T

    def _check_consumption(self) -> None:
        """Hold every layer against the first: a context covers one forward pass, one backward pass, or both."""
        first, backward = self._hooks[0], any(hook.recomputes for hook in self._hooks)
        for hook in self._hooks:
            skipped = backward and hook.pending > 0 and not hook.recomputes
            if hook.forwards != first.forwards or max(hook.forwards, hook.recomputes) > 1 or skipped:
                raise TraceError(
                    f"layer {hook.site.layer_id}: its routes were used by {hook.forwards} forward passes (layer "
                    f"{first.site.layer_id}: {first.forwards}) and {hook.recomputes} recomputations; allowed is at "
                    "most one each, the same for all layers: replay one micro-batch per context, forward and backward"
                )
            if not getattr(hook.site.module, _RULE_CHECKED, False):
                raise TraceError(
                    f"layer {hook.site.layer_id}: its routes were used by 0 forward passes and 0 recomputations, now "
                    "and ever: run this model inside the context, and enter that before torch.compile traces the model"
                )


class _RouterReplay:
    """Forward hook of one router: swaps in recorded ids and the live weights that belong to them."""

    def __init__(self, site: RouterSite, replay: RoutingReplay, position: int) -> None:
        self.site = site
        self.replay = replay
        self.position = position
        self.pending = disarm_guard(site.module)
        self.forwards = 0
        self.recomputes = 0
        self.differing: Tensor | None = None

    def __call__(self, router: nn.Module, _args: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        native_TK = output[2]
        experts_LTK, valid_T = self.replay._routes_on(native_TK.device)
        if len(native_TK) != len(valid_T):
            raise TraceError(
                f"layer {self.site.layer_id}: its router sees {len(native_TK)} rows, the routes have {len(valid_T)}: "
                "build BatchRoutes from the attention mask or the packed length of exactly this batch"
            )
        if not getattr(router, _RULE_CHECKED, False):
            self.site.check_rule(output)
            setattr(router, _RULE_CHECKED, True)
        ids_TK = torch.where(valid_T.unsqueeze(1), experts_LTK[self.position], native_TK)
        if is_recompute():
            self.recomputes += 1
        else:
            self.forwards += 1
            self.pending += awaits_recompute(output[0], with_grad=self.replay._with_grad)
            # Ids of a row differ, so two sets of one size are equal when every member of one is in the other.
            same_T = (native_TK.unsqueeze(2) == ids_TK.unsqueeze(1)).any(2).all(1)
            self.differing = (~same_T).sum()
        return (output[0], self.site.gates(output, ids_TK), ids_TK, *output[3:])


@contextmanager
def replay_routing(model: nn.Module, routes: BatchRoutes) -> Iterator[RoutingReplay]:
    """Make every router of the model take the recorded experts for one micro-batch.

    Only the choice is replayed: weights come from the live logits under the model's own rule, so gradients reach the
    router. Rows that are not valid run native. Put the backward pass inside the context too; with activation
    checkpointing it recomputes the layers and needs the same routes. With several micro-batches in flight, enter a
    second context over the same routes around the backward pass alone.

    raises   EngineError for a model without known routers, a second replay inside this one, or (later) a recomputation
             outside of any context; TraceError when the routes do not fit the model or the batch, or when a layer did
             not use them exactly as often as the others

        with replay_routing(model, routes) as replay:
            loss(model(input_ids)).backward()
        replay.disagreement
    """
    sites = find_routers(model)
    for site in sites:
        if any(isinstance(hook, _RouterReplay) for hook in site.module._forward_hooks.values()):
            raise EngineError(
                f"router {site.name} is replaying already: leave the first replay_routing context of this model "
                "before entering another one"
            )
    columns = _columns_of(routes, sites, num_decoder_layers(model, sites[0]))
    replay = RoutingReplay(sites, routes, columns)

    def note_grad_mode(*_: Any) -> None:
        if not is_recompute():
            replay._with_grad = torch.is_grad_enabled()

    handles = [decoder_of(model, sites[0]).register_forward_pre_hook(note_grad_mode)]
    handles += [site.module.register_forward_hook(hook) for site, hook in zip(sites, replay._hooks, strict=True)]
    try:
        yield replay
    finally:
        for handle in handles:
            handle.remove()
        for hook in replay._hooks:
            arm_guard(hook.site.module, hook.pending - hook.recomputes)
    replay._check_consumption()


def _columns_of(routes: BatchRoutes, sites: tuple[RouterSite, ...], num_layers: int) -> list[int]:
    """Return the layer-axis position of each router in the routes; they hold the MoE layers or all decoder layers."""
    wanted = [site.layer_id for site in sites]
    if list(routes.layer_ids) not in (wanted, list(range(num_layers))):
        missing = sorted(set(wanted) - set(routes.layer_ids))
        extra = sorted(set(routes.layer_ids) - set(wanted))
        raise TraceError(
            f"the routes hold layers {list(routes.layer_ids)}, the model has MoE layers {wanted}: missing {missing}, "
            f"extra {extra}; allowed are the MoE layers or all {num_layers} decoder layers: record with the same model"
        )
    columns = [routes.layer_ids.index(layer_id) for layer_id in wanted]
    for site, column in zip(sites, columns, strict=True):
        for name, ours, theirs in (
            ("experts", routes.num_experts, site.num_experts),
            ("choices per token", routes.top_k, site.top_k),
        ):
            if ours != theirs:
                raise TraceError(
                    f"layer {site.layer_id}: the routes have {ours} {name}, the model has {theirs}: "
                    "record with the same model"
                )
        if routes.top_k == 1:
            _refuse_empty_capture(routes, site.layer_id, column)
    return columns


def _refuse_empty_capture(routes: BatchRoutes, layer_id: int, column: int) -> None:
    """Notice a layer that some engine left at zero; with two or more choices zeros are duplicates already."""
    rows = routes.valid_T.nonzero().flatten()
    if len(rows) >= _SUSPICIOUS_ROWS and not routes.experts_TLK[rows, column].any():
        raise TraceError(
            f"layer {layer_id}: all {len(rows)} recorded rows, from {routes.name_row(int(rows[0]))} on, took expert 0, "
            "so the layer was never captured: check the recorder of this engine"
        )
