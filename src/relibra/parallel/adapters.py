"""LoRA (arXiv 2106.09685): trained low-rank products beside the frozen weights of linear layers and of experts.

W x becomes W x + s B (A x) with s = alpha / r, and no W + s B A is made: the frozen weight costs no gradient and no
copy. `add_adapters` swaps the classes of modules and keeps their names. A and B are float32 parameters of the module,
before the weight that they belong to. Those of experts are stacked as the experts are, `[E, r, in]` and `[E, out, r]`,
so plans push, return and move them as they do the experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional

from relibra.errors import ConfigError, EngineError
from relibra.parallel.grouped_product import run_sorted
from relibra.parallel.rows.sorted_rows import SortedRows
from relibra.replay.routers import DECODER_LAYER, find_routers

_DOWN, _UP = "lora_A", "lora_B"


class LoraLinear(nn.Linear):
    """A linear layer with `lora_A` `[r, in]` and `lora_B` `[out, r]`; `lora_scale` is s, 0: without them."""

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    lora_scale: float

    def forward(self, input: Float[Tensor, "... in"]) -> Float[Tensor, "... out"]:
        """Return W x + s B (A x)."""
        output = super().forward(input)
        if not self.lora_scale:
            return output
        low = functional.linear(input.to(self.lora_A.dtype), self.lora_A)
        return output + (self.lora_scale * functional.linear(low, self.lora_B)).to(output.dtype)


class LoraExperts(nn.Module):
    """Stacked experts, each with adapters of its own; `lora_scale` is s, 0: without them.

    It is the first base, before the experts class of a model family, whose forward it replaces by the grouped product.
    """

    num_experts: int
    lora_scale: float

    def forward(
        self,
        hidden_states: Float[Tensor, "T H"],
        top_k_index: Int64[Tensor, "T K"],
        top_k_weights: Float[Tensor, "T K"],
    ) -> Float[Tensor, "T H"]:
        """Return the weighted expert output of each token; experts are numbered as they lie in this module."""
        num_tokens, top_k = top_k_index.shape
        slot_Y, order_Y = torch.sort(top_k_index.flatten(), stable=True)
        slots_P = torch.arange(self.num_experts, device=slot_Y.device)
        rows = SortedRows(slot_Y, torch.searchsorted(slot_Y, slots_P, right=True, out_int32=True))
        weight_Y1 = top_k_weights.flatten()[order_Y].unsqueeze(1)
        output_YH = run_sorted(self, hidden_states[order_Y // top_k], rows, weight_Y1)
        return output_YH[order_Y.argsort()].view(num_tokens, top_k, hidden_states.shape[1]).sum(dim=1)


def add_adapters(model: nn.Module, rank: int, alpha: float) -> None:
    """Freeze a model, and give adapters to its experts and to the linear layers of its decoder layers, routers apart.

    Their values are undefined until `adapter_values.py` or a checkpoint sets them. Call it before the model is
    sharded.

    rank     r, a multiple of 8: the grouped product needs rows of 16 bytes
    raises   ConfigError for experts that are not stacked or have a product of their own, or if no layer gets adapters
    """
    model.requires_grad_(False)
    experts = _find_experts(model)
    linear_layers = list(_find_linear_layers(model, experts))
    for module in experts.values():
        module.__class__ = _with_adapters(type(module))  # type: ignore[arg-type]
        shapes: dict[str, tuple[int, ...]] = {}
        for name in expert_weights(module):
            num_experts, *sizes = getattr(module, name).shape
            inner, outer = sizes if module.is_transposed else reversed(sizes)
            shapes |= {f"{name}_{_DOWN}": (num_experts, rank, inner), f"{name}_{_UP}": (num_experts, outer, rank)}
        _register(module, shapes, alpha / rank)
    for module in linear_layers:
        module.__class__ = LoraLinear
        _register(module, {_DOWN: (rank, module.in_features), _UP: (module.out_features, rank)}, alpha / rank)
    if not experts and not linear_layers:
        raise ConfigError(
            f"lora.rank {rank} does not work with {type(model).__name__}: none of its layers has a linear layer or "
            "stacked experts; set lora.rank=0"
        )


def expert_weights(experts: nn.Module) -> tuple[str, str]:
    """Return the names of the weights of an experts module that have adapters."""
    return ("gate_up_proj" if experts.has_gate else "up_proj", "down_proj")


def is_adapter(name: str) -> bool:
    """Return whether a parameter of this name is an adapter."""
    return name.endswith((_DOWN, _UP))


def has_adapters(model: nn.Module) -> bool:
    """Return whether a model was given adapters."""
    return any(True for _ in adapted_modules(model))


def adapted_modules(model: nn.Module) -> Iterator[tuple[str, LoraLinear | LoraExperts]]:
    """Yield each module with adapters, by name."""
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear | LoraExperts):
            yield name, module


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Let a model compute without its adapters inside: the model that it was before training."""
    scales = [(module, module.lora_scale) for _, module in adapted_modules(model)]
    for module, _ in scales:
        module.lora_scale = 0.0
    try:
        yield
    finally:
        for module, scale in scales:
            module.lora_scale = scale


