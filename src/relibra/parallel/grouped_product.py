"""The grouped product of transformers (`experts_implementation="grouped_mm"`, its default) on rows that are sorted.

Its own forward sorts the rows by expert, gathers them and puts the results back: two copies of all rows, which here
arrive by expert already. `run_sorted` does the rest of it with the module's own parts. Experts with another
implementation or a forward of their own keep it (`BalancedEP.run_rows`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn
from transformers.integrations import moe

from relibra.parallel.rows.sorted_rows import SortedRows


def is_grouped(forward: Callable[..., Tensor]) -> bool:
    """Return whether a forward method of an experts module computes the grouped product of transformers now.

    It does where transformers' `use_experts_implementation` made the method, and its registry has the grouped product
    for the configuration of the module; either may change while a model lives.
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
        low_YX = moe._grouped_linear(input_YX, getattr(module, f"{name}_lora_A"), rows.ends_P)
        change_YX = moe._grouped_linear(low_YX, getattr(module, f"{name}_lora_B"), rows.ends_P)
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
