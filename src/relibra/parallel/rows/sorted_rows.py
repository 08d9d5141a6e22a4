"""`SortedRows`: which local slot computes each row of a rank, and where the rows of each slot end, on the device.

Rows lie by slot. Tables say how many each slot gets, so the host does not wait for the device, and rows are sorted
again only where live ones join them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int, Int32
from torch import Tensor

from relibra.planning.traffic.rank_tables import RankTables
from relibra.replay.device_copies import upload


class SortedRows(NamedTuple):
    """Rows in ascending order of consecutive slots.

    slot_Y   slot of each row, from 0
    ends_P   index of the row behind the last one of each slot
    """

    slot_Y: Int[Tensor, " Y"]
    ends_P: Int32[Tensor, " P"]

    def of(self, slots: slice, rows: slice) -> SortedRows:
        """Return the rows of some of the slots, numbered from 0.

        rows   of these slots, as the host knows them
        """
        return SortedRows(self.slot_Y[rows] - slots.start, self.ends_P[slots] - rows.start)

    def with_live(self, slot_V: Int[Tensor, " V"], num_homes: int, num_home_rows: int) -> tuple[SortedRows, Tensor]:
        """Return these rows and live rows, merged by slot on the device, which alone knows the slots of live rows.

        slot_V          slot of each live row, all of experts at home
        num_homes       slots of experts at home; they come first
        num_home_rows   rows in them, without the live ones
        returns         the rows, and for each its index in (live rows, then these rows), `[V + Y]`
        """
        at_home = torch.cat([slot_V.to(self.slot_Y.dtype), self.slot_Y[:num_home_rows]])
        slot_X, order_X = torch.sort(at_home, stable=True)
        homes_P = torch.arange(num_homes, device=slot_X.device, dtype=slot_X.dtype)
        ends_P = torch.searchsorted(slot_X, homes_P, right=True, out_int32=True)
        rest_X = torch.arange(len(slot_X), len(slot_V) + len(self.slot_Y), device=order_X.device)
        rows = SortedRows(
            torch.cat([slot_X, self.slot_Y[num_home_rows:]]), torch.cat([ends_P, self.ends_P[num_homes:] + len(slot_V)])
        )
        return rows, torch.cat([order_X, rest_X])


def one_expert(num_rows: int, device: torch.device) -> SortedRows:
    """Return rows that one expert computes."""
    return SortedRows(
        torch.zeros(num_rows, dtype=torch.int32, device=device),
        torch.full((1,), num_rows, dtype=torch.int32, device=device),
    )


def slot_ends(tables_L: Sequence[RankTables], device: torch.device) -> tuple[Int32[Tensor, " P"], ...]:
    """Return `SortedRows.ends_P` of the computed rows of each layer, in one copy to the device."""
    rows_LP = np.stack([tables.receive_RP.sum(axis=0) for tables in tables_L])
    ends_LP = torch.from_numpy(rows_LP.cumsum(axis=1, dtype=np.int32))
    return upload(ends_LP, device).unbind()
