"""Products of experts in bfloat16 on a CPU, in whole blocks of rows.

oneDNN compiles a kernel for each number of rows, which takes 1 to 2 ms and 0.7 MiB that stay.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad
from transformers.integrations import moe

BLOCK = 64
"""Rows of a block."""
_grouped_mm = moe._grouped_mm


def use_block_products() -> None:
    """Replace the grouped product of transformers in this process, which trains on a CPU."""
    moe._grouped_mm = grouped_mm


def grouped_mm(
    input: Float[Tensor, "Y X"], weight: Float[Tensor, "P X Z"], offs: Int[Tensor, " P"]
) -> Float[Tensor, "Y Z"]:
    """Return each row Y times its expert's matrix, X values in and Z out; `offs` has the end of each expert's rows.

    Takes the arguments of the function of transformers that it replaces.
    """
    narrow = type(input) is Tensor and input.is_cpu and weight.dtype == torch.bfloat16
    if not narrow or torch.compiler.is_compiling():
        return _grouped_mm(input, weight, offs)
    product: Tensor = _BlockProduct.apply(input.to(weight.dtype), weight, offs)
    return product


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
        """Return the gradients; the zeros that fill up blocks add nothing to them."""
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
