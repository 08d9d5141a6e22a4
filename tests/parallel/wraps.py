"""What people put around a model before they train it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

RANK = 2


class LoraLinear(nn.Module):
    """A linear layer with an adapter, as PEFT makes it."""

    def __init__(self, base_layer: nn.Linear, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.base_layer = base_layer.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(RANK, base_layer.in_features, generator=generator) * 0.1)
        self.lora_B = nn.Parameter(torch.randn(base_layer.out_features, RANK, generator=generator) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + x @ self.lora_A.T @ self.lora_B.T


class ExpertsWrapper(nn.Module):
    """An adapter around an experts module: PEFT puts one there for `target_parameters`."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.Parameter(torch.zeros(RANK, 4))

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.base_layer(*inputs)


def compiled(model: nn.Module) -> nn.Module:
    model.compile(backend="aot_eager")
    return model


def reentrant(model: nn.Module) -> nn.Module:
    model.gradient_checkpointing_enable({"use_reentrant": True})
    return model


def adapted_attention(model: nn.Module) -> nn.Module:
    model.requires_grad_(False)
    for seed, layer in enumerate(model.model.layers):
        layer.self_attn.q_proj = LoraLinear(layer.self_attn.q_proj, seed)
    return model


def wrapped_experts(model: nn.Module) -> nn.Module:
    model.model.layers[1].mlp.experts = ExpertsWrapper(model.model.layers[1].mlp.experts)
    return model


def adapted_experts(model: nn.Module) -> nn.Module:
    model.model.layers[1].mlp.experts.lora_A = nn.Parameter(torch.zeros(4, RANK, 8))
    return model


def eager_experts(model: nn.Module) -> nn.Module:
    model.set_experts_implementation("eager")
    return model


def batched_experts(model: nn.Module) -> nn.Module:
    model.set_experts_implementation("batched_mm")
    return model


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "compiled": compiled,
    "reentrant": reentrant,
    "adapted attention": adapted_attention,
    "wrapped experts": wrapped_experts,
    "adapted experts": adapted_experts,
    "eager experts": eager_experts,
    "batched experts": batched_experts,
}

SAME_MATHS = ("compiled", "reentrant", "eager experts", "batched experts")
"""Of them those that the reference goes without."""


def wrapped(model: nn.Module, wrap: str) -> nn.Module:
    return WRAPS[wrap](model) if wrap else model
