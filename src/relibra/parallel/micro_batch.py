"""`PlannedMicroBatch`: all that one rank knows of a micro-batch before its first layer runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Int, Int64
from numpy import ndarray
from torch import Tensor

from relibra.errors import EngineError
from relibra.parallel.rows.rank_tables import RankTables
from relibra.parallel.rows.row_lists import RowLists, exchange_row_lists, row_lists
from relibra.replay import BatchRoutes


class Rows(NamedTuple):
    """Rows of a batch with recorded routes, and the others.

    planned_P, live_Q   numbers of the rows
    back_T              where each row is found among the planned ones followed by the live ones
    """

    planned_P: Int64[Tensor, " P"]
    live_Q: Int64[Tensor, " Q"]
    back_T: Int64[Tensor, " T"]


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedMicroBatch:
    """Tables and row lists of all layers, and which rows of the batch they are about.

    tables_L, lists_L   by position of the layer
    routes              of this rank; None: it has no sample here, and all its rows are live
    any_live            whether any rank has rows without recorded routes: then all take part in their exchange
    """

    number: int
    tables_L: Sequence[RankTables]
    lists_L: Sequence[RowLists]
    routes: BatchRoutes | None
    any_live: bool
    device: torch.device

    def rows(self, num_rows: int, layer: int) -> Rows | None:
        """Return the planned and the live rows of this rank; None: all are planned, on every rank.

        raises   EngineError when the layer sees another number of rows than the routes have
        """
        tables = self.tables_L[layer]
        if self.routes is not None and len(self.routes.valid_T) != num_rows:
            raise EngineError(
                f"{tables.place}: the routes have {len(self.routes.valid_T)} rows, "
                f"the layer sees {num_rows}: pass micro_batch the BatchRoutes of exactly this batch"
            )
        if not self.any_live:
            return None
        if self.routes is None:
            all_T = torch.arange(num_rows, device=self.device)
            return Rows(all_T[:0], all_T, all_T)
        return self._rows

    @cached_property
    def _rows(self) -> Rows:
        assert self.routes is not None, "only routes tell rows apart"
        valid_T = self.routes.valid_T.cpu()
        planned_P, live_Q = valid_T.nonzero().flatten(), (~valid_T).nonzero().flatten()
        back_T = torch.argsort(torch.cat([planned_P, live_Q]))
        return Rows(planned_P.to(self.device), live_Q.to(self.device), back_T.to(self.device))

    def check(self, layer: int, experts_PK: Int64[Tensor, "P K"]) -> None:
        """Hold what the router chose against the routes; on an accelerator only the number of rows, without waiting.

        raises   EngineError: the replay did not reach this layer, or something changed its choices
        """
        tables = self.tables_L[layer]
        actual_E = (
            np.bincount(experts_PK.flatten().cpu(), minlength=len(tables.tokens_E)) if experts_PK.is_cpu else None
        )
        if actual_E is None:
            wrong = experts_PK.numel() != tables.tokens_E.sum()
        else:
            wrong = len(actual_E) != len(tables.tokens_E) or (actual_E != tables.tokens_E).any()
        if wrong:
            raise EngineError(
                f"{tables.place}: the layer does not follow the recorded routes "
                "that the plan was made for: run the model that execute_plan was given, and do not change what its "
                "routers choose"
            )


def recorded(routes: BatchRoutes | None, num_layers: int) -> Int[ndarray, "P L K"]:
    """Return the logical ids of the rows with recorded routes."""
    if routes is None:
        return np.zeros((0, num_layers, 1), dtype=np.int64)
    return routes.experts_TLK[routes.valid_T].cpu().numpy()


def mismatch(tables_L: Sequence[RankTables], experts_PLK: Int[ndarray, "P L K"]) -> str | None:
    """Say where the routes of a rank first differ from what was planned; None: nowhere."""
    for layer, tables in enumerate(tables_L):
        planned_E = tables.tokens_E
        actual_E = np.bincount(experts_PLK[:, layer].ravel(), minlength=len(planned_E))
        if len(actual_E) > len(planned_E):
            return f"layer {tables.layer_id} chooses expert {len(actual_E) - 1}, the plan has {len(planned_E)} experts"
        wrong = np.flatnonzero(planned_E != actual_E)
        if len(wrong):
            e = wrong[0]
            return (
                f"in layer {tables.layer_id} expert {e} was planned to get {planned_E[e]} token-slots from this rank "
                f"and gets {actual_E[e]} ({len(wrong)} of {len(planned_E)} experts differ)"
            )
    return None


def make_row_lists(
    tables_L: Sequence[RankTables],
    experts_PLK: Int[ndarray, "P L K"],
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    once: bool,
) -> list[RowLists]:
    """Make the row lists of all layers; collective over the group if tokens are sent once."""
    if once:
        return exchange_row_lists(tables_L, experts_PLK, group, device)
    return [row_lists(tables, experts_PLK[:, layer], device) for layer, tables in enumerate(tables_L)]
