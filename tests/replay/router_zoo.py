"""Every router class of the installed transformers, built directly with a tiny configuration."""

from __future__ import annotations

import importlib
import inspect
import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers
from torch import Tensor, nn

EXPERTS, CHOICES, HIDDEN = 16, 4, 24
FLOAT_ONLY = {"Inkling2TopKRouter"}
"""Routers whose weights transformers keeps in fp32 whatever the model's type is."""


@cache
def modules_by_class() -> dict[str, str]:
    """Return class name -> module for all models, read from their source without importing them."""
    folder = Path(transformers.__file__).parent / "models"
    return {
        name: f"transformers.models.{path.parent.name}.{path.stem}"
        for path in sorted(folder.glob("*/modeling_*.py"))
        for name in re.findall(r"^class (\w+)\(", path.read_text(), re.MULTILINE)
    }


def tiny_router(name: str, *, norm: bool, dtype: torch.dtype, selection: str = "sigmoid", seed: int = 0) -> nn.Module:
    """Return a router of this class with random weights and, where it has one, a random selection bias."""
    config = SimpleNamespace(
        **dict.fromkeys(("num_experts", "num_local_experts", "moe_num_experts", "n_routed_experts"), EXPERTS),
        **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"), CHOICES),
        **dict.fromkeys(("routed_scaling_factor", "router_scaling_factor", "route_scale"), 2.5),
        hidden_size=HIDDEN,
        norm_topk_prob=norm,
        n_group=4,
        topk_group=2,
        topk_method="group_limited_greedy",
        expert_selection_fn=selection,
        scoring_func="sqrtsoftplus",
        moe_norm_min=1e-12,
        moe_num_shared_experts=1,
        moe_router_logit_softcapping=8.0,
        output_multiplier=0.5,
        rms_norm_eps=1e-6,
        use_expert_bias=True,
        zero_expert_num=None,
    )
    router = getattr(importlib.import_module(modules_by_class()[name]), name)(config)
    generator = torch.Generator().manual_seed(seed)
    for path, tensor in [*router.named_parameters(), *router.named_buffers()]:
        spread = 0.1 if "correction" in path or "statics" in path else 0.5
        tensor.data = torch.randn(tensor.shape, generator=generator) * spread + ("scale" in path)
    return router if name in FLOAT_ONLY else router.to(dtype)


def call_router(router: nn.Module, hidden_TH: Tensor) -> tuple[Tensor, ...]:
    """Call a router as its MoE block does: some take the selection bias as an argument, one wants a batch axis."""
    parameters = list(inspect.signature(router.forward).parameters)
    bias = [torch.linspace(-0.1, 0.1, EXPERTS)] if len(parameters) > 1 else []
    batched = hidden_TH.unsqueeze(0) if type(router).__name__ == "AfmoeTokenChoiceRouter" else hidden_TH
    return router(batched, *bias)


def hidden_states(rows: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    """Return random hidden states `[rows, HIDDEN]`."""
    return torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(dtype)
