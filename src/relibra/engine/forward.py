"""`Forward`: a pass of a model over new tokens and a KV cache; its experts are in this process or elsewhere."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from relibra.engine.kv_cache import SlottedCache
from relibra.replay import RoutingRecorder
from relibra.replay.forward_cache import CACHE_NAME


@runtime_checkable
class Forward(Protocol):
    """Runs a model."""

    def __call__(
        self, input_BN: Int[Tensor, "B N"], mask_BC: Bool[Tensor, "B C"], cache: SlottedCache, *, last: int = 1
    ) -> tuple[Float[Tensor, "B Z V"], Tensor | None]:
        """Return the logits of the last columns and the routes `[B * N, L, K]`; the cache has the tokens then.

        mask_BC   columns of the cache, and then of the input, that hold tokens
        last      columns of logits; 0: all
        """
        ...


def local_forward(model: nn.Module, recorder: RoutingRecorder | None) -> Forward:
    """Return the pass of a whole model in this process; without a recorder it returns no routes."""
    device = next(model.parameters()).device

    def forward(
        input_BN: Int[Tensor, "B N"], mask_BC: Bool[Tensor, "B C"], cache: SlottedCache, *, last: int = 1
    ) -> tuple[Float[Tensor, "B Z V"], Tensor | None]:
        logits_BZV = run_model(model, input_BN.to(device), mask_BC.to(device), cache, last)
        return logits_BZV, recorder.take()[0].cpu() if recorder else None

    return forward


def run_model(
    model: Any, input_BN: Int[Tensor, "B N"], mask_BC: Bool[Tensor, "B C"], cache: SlottedCache, last: int
) -> Float[Tensor, "B Z V"]:
    """Return the logits of the last columns."""
    width = input_BN.shape[1]
    if width == 1:
        position_BN = mask_BC.sum(dim=1, keepdim=True) - 1
    else:
        position_BN = (mask_BC.cumsum(dim=1) - 1).clamp(min=0)[:, -width:]
    output = model(
        input_ids=input_BN,
        attention_mask=mask_BC.long(),
        position_ids=position_BN,
        use_cache=True,
        logits_to_keep=last,
        **{CACHE_NAME: cache.for_model},
    )
    if not cache.can_join:
        cache.made_by_model = output[CACHE_NAME]
    return output.logits
