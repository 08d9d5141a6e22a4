"""`run_experts`: the experts of one layer on rows that are grouped by expert."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Integer
from numpy import ndarray
from torch import Tensor, nn


def run_experts(
    experts: nn.Module,
    rows_YH: Float[Tensor, "Y H"],
    counts_E: Integer[ndarray, " E"],
    result_YH: Float[Tensor, "Y H"],
) -> None:
    """Write the output of each row's expert, without gate weights, into `result_YH`.

    The steps are those of `transformers.integrations.moe`, whose interface says how a family stores and gates its
    experts; each expert runs once, on a view of its rows.

    experts    module with the experts interface of transformers
    rows_YH    first the rows of expert 0, then those of expert 1, and so on
    counts_E   rows of each expert; 0 is allowed
    """
    module: Any = experts
    first = 0
    for expert, count in enumerate(counts_E.tolist()):
        if count == 0:
            continue
        rows, result = rows_YH[first : first + count], result_YH[first : first + count]
        inner = _project(module, "gate_up_proj" if module.has_gate else "up_proj", rows, expert)
        inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
        weight = module.down_proj[expert]
        torch.mm(inner.to(weight.dtype), weight if module.is_transposed else weight.t(), out=result)
        if module.has_bias:
            result.add_(module.down_proj_bias[expert])
        if module.has_post_expert_norm:
            result.copy_(module.post_expert_norm(result))
        first += count


def _project(module: Any, name: str, rows: Tensor, expert: int) -> Tensor:
    weight = getattr(module, name)[expert]
    bias = getattr(module, f"{name}_bias")[expert] if module.has_bias else None
    return torch.nn.functional.linear(rows.to(weight.dtype), weight.t() if module.is_transposed else weight, bias)
