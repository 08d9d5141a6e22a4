"""Dispatch and combine: rows to the ranks that compute them, and their results back.

Sizes and orders are known before the layer runs, so no counts are exchanged and the host never waits for the device.
Two ways, each differentiable, each collective of the forward pass with its mirror image in the backward pass:

send-once    a token goes to a rank once and is expanded there; its results are weighted and added there, and one row
             comes back. The fast way
per choice   one row per token-slot in both directions; the sender weighs and adds in the order of choices, so that no
             sum depends on who computed what. The canonical way
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from relibra.parallel.rows.exchange import Route, exchange
from relibra.parallel.rows.rank_tables import RankTables
from relibra.parallel.rows.row_lists import RowLists
from relibra.timeline import TimelineRecorder

Compute = Callable[[Tensor, Tensor], Tensor]
"""Rows `[Y, H]` in the order of computation (local slot, source rank, position), and their weights `[Y, 1]`, to their
weighted results `[Y, H]`."""


def dispatch_and_combine(
    tables: RankTables,
    lists: RowLists,
    hidden_TH: Float[Tensor, "T H"],
    weights_TK: Float[Tensor, "T K"],
    group: dist.ProcessGroup,
    recorder: TimelineRecorder,
    compute: Compute,
) -> Float[Tensor, "T H"]:
    """Return the weighted results of this rank's tokens; collective over the expert-parallel group.

    weights_TK   gate weights of the token-slots, in the order of choices
    recorder     notes the exchanges
    compute      runs the experts of this rank on the rows that arrived
    raises       EngineError when a peer is gone or the group's time-out has passed
    """
    send_R, receive_R = tables.send_RP.sum(axis=1).tolist(), tables.receive_RP.sum(axis=1).tolist()
    choices = Route(send_R=send_R, receive_R=receive_R, group=group, place=tables.place, recorder=recorder)
    if lists.once is None:
        return _per_choice(lists, hidden_TH, weights_TK, choices, compute)
    once = lists.once
    rows = replace(choices, send_R=once.send_R, receive_R=once.receive_R)
    arrived_ZH = exchange(_Gather.apply(hidden_TH, once.token_Z), rows)
    weight_Y1 = exchange(_Permute.apply(weights_TK.reshape(-1, 1), lists.choice_X), choices)
    weight_Y1 = _Permute.apply(weight_Y1, lists.compute_order_Y)
    output_YH = compute(_Gather.apply(arrived_ZH, once.arrived_Y), weight_Y1)
    summed_ZH = _Sum.apply(output_YH, once.arrived_Y, len(arrived_ZH))
    return _Sum.apply(exchange(summed_ZH, rows.back), once.token_Z, len(hidden_TH))


def _per_choice(
    lists: RowLists, hidden_TH: Tensor, weights_TK: Tensor, choices: Route, compute: Compute
) -> Float[Tensor, "T H"]:
    hidden_TKH = hidden_TH.unsqueeze(1).expand(-1, weights_TK.shape[1], -1)  # backward adds K rows in their order
    arrived_YH = exchange(_Permute.apply(hidden_TKH.flatten(0, 1), lists.choice_X), choices)
    rows_YH = _Permute.apply(arrived_YH, lists.compute_order_Y)
    output_YH = compute(rows_YH, rows_YH.new_ones((len(rows_YH), 1)))
    back_XH = exchange(_Permute.apply(output_YH, _inverse(lists.compute_order_Y)), choices.back)
    output_TKH = _Permute.apply(back_XH, _inverse(lists.choice_X)).unflatten(0, weights_TK.shape)
    return (output_TKH * weights_TK.unsqueeze(-1)).sum(dim=1)


class _Gather(torch.autograd.Function):
    """Rows by number, any number of times; gradients of one row are added in single precision or better."""

    @staticmethod
    def forward(ctx: Any, rows_ZH: Tensor, number_Y: Tensor) -> Tensor:
        ctx.save_for_backward(number_Y)
        ctx.num_rows = len(rows_ZH)
        return rows_ZH.index_select(0, number_Y)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (number_Y,) = ctx.saved_tensors
        return _add_up(gradients[0], number_Y, ctx.num_rows), None


class _Sum(torch.autograd.Function):
    """The reverse of `_Gather`: each row is added to the row of its number."""

    @staticmethod
    def forward(ctx: Any, rows_YH: Tensor, number_Y: Tensor, num_rows: int) -> Tensor:
        ctx.save_for_backward(number_Y)
        return _add_up(rows_YH, number_Y, num_rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0].index_select(0, ctx.saved_tensors[0]), None, None


def _add_up(rows_YH: Tensor, number_Y: Tensor, num_rows: int) -> Tensor:
    wide = torch.promote_types(rows_YH.dtype, torch.float32)
    sums_ZH = torch.zeros((num_rows, rows_YH.shape[1]), dtype=wide, device=rows_YH.device)
    return sums_ZH.index_add_(0, number_Y, rows_YH.to(wide)).to(rows_YH.dtype)


class _Permute(torch.autograd.Function):
    """Rows in another order. Plain indexing would add up gradients row by row, as if rows could repeat."""

    @staticmethod
    def forward(ctx: Any, rows_XH: Tensor, order_X: Tensor) -> Tensor:
        ctx.save_for_backward(order_X)
        return rows_XH[order_X]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0][_inverse(ctx.saved_tensors[0])], None


def _inverse(order_X: Tensor) -> Tensor:
    inverse_X = torch.empty_like(order_X)
    inverse_X[order_X] = torch.arange(len(order_X), device=order_X.device)
    return inverse_X
