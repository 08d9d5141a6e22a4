"""Routes of a generation batch: recorded in a forward pass of the trainer, or those of the engine that sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Integer
from numpy import ndarray
from torch import Tensor, nn

from relibra.errors import TraceError
from relibra.replay import find_routers, record_routing
from relibra.routing.trace import RoutingTrace

EngineRoutes = Callable[[list[list[int]]], Sequence[ndarray]]
"""Returns the routes `[n, L, K]` or `[n - 1, L, K]` of each sample of this rank, for its tokens: prompt, completion."""


def record_routes(
    model: nn.Module, input_ids_BN: Integer[Tensor, "B N"], mask_BN: Integer[Tensor, "B N"], rows_at_once: int
) -> RoutingTrace:
    """Return the routes that the model takes now, by a forward pass without gradients; collective.

    rows_at_once   samples per pass
    """
    training = model.training
    model.eval()  # no dropout, and no activation checkpointing, which would warn without gradients
    try:
        with torch.no_grad(), record_routing(model) as recorder:
            for ids, mask in zip(input_ids_BN.split(rows_at_once), mask_BN.split(rows_at_once), strict=True):
                model(input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=1)
            return recorder.take_trace(input_ids_BN, mask_BN, source="TRL, a pass before training")
    finally:
        model.train(training)


def read_engine_routes(
    engine: EngineRoutes,
    model: nn.Module,
    input_ids_BN: Integer[Tensor, "B N"],
    mask_BN: Integer[Tensor, "B N"],
    *,
    cut: bool,
) -> RoutingTrace:
    """Return the routes of the engine that sampled, checked against the model and the tokens.

    cut      rows beyond the tokens are dropped: those of completions that TRL masks because they were truncated
    raises   TraceError when rows do not fit the tokens, or ids are illegal
    """
    sites = find_routers(model)
    tokens = [ids[mask != 0].tolist() for ids, mask in zip(input_ids_BN.cpu(), mask_BN.cpu(), strict=True)]
    arrays = [np.asarray(experts) for experts in engine(tokens)]
    if len(arrays) != len(tokens):
        raise TraceError(f"engine_routes returned routes of {len(arrays)} samples for {len(tokens)}: one array each")
    for s, (experts, own) in enumerate(zip(arrays, tokens, strict=True)):
        most = len(experts) if cut else len(own)
        if experts.ndim != 3 or not len(own) - 1 <= len(experts) <= most:
            raise TraceError(
                f"engine_routes returned an array of shape {experts.shape} for sample {s} of {len(own)} tokens: "
                f"[rows, layers, choices] with {len(own) - 1} rows (all tokens but the last) or {len(own)}"
            )
    arrays = [experts[: len(own)] for experts, own in zip(arrays, tokens, strict=True)]
    return RoutingTrace.from_samples(
        arrays,
        num_experts=sites[0].num_experts,
        layer_ids=[site.layer_id for site in sites],
        tokens=[np.array(own[: len(experts)]) for experts, own in zip(arrays, tokens, strict=True)],
        source="TRL, engine_routes",
    )
