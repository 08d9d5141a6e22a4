"""`RowLists`: which rows of a layer travel, and in which order; `prepared_rows.py` makes those of a micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int, Int32
from numpy import ndarray
from torch import Tensor

from relibra.parallel.rows.exchange import Stage
from relibra.parallel.rows.live_rows import LiveRows
from relibra.planning.traffic.rank_tables import RankTables


class HopSizes(NamedTuple):
    """Sizes of one exchange of rows in a layer.

    send_R, receive_R   rows to and from each rank
    all_stay            no rank sends a row to another, as every rank knows
    stage               as it is recorded
    """

    send_R: list[int]
    receive_R: list[int]
    all_stay: bool
    stage: Stage


class Hop(NamedTuple):
    """One exchange of rows on their way to the ranks that compute them: rows are copied, and the copies are sent.

    index_X   row that is copied as the X-th, by destination: a row of the batch, or of the copies that
              `TokenRows.by_node_X` makes, or of what the hop before brought
    sizes     of the exchange
    """

    index_X: Int32[Tensor, " X"]
    sizes: HopSizes


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenRows:
    """Rows that travel when each token goes to a rank once.

    by_node_X   row of the batch that is copied as the X-th before the first hop: each once per node that needs it, by
                node. So results are added per (token, node) first, as relays add them; None: nothing is copied. Set
                for flat dispatch on several nodes
    hops        two with relays (`relays.py`), else one
    arrived_Y   index of the row, among those that the last hop brought, that is the input of the Y-th computed row
    """

    by_node_X: Int32[Tensor, " X"] | None
    hops: Sequence[Hop]
    arrived_Y: Int32[Tensor, " Y"]


@dataclass(frozen=True, kw_only=True, eq=False)
class RowLists:
    """Indices of the rows of one layer that this rank sends and computes, on the device.

    choice_X          token-slot (index into `[T, K]`, flattened) sent as the X-th: by destination, local slot, position
    compute_order_Y   arrived token-slot (by source, local slot, position) that is computed Y-th
    slot_Y            local slot of the Y-th computed row
    tokens            set when each token goes to a rank once; None: one row per token-slot
    live              rows without recorded routes that travel behind the planned ones; None: there are none
    """

    choice_X: Int32[Tensor, " X"]
    compute_order_Y: Int32[Tensor, " Y"]
    slot_Y: Int32[Tensor, " Y"]
    tokens: TokenRows | None = None
    live: LiveRows | None = None

    def with_live(self, arrived_X: Int[Tensor, " X"], order_Y: Int[Tensor, " Y"]) -> RowLists:
        """Return the lists with these arrived rows as inputs of further rows.

        order_Y   for each computed row its index among the further rows followed by the others
        """
        assert self.tokens is not None, "live rows travel with tokens that are sent once"
        arrived_Y = torch.cat([arrived_X, self.tokens.arrived_Y]).index_select(0, order_Y)
        return replace(self, tokens=replace(self.tokens, arrived_Y=arrived_Y))


def row_lists(tables: RankTables, experts_TK: Int[ndarray, "T K"], device: torch.device) -> RowLists:
    """Return the row lists of a layer in which each token-slot is a row.

    experts_TK   logical ids that the rows of this rank chose, as many of each as the tables count
    """
    choice_X = np.argsort(experts_TK, axis=None, kind="stable")[tables.send_order_X]
    return RowLists(
        choice_X=_on(device, choice_X),
        compute_order_Y=_on(device, tables.compute_order_Y),
        slot_Y=_on(device, tables.slot_Y),
    )


def _on(device: torch.device, numbers: ndarray) -> Tensor:
    return torch.from_numpy(numbers.astype(np.int32)).to(device, non_blocking=True)
