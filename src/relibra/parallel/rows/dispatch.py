"""Dispatch and combine: send rows to the ranks that compute them, and their results back.

Sizes and orders are known before the layer runs, so no counts are exchanged and the host never waits for the device.
Two differentiable pairs; the backward pass of each exchange is the reverse exchange:

tokens    a token goes to a rank once and is copied there for each of its experts; results are weighted and added there,
          and one row comes back, in one or two hops (`relays.py`). Used by fast sums
choices   a token, and backward the gradient of its result, goes to a rank once (without `TokenRows`: per choice); a row
          per token-slot comes back and is added on the token's rank, in the order of its choices, so that no sum
          depends on which rank computed what. Used by canonical sums

Rows `[Y, H]` to compute are ordered by local slot, source rank and position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from relibra.parallel.rows.exchange import AllToAll, exchange
from relibra.parallel.rows.row_lists import Hop, RowLists


def dispatch_tokens(
    lists: RowLists, choices: AllToAll, hidden_TH: Float[Tensor, "T H"], weights_TK: Float[Tensor, "T K"]
) -> tuple[Float[Tensor, "Z H"], Float[Tensor, "Y 1"]]:
    """Return the rows that this rank computes, and the gate weights of the planned ones; collective.

    Live rows in `lists` lie among the planned ones, by slot; `exchange_choices` returns their weights.

    choices   exchange of one row per token-slot; hops take group, place and recorder from it
    raises    EngineError when a peer is gone or the group's time-out has passed
    """
    return _send_tokens(lists, choices, hidden_TH), _send_weights(lists, choices, weights_TK)


def combine_tokens(
    lists: RowLists, choices: AllToAll, outputs: Sequence[Float[Tensor, "_ H"]], num_tokens: int
) -> Float[Tensor, "T H"]:
    """Return the results of this rank's tokens from weighted results of rows; the reverse of `dispatch_tokens`.

    outputs   consecutive parts of the computed rows
    """
    tokens = lists.tokens
    assert tokens is not None, "fast sums have lists of `prepare_rows`"
    num_copied = num_tokens if tokens.by_node_X is None else len(tokens.by_node_X)
    # How many rows each hop starts with, and last how many the final hop brought.
    num_rows = [num_copied, *(sum(hop.sizes.receive_R) for hop in tokens.hops)]
    rows_XH = _Sum.apply(tokens.arrived_Y, num_rows.pop(), *outputs)
    for hop in reversed(tokens.hops):
        rows_XH = _Sum.apply(hop.index_X, num_rows.pop(), _exchange_hop(rows_XH, hop, choices, back=True))
    return rows_XH if tokens.by_node_X is None else _Sum.apply(tokens.by_node_X, num_tokens, rows_XH)


def dispatch_choices(
    lists: RowLists, choices: AllToAll, hidden_TH: Float[Tensor, "T H"], top_k: int
) -> Float[Tensor, "Y H"]:
    """Return the rows that this rank computes; collective, raises as `dispatch_tokens`."""
    rows_YH: Tensor = _DispatchChoices.apply(hidden_TH, top_k, lists, choices)
    return rows_YH


def combine_choices(
    lists: RowLists, choices: AllToAll, output_YH: Float[Tensor, "Y H"], weights_TK: Float[Tensor, "T K"]
) -> Float[Tensor, "T H"]:
    """Return the weighted results of this rank's tokens from results of rows; the reverse of `dispatch_choices`."""
    output_TH: Tensor = _CombineChoices.apply(output_YH, weights_TK, lists, choices)
    return output_TH


class _DispatchChoices(torch.autograd.Function):
    """Copy tokens to the rows that are computed; gradients of the K rows of a token are added in their order."""

    @staticmethod
    def forward(ctx: Any, hidden_TH: Tensor, top_k: int, lists: RowLists, choices: AllToAll) -> Tensor:
        ctx.lists, ctx.choices, ctx.shape_TK = lists, choices, (len(hidden_TH), top_k)
        return _send_tokens(lists, choices, hidden_TH, top_k)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _return_choices(ctx.lists, ctx.choices, gradients[0], ctx.shape_TK).sum(dim=1), None, None, None


class _CombineChoices(torch.autograd.Function):
    """Weight and add a token's results in the order of its choices; ranks that compute rows weight their gradients."""

    @staticmethod
    def forward(ctx: Any, output_YH: Tensor, weights_TK: Tensor, lists: RowLists, choices: AllToAll) -> Tensor:
        output_TKH = _return_choices(lists, choices, output_YH, weights_TK.shape)
        ctx.lists, ctx.choices = lists, choices
        ctx.save_for_backward(output_TKH, weights_TK)
        return (output_TKH * weights_TK.unsqueeze(-1)).sum(dim=1).to(output_YH.dtype)  # weights may be wider

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        output_TKH, weights_TK = ctx.saved_tensors
        rows_YH = _send_tokens(ctx.lists, ctx.choices, gradients[0], weights_TK.shape[1])
        of_output_YH = rows_YH * _send_weights(ctx.lists, ctx.choices, weights_TK)
        of_weights_TK = (gradients[0].unsqueeze(1).to(of_output_YH.dtype) * output_TKH).sum(dim=-1)
        return of_output_YH.to(output_TKH.dtype), of_weights_TK.to(weights_TK.dtype), None, None


