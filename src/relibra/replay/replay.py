"""`replay_routing`: run a model with recorded expert choices and live gate weights (R3, arXiv 2510.11370)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from relibra.errors import EngineError, TraceError
from relibra.replay.batch import BatchRoutes
from relibra.replay.device_copies import upload
from relibra.replay.routers import RouterSite, RuleChecks, awaits_recompute, decoder_of, find_routers, is_recompute

_SUSPICIOUS_ROWS = 16
"""With one choice per token, so many rows that all took expert 0 are refused as an empty recording."""


@dataclass(frozen=True)
class RouterComparison:
    """Experts that the routers would have taken, compared with the replayed ones; counts to add over batches and ranks.

    rows                replayed rows
    pairs               (row, layer) pairs of them
    choices             (row, layer, choice): K per pair
    differing_pairs     pairs with another *set* of experts
    differing_rows      rows with such a layer
    differing_choices   replayed experts that the router would not have taken
    """

    rows: int = 0
    pairs: int = 0
    choices: int = 0
    differing_pairs: int = 0
    differing_rows: int = 0
    differing_choices: int = 0

    def __add__(self, other: RouterComparison) -> RouterComparison:
        """Return the sums of both."""
        return RouterComparison(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


class RoutingReplay:
    """One replay context; see `replay_routing`."""

    def __init__(self, sites: tuple[RouterSite, ...], routes: BatchRoutes) -> None:
        """Create a hook for each router; routes and routers have the same layers."""
        self._routes = routes
        self._experts_TLK, self._valid_T = routes.experts_TLK, routes.valid_T
        self._hooks = [_RouterReplay(site, self, position) for position, site in enumerate(sites)]
        self._checks = RuleChecks()
        self._backward_begun = False
        """Whether a backward pass has begun here, of a forward pass over these routes in this or an earlier context."""
        self._with_grad = False
        """Whether gradients are enabled around the decoder: a reentrant checkpoint disables them around its layers."""

    @property
    def disagreement(self) -> float:
        """Return the share of (replayed row, layer) pairs whose router would have taken another *set* of experts.

        Counted in the forward pass, read back from the device only here; nan if nothing was compared.
        """
        compared = self.comparison()
        return compared.differing_pairs / compared.pairs if compared.pairs else float("nan")

    def comparison(self) -> RouterComparison:
        """Return the comparison of routers and routes over the replayed rows, as counted in the forward pass.

        Read back from the device only here; all 0 before the forward pass.
        """
        return self.replayed() + RouterComparison(0, 0, 0, *self.differing().tolist())

    def replayed(self) -> RouterComparison:
        """Return the rows, pairs and choices of `comparison`, which the host knows; the others are 0."""
        layers = sum(hook.missed_T is not None for hook in self._hooks)
        rows = int(self._routes.valid_T.sum()) if layers else 0
        return RouterComparison(rows, rows * layers, rows * layers * self._routes.top_k)

    def differing(self) -> Int[Tensor, " 3"]:
        """Return the pairs, rows and choices of `comparison` that differ, on the device: nobody waits for them here."""
        missed = [hook.missed_T for hook in self._hooks if hook.missed_T is not None]
        if not missed:
            return torch.zeros(3, dtype=torch.int64)
        missed_LT = torch.stack(missed)
        differs_LT = missed_LT > 0
        return torch.stack([differs_LT.sum(), differs_LT.any(0).sum(), missed_LT.sum()])

    def _routes_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return (experts `[T, L, K]`, valid `[T]`) on a device, moving all layers at once when it changes."""
        if self._valid_T.device != device:
            self._experts_TLK, self._valid_T = _on(device, self._experts_TLK), _on(device, self._valid_T)
        return self._experts_TLK, self._valid_T

    def _before_decoder(self, *_: Any) -> None:
        if not is_recompute():
            self._with_grad = torch.is_grad_enabled()

    def _after_decoder(self, _decoder: nn.Module, _args: Any, output: Any) -> None:
        """Register `_begin_backward` on the output, which gradients reach before any layer recomputes.

        So a pass without a backward pass has no effect, and each of several passes in flight checks its own routes.
        """
        if is_recompute():
            return
        awaits_L = [hook.awaits for hook in self._hooks]
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(partial(_begin_backward, self._routes, self._hooks[0].site.module, awaits_L))

    def _leave_device(self) -> None:
        """Drop the device's copy of the routes now: hooks and replay hold each other until garbage is collected."""
        self._experts_TLK, self._valid_T = self._routes.experts_TLK, self._routes.valid_T

    def _check_consumption(self) -> None:
        """Raise TraceError unless all layers ran equally often: one forward pass, one backward pass, or both."""
        first, backward = self._hooks[0], any(hook.recomputes for hook in self._hooks)
        for hook in self._hooks:
            skipped = backward and hook.awaits and not hook.recomputes
            if hook.forwards != first.forwards or max(hook.forwards, hook.recomputes) > 1 or skipped:
                raise TraceError(
                    f"layer {hook.site.layer_id}: its routes were used by {hook.forwards} forward passes (layer "
                    f"{first.site.layer_id}: {first.forwards}) and {hook.recomputes} recomputations; allowed is at "
                    "most one each, the same for all layers: replay one micro-batch per context, forward and backward"
                )
        if not first.forwards and not self._backward_begun:
            raise TraceError(
                f"layer {first.site.layer_id}: its routes were used by 0 forward passes and 0 recomputations, so "
                "nothing was replayed: run the model that replay_routing was given inside the context, and let "
                "torch.compile trace it there first"
            )


