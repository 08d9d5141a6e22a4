"""Gate rules: the weights that a router gives to chosen experts, one pure function per rule.

Replay fixes which experts a token takes; their weights are computed from the live logits, so that gradients reach the
router (R3, arXiv 2510.11370). A selection bias or a group limit only affects the choice: no rule here uses them, and
every rule gathers from the full score row. (Scores masked by group would turn an expert off.)

`x_TE`: router logits; `ids_TK`: chosen experts; `dtype`: type of the router's weights. Each rule repeats the operations
of the model in the same order and precision: native ids give native weights bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

GateRule = Callable[[Tensor, Tensor, torch.dtype], Tensor]
"""`(x_TE, ids_TK, dtype) -> weights_TK`, differentiable in `x_TE`."""


def softmax_gates(
    x_TE: Float[Tensor, "T E"],
    ids_TK: Int64[Tensor, "T K"],
    dtype: torch.dtype,
    *,
    norm: bool,
    eps: float = 0.0,
    scale: float = 1.0,
    inner: torch.dtype | None = torch.float32,
) -> Float[Tensor, "T K"]:
    """Return the softmax over all experts at the chosen ids.

    norm    divide by the sum of the chosen + `eps`
    scale   constant factor of the routed experts
    inner   precision of the softmax; None: that of the logits
    """
    chosen_TK = torch.softmax(x_TE, dim=-1, dtype=inner).gather(1, ids_TK)
    return _normalised(chosen_TK, dtype, norm, eps, scale)


def topk_softmax_gates(
    x_TE: Float[Tensor, "T E"], ids_TK: Int64[Tensor, "T K"], dtype: torch.dtype, *, inner: torch.dtype | None = None
) -> Float[Tensor, "T K"]:
    """Return the softmax over the chosen logits only; `inner` as in `softmax_gates`."""
    return torch.softmax(x_TE.gather(1, ids_TK), dim=-1, dtype=inner).to(dtype)


def score_gates(
    x_TE: Float[Tensor, "T E"],
    ids_TK: Int64[Tensor, "T K"],
    dtype: torch.dtype,
    *,
    norm: bool,
    score: Callable[[Tensor], Tensor] = torch.sigmoid,
    eps: float = 0.0,
    scale: float = 1.0,
    inner: torch.dtype | None = None,
) -> Float[Tensor, "T K"]:
    """Return an elementwise score (sigmoid, root of softplus) at the chosen ids; arguments as in `softmax_gates`."""
    chosen_TK = score(x_TE if inner is None else x_TE.to(inner)).gather(1, ids_TK)
    return _normalised(chosen_TK, dtype, norm, eps, scale)


def floored_softmax_gates(
    x_TE: Float[Tensor, "T E"], ids_TK: Int64[Tensor, "T K"], dtype: torch.dtype, *, floor: float
) -> Float[Tensor, "T K"]:
    """Return the softmax over all experts at the chosen ids, divided by their sum, or by `floor` if that is greater."""
    chosen_TK = torch.softmax(x_TE, dim=-1, dtype=torch.float32).gather(1, ids_TK)
    return (chosen_TK / chosen_TK.sum(dim=-1, keepdim=True).clamp(min=floor)).to(dtype)


def rescaled_gates(
    p_TE: Float[Tensor, "T E"], ids_TK: Int64[Tensor, "T K"], dtype: torch.dtype, *, router: nn.Module
) -> Float[Tensor, "T K"]:
    """Return renormalised probabilities times a learned factor per expert; the router returns `p_TE`, not logits.

    The factor is read from the router at each call: FSDP swaps the parameter between sharded and whole.
    """
    chosen_TK = p_TE.gather(1, ids_TK)
    scale_E: Any = router.per_expert_scale
    return (chosen_TK / chosen_TK.sum(dim=-1, keepdim=True) * scale_E[ids_TK]).to(dtype)


def _normalised(chosen_TK: Tensor, dtype: torch.dtype, norm: bool, eps: float, scale: float) -> Tensor:
    if norm:
        chosen_TK = chosen_TK / (chosen_TK.sum(dim=-1, keepdim=True) + eps)
    # Cast before scaling: under autocast most models divide in place, which rounds the quotient to the narrow type.
    return chosen_TK.to(dtype) * scale
