"""`PlannedMicroBatch`: what one rank prepares of a micro-batch before its first layer runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int, Int64
from numpy import ndarray
from torch import Tensor, nn

from relibra.errors import EngineError
from relibra.parallel.agreement import Agreement
from relibra.parallel.balanced import BalancedEP
from relibra.parallel.canonical import CHUNK
from relibra.parallel.fallback import MicroBatchMode, agree_on_micro_batch, find_route_mismatch
from relibra.parallel.replicas.push_schedule import PushSchedule
from relibra.parallel.replicas.replica_slots import GroupState
from relibra.parallel.replicas.resident_slots import Residents
from relibra.parallel.rows.row_lists import RowLists, exchange_row_lists, row_lists
from relibra.planning.plan import StepPlan
from relibra.planning.traffic.rank_tables import RankTables, rank_tables
from relibra.replay import BatchRoutes
from relibra.routing.demand import ScheduledDemand
from relibra.timeline import TimelineRecorder


@dataclass(frozen=True, kw_only=True, eq=False)
class ExecutedPlan:
    """A plan, the model that executes it, and this rank's part in it.

    layers      of the model, by position in the plan
    demand      under the schedule of the plan; None: the plan is not followed, every expert runs at home
    residents   resident slots of this rank; None: the plan has none, or is not followed
    canonical   whether sums have an order that no plan changes (`canonical.py`)
    """

    model: nn.Module
    layers: Sequence[BalancedEP]
    plan: StepPlan
    demand: ScheduledDemand | None
    residents: Residents | None
    canonical: bool
    agreement: Agreement
    state: GroupState
    recorder: TimelineRecorder

    def tables(self, micro_batch: int, position: int) -> RankTables:
        """Return the tables of this rank in a micro-batch and layer."""
        assert self.demand is not None, "a plan that is not followed has no tables"
        chunk = CHUNK if self.canonical else None
        return rank_tables(self.plan, self.demand, self.state.rank, micro_batch, position, chunk)


class Rows(NamedTuple):
    """Rows of a batch with recorded routes (planned), and rows that the router decides on (live).

    planned_X, live_Y   indices of rows
    back_T              undoes `cat(planned, live)`
    """

    planned_X: Int64[Tensor, " X"]
    live_Y: Int64[Tensor, " Y"]
    back_T: Int64[Tensor, " T"]


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedMicroBatch:
    """Tables, row lists and pushes of all layers, and which rows of the batch are planned.

    tables_L, lists_L   by position of the layer
    routes              of this rank; None: it has no sample here, and all its rows are live
    any_live            whether any rank has live rows: then all ranks take part in their exchange
    canonical           whether sums have an order that no plan changes (`canonical.py`)
    """

    tables_L: Sequence[RankTables]
    lists_L: Sequence[RowLists]
    pushes: PushSchedule
    routes: BatchRoutes | None
    any_live: bool
    canonical: bool
    device: torch.device

    def rows(self, num_rows: int, position: int) -> Rows | None:
        """Return the planned and the live rows of this rank; None: all are planned, on every rank.

        raises   EngineError when the layer sees another number of rows than the routes have
        """
        if self.routes is not None and len(self.routes.valid_T) != num_rows:
            raise EngineError(
                f"{self.tables_L[position].place}: the routes have {len(self.routes.valid_T)} rows, "
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
        assert self.routes is not None, "without routes all rows are live"
        valid_T = self.routes.valid_T.cpu()
        planned_X, live_Y = valid_T.nonzero().flatten(), (~valid_T).nonzero().flatten()
        back_T = torch.argsort(torch.cat([planned_X, live_Y]))
        return Rows(planned_X.to(self.device), live_Y.to(self.device), back_T.to(self.device))

    def check_choices(self, position: int, experts_XK: Int64[Tensor, "X K"]) -> None:
        """Compare the choices of the router with the routes; on an accelerator only their number, which needs no sync.

        raises   EngineError: the replay did not reach this layer, or something changed its choices
        """
        tables = self.tables_L[position]
        if experts_XK.is_cpu:
            actual_E = np.bincount(experts_XK.flatten(), minlength=len(tables.tokens_E))
            wrong = not np.array_equal(actual_E, tables.tokens_E)
        else:
            wrong = experts_XK.numel() != tables.tokens_E.sum()
        if wrong:
            raise EngineError(
                f"{tables.place}: the layer does not follow the recorded routes that the plan was made for: run the "
                "model that execute_plan was given, and do not change what its routers choose"
            )


def prepare_micro_batch(executed: ExecutedPlan, number: int, routes: BatchRoutes | None) -> PlannedMicroBatch | None:
    """Return tables, row lists and pushes of a micro-batch; None: it does not follow the plan. Collective.

    raises   EngineError when ranks are in different micro-batches or modes, or when a peer is gone
    """
    tables_L, problem, positions = [], None, range(len(executed.layers))
    experts_XLK = _recorded_experts(routes, len(positions))
    if executed.demand is not None:
        tables_L = [executed.tables(number, position) for position in positions]
        fits = routes is None or list(routes.layer_ids) == executed.plan.layer_ids.tolist()
        problem = find_route_mismatch(tables_L, experts_XLK) if fits else "they are of other layers"
    any_live = routes is None or not bool(routes.valid_T.all())
    state = executed.state
    passes = 0 if executed.residents is None else executed.residents.residency.digest()
    mode = MicroBatchMode(training=executed.model.training, passes=passes, problem=problem, any_live=any_live)
    agreed = agree_on_micro_batch(executed.agreement, number, mode)
    if state.slots is not None:
        state.slots.invalidate()
    if executed.demand is None or not agreed.routes_fit:
        return None
    pushes = PushSchedule(
        state=state,
        num_shared=executed.plan.slots - executed.plan.resident_slots,
        residents=executed.residents,
        tables_L=tables_L,
        homes_L=[layer.homes for layer in executed.layers],
        homes_early=executed.layers[0].homes_stay_whole,
        recorder=executed.recorder,
    )
    return PlannedMicroBatch(
        tables_L=tables_L,
        lists_L=_make_row_lists(executed, tables_L, experts_XLK),
        pushes=pushes,
        routes=routes,
        any_live=agreed.any_live,
        canonical=executed.canonical,
        device=state.device,
    )


def _recorded_experts(routes: BatchRoutes | None, num_layers: int) -> Int[ndarray, "X L K"]:
    """Return the logical experts of the rows with recorded routes."""
    if routes is None:
        return np.zeros((0, num_layers, 1), dtype=np.int64)
    return routes.experts_TLK[routes.valid_T].cpu().numpy()


def _make_row_lists(
    executed: ExecutedPlan, tables_L: Sequence[RankTables], experts_XLK: Int[ndarray, "X L K"]
) -> list[RowLists]:
    """Return the row lists of all layers; collective for fast sums, which send tokens once."""
    if executed.canonical:
        return [row_lists(tables, experts_XLK[:, n], executed.state.device) for n, tables in enumerate(tables_L)]
    return exchange_row_lists(tables_L, experts_XLK, executed.state.group, executed.state.device)
