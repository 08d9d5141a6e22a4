"""Dispatch and combine: rows to the rank and slot that the plan says, and their results back.

Sizes and orders come from `RankTables`, so no counts are exchanged and the host never waits for the device. What is
computed here is differentiable; each collective of the forward pass has its mirror image in the backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int64
from torch import Tensor

from relibra.errors import EngineError
from relibra.parallel.rank_tables import RankTables


@dataclass(frozen=True, kw_only=True, eq=False)
class Dispatched:
    """Rows that arrived on this rank, and the way back.

    rows_YH       in the order of computation: by local slot, source rank, position
    slot_Y        local slot of each row, homes first
    sent_from_X   which token-slot (row of [T, K], flattened) went out X-th
    """

    rows_YH: Float[Tensor, "Y H"]
    slot_Y: Int64[Tensor, " Y"]
    sent_from_X: Int64[Tensor, " X"]
    compute_order_Y: Int64[Tensor, " Y"]
    send_sizes: list[int]
    receive_sizes: list[int]
    group: dist.ProcessGroup


def dispatch(
    tables: RankTables, hidden_TH: Float[Tensor, "T H"], experts_TK: Int64[Tensor, "T K"], group: dist.ProcessGroup
) -> Dispatched:
    """Send every token-slot of this rank to its instance; collective over the expert-parallel group.

    experts_TK   logical ids; they have passed `check_routes`
    """
    device, top_k = hidden_TH.device, experts_TK.shape[1]
    by_expert_X = torch.argsort(experts_TK.flatten(), stable=True)
    sent_from_X = by_expert_X[torch.from_numpy(tables.send_order_X).to(device, non_blocking=True)]
    compute_order_Y = torch.from_numpy(tables.compute_order_Y).to(device, non_blocking=True)
    send_sizes, receive_sizes = tables.send_RP.sum(axis=1).tolist(), tables.receive_RP.sum(axis=1).tolist()
    arrived_YH = _Exchange.apply(hidden_TH[sent_from_X // top_k], receive_sizes, send_sizes, group)
    return Dispatched(
        rows_YH=_Permute.apply(arrived_YH, compute_order_Y),
        slot_Y=torch.from_numpy(tables.slot_Y).to(device, non_blocking=True),
        sent_from_X=sent_from_X,
        compute_order_Y=compute_order_Y,
        send_sizes=send_sizes,
        receive_sizes=receive_sizes,
        group=group,
    )


def combine(
    dispatched: Dispatched, output_YH: Float[Tensor, "Y H"], weights_TK: Float[Tensor, "T K"]
) -> Float[Tensor, "T H"]:
    """Bring the results back to the ranks that sent the rows; weigh and add them there, in the order of choices."""
    arrived_YH = _Permute.apply(output_YH, _inverse(dispatched.compute_order_Y))
    back_XH = _Exchange.apply(arrived_YH, dispatched.send_sizes, dispatched.receive_sizes, dispatched.group)
    output_TKH = _Permute.apply(back_XH, _inverse(dispatched.sent_from_X)).view(*weights_TK.shape, output_YH.shape[1])
    return (output_TKH * weights_TK.unsqueeze(-1)).sum(dim=1)


def check_routes(tables: RankTables, actual_E: Int64[Tensor, " E"]) -> None:
    """Hold the token-slots per expert of this rank against the plan; waits for the device.

    raises   EngineError at the first expert that differs
    """
    planned_E = torch.from_numpy(tables.tokens_E)
    wrong = (planned_E != actual_E.cpu()).nonzero().flatten().tolist()
    if wrong:
        raise EngineError(
            f"layer {tables.layer_id}, micro-batch {tables.micro_batch}, rank {tables.rank}: expert {wrong[0]} was "
            f"planned to get {planned_E[wrong[0]]} token-slots from this rank and gets {actual_E[wrong[0]]} "
            f"({len(wrong)} of {len(planned_E)} experts differ): replay the routes that the plan was made for, on the "
            "rank and in the micro-batch of its schedule, and pass rows without routes as not valid"
        )


class _Exchange(torch.autograd.Function):
    """All-to-all of rows with known sizes; gradients take the way back."""

    @staticmethod
    def forward(
        ctx: Any, rows_XH: Tensor, receive_sizes: list[int], send_sizes: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.sizes, ctx.group = (receive_sizes, send_sizes), group
        return _all_to_all(rows_XH, receive_sizes, send_sizes, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        receive_sizes, send_sizes = ctx.sizes
        return _all_to_all(gradients[0], send_sizes, receive_sizes, ctx.group), None, None, None


def _all_to_all(rows: Tensor, receive_sizes: list[int], send_sizes: list[int], group: dist.ProcessGroup) -> Tensor:
    received = rows.new_empty((sum(receive_sizes), rows.shape[1]))
    dist.all_to_all_single(received, rows.contiguous(), receive_sizes, send_sizes, group=group)
    return received


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
