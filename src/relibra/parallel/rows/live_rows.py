"""Live rows: rows without recorded routes in a planned micro-batch, in the exchange of its planned rows.

Which experts they choose is known only when the layer runs, so nobody can say which ranks need them. Few of them (such
as last tokens of samples) go to every rank, behind planned rows: sizes follow from their number, which ranks exchange
when they prepare the micro-batch. Each rank computes the choices whose experts are at home there.

Live balancing (`balance_live`) has none: there the routes of all rows are counted before any row travels.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, Int32, Int64
from numpy import ndarray
from torch import Tensor

from relibra.parallel.rows.exchange import AllToAll, exchange

MOST_SHARE = 1 / 32
"""Live rows that a rank receives / planned rows of the mean rank, at most. An accelerator computes all choices that it
receives, masked: which of them are its own is known on the device only."""


class LiveRows(NamedTuple):
    """Live rows of a layer on one rank, on the device.

    own_V       index of each in the batch of this rank
    arrived_A   index of each live row of any rank among the rows that arrive
    live_R      live rows of each rank
    """

    own_V: Int[Tensor, " V"]
    arrived_A: Int[Tensor, " A"]
    live_R: list[int]


class LiveSlots(NamedTuple):
    """Choices of live rows that this rank computes; on an accelerator all that arrive, those of others with weight 0.

    arrived_Y   index of the row among the rows that arrived
    slot_Y      local slot of the expert
    weight_Y1   gate weight
    """

    arrived_Y: Int[Tensor, " Y"]
    slot_Y: Int[Tensor, " Y"]
    weight_Y1: Float[Tensor, "Y 1"]


def may_join(live_R: Int64[ndarray, " R"], planned_R: Int64[ndarray, " R"]) -> bool:
    """Return whether the live rows of a micro-batch are so few that they go to every rank."""
    return 0 < int(live_R.sum()) <= MOST_SHARE * float(planned_R.mean())


def join_tokens(
    arrived_Y: Int32[ndarray, " Y"],
    receive_R: Int64[ndarray, " R"],
    token_Z: Int32[ndarray, " Z"],
    send_R: Int64[ndarray, " R"],
    live_V: Int64[ndarray, " V"],
    live_R: Int64[ndarray, " R"],
) -> tuple[Int64[ndarray, " Y"], Int64[ndarray, " X"], Int64[ndarray, " A"]]:
    """Return `arrived_Y` renumbered, rows that go out, arrived live rows: those of a rank lie behind its planned ones.

    arrived_Y, receive_R   arrived row of each planned row that is computed here, and how many come from each rank
    token_Z, send_R        planned rows that go out, and how many to each rank
    live_V                 live rows of the batch of this rank
    live_R                 live rows of each rank
    """
    end_R, before_R = np.cumsum(receive_R), np.cumsum(live_R) - live_R
    source_Y = np.searchsorted(end_R, arrived_Y, side="right")
    first_R = (end_R + before_R).tolist()
    arrived_A = [np.arange(first, first + live) for first, live in zip(first_R, live_R.tolist(), strict=True)]
    pieces = [piece for tokens in np.split(token_Z, np.cumsum(send_R)[:-1]) for piece in (tokens, live_V)]
    return arrived_Y + before_R[source_Y], np.concatenate(pieces), np.concatenate(arrived_A)


def exchange_choices(
    live: LiveRows,
    experts_TK: Int64[Tensor, "T K"],
    weights_TK: Float[Tensor, "T K"],
    position_E: Int64[Tensor, " E"] | None,
    num_homes: int,
    sizes: AllToAll,
) -> LiveSlots:
    """Return the choices of live rows that this rank computes; collective, differentiable in the weights.

    position_E   of each logical expert; None: they are in logical order
    sizes        an exchange of the layer, for its group and place
    """
    R, rank = len(live.live_R), sizes.place.rank
    of_rows = replace(sizes, send_R=[len(live.own_V)] * R, receive_R=live.live_R, label="choices of live rows")
    experts_AK = of_rows.move(experts_TK.index_select(0, live.own_V).repeat(R, 1))
    weights_AK = exchange(weights_TK.index_select(0, live.own_V).repeat(R, 1), of_rows)
    position_AK = experts_AK if position_E is None else position_E[experts_AK]
    slot_Y, weight_Y1 = position_AK.flatten() - rank * num_homes, weights_AK.reshape(-1, 1)
    arrived_Y = live.arrived_A.repeat_interleave(experts_AK.shape[1])
    is_here_Y = (slot_Y >= 0) & (slot_Y < num_homes)
    if experts_TK.is_cpu:
        own_Y = is_here_Y.nonzero().flatten()
        return LiveSlots(arrived_Y[own_Y], slot_Y[own_Y], weight_Y1.index_select(0, own_Y))
    return LiveSlots(arrived_Y, slot_Y.where(is_here_Y, 0), weight_Y1.where(is_here_Y.unsqueeze(1), 0))