class _RouterReplay:
    """Forward hook of one router: replaces its expert ids by recorded ones, and its gate weights by theirs."""

    def __init__(self, site: RouterSite, replay: RoutingReplay, position: int) -> None:
        self.site = site
        self.replay = replay
        self.position = position
        self.forwards = 0
        self.recomputes = 0
        self.awaits = False  # whether the backward pass of that forward will recompute this layer
        self.missed_T: Tensor | None = None  # replayed experts per row that the router itself would not have taken

    def __call__(self, _router: nn.Module, _args: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        native_TK = output[2]
        experts_TLK, valid_T = self.replay._routes_on(native_TK.device)
        if len(native_TK) != len(valid_T):
            raise TraceError(
                f"layer {self.site.layer_id}: its router sees {len(native_TK)} rows, the routes have {len(valid_T)}: "
                "build BatchRoutes from the attention mask or the packed length of exactly this batch"
            )
        self.replay._checks.compare(self.site, output)
        ids_TK = torch.where(valid_T.unsqueeze(1), experts_TLK[:, self.position].long(), native_TK)
        if is_recompute():
            if not self.replay._backward_begun:
                raise EngineError(
                    f"layer {self.site.layer_id}: activation checkpointing recomputes a forward pass that did not "
                    "replay the routes of this context: call backward() inside replay_routing over the routes of that "
                    "forward pass, the same BatchRoutes object, or outside if that forward pass was not replayed"
                )
            self.recomputes += 1
        else:
            self.forwards += 1
            self.awaits = awaits_recompute(output[0], with_grad=self.replay._with_grad)
            # Ids of a row differ, so two sets of one size are equal when every member of one is in the other.
            self.missed_T = (ids_TK.unsqueeze(2) != native_TK.unsqueeze(1)).all(2).sum(1)
        return (output[0], self.site.gates(output, ids_TK), ids_TK, *output[3:])


@contextmanager
def replay_routing(model: nn.Module, routes: BatchRoutes, weight_version: int | None = None) -> Iterator[RoutingReplay]:
    """Make every router of the model take the recorded experts for one micro-batch.

    Only the choice is replayed: weights come from the live logits under the model's own rule, so gradients reach the
    router. Rows that are not valid follow the router. Put the backward pass inside the context too; with activation
    checkpointing it recomputes the layers and needs the same routes. With several micro-batches in flight, enter a
    second context over the same `BatchRoutes` object around the backward pass alone.

    weight_version   version of the model's weights; samples recorded under another one are refused. None: not checked
    raises           EngineError for a model without known routers, a second replay inside this one, or (in backward) a
                     recomputation outside of a context over its routes; TraceError when the routes do not fit the
                     model, its version or the batch, when a layer did not use them exactly as often as the others, or
                     when none did

        with replay_routing(model, routes) as replay:
            loss(model(input_ids)).backward()
        replay.disagreement
    """
    sites = find_routers(model)
    for site in sites:
        if _open_replay(site.module):
            raise EngineError(
                f"router {site.name} is replaying already: leave the first replay_routing context of this model "
                "before entering another one"
            )
    _check_fit(routes, sites)
    if weight_version is not None:
        _check_versions(routes, weight_version)
    replay = RoutingReplay(sites, routes)
    decoder = decoder_of(model, sites[0])
    handles = [
        decoder.register_forward_pre_hook(replay._before_decoder),
        decoder.register_forward_hook(replay._after_decoder),
        *(hook.site.module.register_forward_hook(hook) for hook in replay._hooks),
    ]
    try:
        yield replay
    finally:
        for handle in handles:
            handle.remove()
        replay._leave_device()
    replay._checks.read()
    replay._check_consumption()


def _on(device: torch.device, routes: Tensor) -> Tensor:
    return upload(routes, device) if routes.is_cpu else routes.to(device)


def _open_replay(router: nn.Module) -> RoutingReplay | None:
    """Return the replay whose context is open around this router."""
    return next((hook.replay for hook in router._forward_hooks.values() if isinstance(hook, _RouterReplay)), None)


def _begin_backward(routes: BatchRoutes, router: nn.Module, awaits_L: list[bool], _grad: Tensor) -> None:
    """Check, as the backward pass of a replayed forward pass begins, that its routes are being replayed again."""
    replay = _open_replay(router)
    if replay is not None and replay._routes is routes:
        replay._backward_begun = True
        for hook, awaits in zip(replay._hooks, awaits_L, strict=True):
            hook.awaits = awaits
    elif any(awaits_L):
        active = "no replay is active" if replay is None else "the active replay is over other routes"
        raise EngineError(
            f"{type(router).__name__}: activation checkpointing recomputes a forward pass that was replayed, but "
            f"{active}: call backward() inside replay_routing over the routes of that forward pass, the same "
            "BatchRoutes object"
        )


def _check_fit(routes: BatchRoutes, sites: tuple[RouterSite, ...]) -> None:
    """Compare layers, experts and choices of the routes with those of the model."""
    wanted = [site.layer_id for site in sites]
    if list(routes.layer_ids) != wanted:
        missing = sorted(set(wanted) - set(routes.layer_ids))
        extra = sorted(set(routes.layer_ids) - set(wanted))
        if not missing:
            advice = (
                "drop the dense layers on import: "
                f"RoutingTrace.from_samples(..., layer_ids=range(N), moe_layers={wanted})"
            )
        elif list(routes.layer_ids) == list(range(len(wanted))):  # what from_samples counts by default
            advice = (
                f"if they were recorded with this model, say which layers they are: RoutingTrace.from_samples(..., "
                f"layer_ids={wanted}), or take_trace of the recorder"
            )
        else:
            advice = "record with the same model"
        raise TraceError(
            f"the routes hold layers {list(routes.layer_ids)}, the model has MoE layers {wanted}: missing {missing}, "
            f"extra {extra}; {advice}"
        )
    for position, site in enumerate(sites):
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
            _refuse_empty_capture(routes, site.layer_id, position)


def _check_versions(routes: BatchRoutes, weight_version: int) -> None:
    for sample, version in zip(routes.sample_ids, routes.weight_versions, strict=True):
        if version != weight_version:
            raise TraceError(
                f"sample {sample}: its routes were recorded under weight version {version}, the model has "
                f"{weight_version}: record it again under these weights, run it without replay, or leave "
                "weight_version out to replay old routes on purpose"
            )


def _refuse_empty_capture(routes: BatchRoutes, layer_id: int, position: int) -> None:
    """Raise TraceError for a layer that an engine left at zero; with top-2 or more `RoutingTrace.validate` does."""
    rows = routes.valid_T.nonzero().flatten()
    if len(rows) >= _SUSPICIOUS_ROWS and not routes.experts_TLK[rows, position].any():
        raise TraceError(
            f"layer {layer_id}: all {len(rows)} recorded rows, from {routes.name_row(int(rows[0]))} on, took expert 0, "
            "so the layer was never captured: check the recorder of this engine"
        )