def merged(model: nn.Module, whole: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield whole parameters with W + s B A, in float32, in place of weights with adapters; others as they are.

    whole   parameters of the model by name, in its order and whole, experts in logical order
    """
    modules, waiting = dict(adapted_modules(model)), dict[str, Tensor]()
    for name, tensor in whole:
        module = modules.get(name.rpartition(".")[0])
        if is_adapter(name):
            waiting[name] = tensor.float()
            continue
        prefix = name.removesuffix("weight") if isinstance(module, LoraLinear) else f"{name}_"
        down, up = waiting.pop(prefix + _DOWN, None), waiting.pop(prefix + _UP, None)
        if module is None or down is None or up is None:
            yield name, tensor
            continue
        change = (up @ down).mul_(module.lora_scale)
        yield name, tensor.float() + (change.transpose(1, 2) if getattr(module, "is_transposed", False) else change)


def _find_experts(model: nn.Module) -> dict[str, Any]:
    """Return the modules of stacked experts by name; raise ConfigError for others."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        stacked = any(p.ndim == 3 for p in module.parameters(recurse=False)) and name.endswith("experts")
        lists = name.endswith("experts") and isinstance(module, nn.ModuleList)
        if lists or (stacked and not hasattr(module, "is_transposed")):
            raise ConfigError(
                f"lora.rank does not work with the experts of {type(model).__name__}: {name} "
                f"({type(module).__name__}) does not compute stacked weights by transformers' grouped product; set "
                "lora.rank=0, or use a model of another family"
            )
        if stacked:
            found[name] = module
    return found


def _find_linear_layers(model: nn.Module, experts: Mapping[str, Any]) -> Iterator[nn.Linear]:
    """Yield linear layers of decoder layers, except routers and those directly in an MoE block, which stay frozen."""
    blocks, routers = {name.rpartition(".")[0] for name in experts}, tuple[str, ...]()
    with suppress(EngineError):  # a dense model, or unknown routers, which `blocks` leaves out
        routers = tuple(f"{site.name}." for site in find_routers(model))
    for name, module in model.named_modules():
        frozen = name.rpartition(".")[0] in blocks or f"{name}.".startswith(routers)
        if type(module) is nn.Linear and DECODER_LAYER.search(f"{name}.") and not frozen:
            yield module


@cache
def _with_adapters(experts_class: Any) -> Any:
    return type(f"Lora{experts_class.__name__}", (LoraExperts, experts_class), {})


def _register(module: Any, shapes: Mapping[str, tuple[int, ...]], scale: float) -> None:
    """Register float32 parameters of these shapes before those that the module has."""
    device, own = next(module.parameters()).device, dict(module._parameters)
    module._parameters.clear()
    for name, shape in shapes.items():
        module.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=torch.float32, device=device)))
    module._parameters.update(own)
    module.lora_scale = scale
