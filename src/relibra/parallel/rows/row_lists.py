"""`RowLists`: which rows of a layer travel, and in which order; `prepared_rows.py` makes those of a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Int, Int32
from numpy import ndarray
from torch import Tensor

from relibra.parallel.rows.live_rows import LiveRows
from relibra.planning.traffic.rank_tables import RankTables


@dataclass(frozen=True, kw_only=True, eq=False)
class SendOnce:
    """Rows that travel when each token goes to a rank once: one row Z per (destination, token).

    token_Z     row of the batch sent as the Z-th, in the order of destination and token
    send_R      rows to each destination
    receive_R   rows from each source
    arrived_Y   index of the arrived row (in the order of source and token) that is the input of the Y-th computed row
    """

    token_Z: Int32[Tensor, " Z"]
    send_R: list[int]
    receive_R: list[int]
    arrived_Y: Int32[Tensor, " Y"]


@dataclass(frozen=True, kw_only=True, eq=False)
class RowLists:
    """Indices of the rows of one layer that this rank sends and computes, on the device.

    choice_X          token-slot (index into `[T, K]`, flattened) sent as the X-th: by destination, local slot, position
    compute_order_Y   arrived token-slot (by source, local slot, position) that is computed Y-th
    slot_Y            local slot of the Y-th computed row
    once              what is sent when each token goes to a rank once; None: one row per token-slot
    live              rows without recorded routes that travel behind the planned ones; None: there are none
    """

    choice_X: Int32[Tensor, " X"]
    compute_order_Y: Int32[Tensor, " Y"]
    slot_Y: Int32[Tensor, " Y"]
    once: SendOnce | None = None
    live: LiveRows | None = None

    def with_first(self, arrived_X: Int[Tensor, " X"]) -> RowLists:
        """Return the lists with these arrived rows as inputs of rows that are computed before all others."""
        assert self.once is not None, "live rows travel with tokens that are sent once"
        return replace(self, once=replace(self.once, arrived_Y=torch.cat([arrived_X, self.once.arrived_Y])))


def row_lists(tables: RankTables, experts_TK: Int[ndarray, "T K"], device: torch.device) -> RowLists:
    """Return the row lists of a layer in which each token-slot is a row.

    experts_TK   logical ids of the rows of this rank, with the counts of the tables
    """
    choice_X = np.argsort(experts_TK, axis=None, kind="stable")[tables.send_order_X]
    return RowLists(
        choice_X=_on(device, choice_X),
        compute_order_Y=_on(device, tables.compute_order_Y),
        slot_Y=_on(device, tables.slot_Y),
    )


def _on(device: torch.device, numbers: ndarray) -> Tensor:
    return torch.from_numpy(numbers.astype(np.int32)).to(device, non_blocking=True)