def _send_tokens(lists: RowLists, choices: AllToAll, rows_TH: Tensor, top_k: int = 0) -> Tensor:
    """Return the rows `[Y, H]` that this rank computes; collective.

    top_k   choices of a token; needed where `lists.tokens` is None, and a row is sent for each choice
    """
    if lists.tokens is None:
        arrived_XH = exchange(rows_TH.index_select(0, lists.choice_X // top_k), choices)
        return arrived_XH.index_select(0, lists.compute_order_Y)
    by_node_X = lists.tokens.by_node_X
    rows_XH: Tensor = rows_TH if by_node_X is None else _Gather.apply(rows_TH, by_node_X)
    for hop in lists.tokens.hops:
        rows_XH = _exchange_hop(_Gather.apply(rows_XH, hop.index_X), hop, choices)
    rows_YH: Tensor = _Gather.apply(rows_XH, lists.tokens.arrived_Y)
    return rows_YH


def _send_weights(lists: RowLists, choices: AllToAll, weights_TK: Tensor) -> Tensor:
    """Return the gate weights `[Y, 1]` of the planned rows that this rank computes; collective."""
    weights_X1 = weights_TK.reshape(-1, 1)
    select = _Permute if len(lists.choice_X) == len(weights_X1) else _Gather  # some rows may not be planned
    weight_X1 = exchange(select.apply(weights_X1, lists.choice_X), replace(choices, label="gate weights"))
    weight_Y1: Tensor = _Permute.apply(weight_X1, lists.compute_order_Y)
    return weight_Y1


def _return_choices(lists: RowLists, choices: AllToAll, rows_YH: Tensor, shape_TK: Sequence[int]) -> Tensor:
    """Return the computed rows `[T, K, H]` of this rank's tokens, 0 where none is planned; collective."""
    back_XH = exchange(rows_YH.index_select(0, _inverse(lists.compute_order_Y)), choices.back)
    rows_XH = back_XH.new_zeros((shape_TK[0] * shape_TK[1], back_XH.shape[1]))
    return rows_XH.index_copy_(0, lists.choice_X.long(), back_XH).unflatten(0, tuple(shape_TK))


def _exchange_hop(rows_XH: Tensor, hop: Hop, choices: AllToAll, *, back: bool = False) -> Tensor:
    """Exchange the copied rows of a hop, or with `back` their results; collective."""
    sizes = replace(choices, **hop.sizes._asdict())
    return exchange(rows_XH, sizes.back if back else sizes)


class _Gather(torch.autograd.Function):
    """Select rows by index, with repetition; gradients of a row are summed in float32 or wider."""

    @staticmethod
    def forward(ctx: Any, rows_ZH: Tensor, index_Y: Tensor) -> Tensor:
        ctx.save_for_backward(index_Y)
        ctx.num_rows = len(rows_ZH)
        return rows_ZH.index_select(0, index_Y)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (index_Y,) = ctx.saved_tensors
        return _add_up(gradients, index_Y, ctx.num_rows), None


class _Sum(torch.autograd.Function):
    """Sum the rows of each index, in float32 or wider; rows may come in parts. The reverse of `_Gather`."""

    @staticmethod
    def forward(ctx: Any, index_Y: Tensor, num_rows: int, *parts: Tensor) -> Tensor:
        ctx.save_for_backward(index_Y)
        ctx.lengths = [len(part) for part in parts]
        return _add_up(parts, index_Y, num_rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (index_Y,) = ctx.saved_tensors
        return None, None, *gradients[0].index_select(0, index_Y).split(ctx.lengths)


def _add_up(parts: Sequence[Tensor], index_Y: Tensor, num_rows: int) -> Tensor:
    """Return sums of the rows of all parts, in their order."""
    wide = torch.promote_types(parts[0].dtype, torch.float32)
    sums_ZH = torch.zeros((num_rows, parts[0].shape[1]), dtype=wide, device=parts[0].device)
    start = 0
    for part_XH in parts:
        sums_ZH.index_add_(0, index_Y[start : start + len(part_XH)], part_XH.to(wide))
        start += len(part_XH)
    return sums_ZH.to(parts[0].dtype)


class _Permute(torch.autograd.Function):
    """Reorder rows. The backward pass of plain indexing would add row by row, because an index could repeat."""

    @staticmethod
    def forward(ctx: Any, rows_XH: Tensor, order_X: Tensor) -> Tensor:
        ctx.save_for_backward(order_X)
        return rows_XH.index_select(0, order_X)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].index_select(0, _inverse(ctx.saved_tensors[0])), None


def _inverse(order_X: Tensor) -> Tensor:
    inverse_X = torch.empty_like(order_X)
    inverse_X[order_X] = torch.arange(len(order_X), device=order_X.device, dtype=order_X.dtype)
    return inverse_X
