"""The grouped product of transformers (`experts_implementation="grouped_mm"`, its default) on rows that are sorted.

Its own forward sorts the rows by expert, gathers them and puts the results back: two copies of all rows, which here
arrive by expert already. `run_sorted` does the rest of it with the module's own parts. Experts with another
implementation or a forward of their own keep it (`BalancedEP.run_rows`).

In bfloat16 on a CPU, oneDNN compiles a kernel for each number of rows, which takes 1 to 2 ms and 0.7 MiB that stay. So
the product of transformers is replaced there by one that multiplies whole blocks of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad
from transformers.integrations import moe

from relibra.parallel.rows.sorted_rows import SortedRows

BLOCK = 64
"""Rows of a block."""


def is_grouped(forward: Callable[..., Tensor]) -> bool:
    """Return whether a forward method of an experts module computes the grouped product of transformers now.

    It does where `use_experts_implementation` made the method, and the registry from which that chooses for the
    configuration of the module says so; either may change while a model lives.
    """
    function, experts = getattr(forward, "__func__", None), getattr(forward, "__self__", None)
    if function is None or function.__globals__ is not vars(moe):
        return False
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    if "experts_interface" not in cells:
        return False
    name = getattr(getattr(experts, "config", None), "_experts_implementation", None)
    chosen = None if name is None else cells["experts_interface"].cell_contents.get(name, None)
    return chosen is moe.grouped_mm_experts_forward


def run_sorted(
    experts: nn.Module, rows_YH: Float[Tensor, "Y H"], rows: SortedRows, weight_Y1: Float[Tensor, "Y 1"]
) -> Float[Tensor, "Y H"]:
    """Return the weighted results of rows, each of one expert; the same as `grouped_mm_experts_forward`.

    Experts with adapters (`adapters.py`) add theirs.
    """
    module: Any = experts
    scale = getattr(module, "lora_scale", 0.0)

    def linear(name: str, input_YX: Tensor) -> Tensor:
        bias = getattr(module, f"{name}_bias")[rows.slot_Y] if module.has_bias else None
        output_YX: Tensor = moe._grouped_linear(
            input_YX, getattr(module, name), rows.ends_P, bias, module.is_transposed
        )
        if not scale:
            return output_YX
        low_YR = moe._grouped_linear(input_YX, getattr(module, f"{name}_lora_A"), rows.ends_P)
        change_YX = moe._grouped_linear(low_YR, getattr(module, f"{name}_lora_B"), rows.ends_P)
        return output_YX + (scale * change_YX).to(output_YX.dtype)

    if module.has_gate:
        inner_YX = module._apply_gate(linear("gate_up_proj", rows_YH))
    else:
        inner_YX = module.act_fn(linear("up_proj", rows_YH))
    output_YH = linear("down_proj", inner_YX)
    if module.has_post_expert_norm:
        output_YH = module.post_expert_norm(output_YH)
    weighted_YH: Tensor = (output_YH * weight_Y1).to(rows_YH.dtype)
    return weighted_YH


def grouped_mm(
    input: Float[Tensor, "Y X"], weight: Float[Tensor, "P X Z"], offs: Int[Tensor, " P"]
) -> Float[Tensor, "Y Z"]:
    """Return the product of the rows Y of each expert, X values in and Z out; `offs` has the end of the rows of each.

    Takes the arguments of the function of transformers that it replaces.
    """
    narrow = type(input) is Tensor and input.is_cpu and weight.dtype == torch.bfloat16
    if not narrow or torch.compiler.is_compiling():
        return _grouped_mm(input, weight, offs)
    product: Tensor = _BlockProduct.apply(input.to(weight.dtype), weight, offs)
    return product


_grouped_mm = moe._grouped_mm
moe._grouped_mm = grouped_mm


class _BlockProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input_YX: Tensor, weight_PXZ: Tensor, ends_P: Tensor) -> Tensor:
        """Return the product; rows behind the last end are 0."""
        ctx.save_for_backward(input_YX, weight_PXZ)
        ends = ends_P.tolist()
        ctx.rows_P = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        output_YZ = input_YX.new_zeros(len(input_YX), weight_PXZ.shape[2])
        for p, rows in enumerate(ctx.rows_P):
            if rows.stop > rows.start:
                output_YZ[rows] = (_blocks(input_YX[rows]) @ weight_PXZ[p])[: rows.stop - rows.start]
        return output_YZ

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_YZ: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """Return the gradients; what blocks are filled up with adds 0."""
        input_YX, weight_PXZ = ctx.saved_tensors
        grad_input_YX = torch.zeros_like(input_YX) if ctx.needs_input_grad[0] else None
        grad_weight_PZX = torch.zeros_like(weight_PXZ.mT) if ctx.needs_input_grad[1] else None
        for p, rows in enumerate(ctx.rows_P):
            if rows.stop == rows.start:
                continue
            blocks_YZ = _blocks(grad_YZ[rows])
            if grad_input_YX is not None:
                grad_input_YX[rows] = (blocks_YZ @ weight_PXZ[p].T)[: rows.stop - rows.start]
            if grad_weight_PZX is not None:
                grad_weight_PZX[p] = blocks_YZ.T @ _blocks(input_YX[rows])
        return grad_input_YX, None if grad_weight_PZX is None else grad_weight_PZX.mT, None


def _blocks(rows_YX: Tensor) -> Tensor:
    """Return rows with zeros behind them, up to a whole number of blocks."""
    return pad(rows_YX, (0, 0, 0, -len(rows_YX) % BLOCK))
