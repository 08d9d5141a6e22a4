"""`ExecutedPlan` of a model, and `PlannedMicroBatch`: what a rank prepares before the first layer runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32, Int64
from torch import Tensor, nn

from relibra.errors import EngineError
from relibra.parallel.agreement import Agreement
from relibra.parallel.balanced import BalancedEP
from relibra.parallel.fallback import agree_on_micro_batch, routes_fit
from relibra.parallel.group_state import GroupState
from relibra.parallel.preparation import PreparedStep
from relibra.parallel.replicas.push_schedule import PushSchedule
from relibra.parallel.replicas.replica_slots import ReplicaSlots
from relibra.parallel.rows.prepared_rows import RowKinds
from relibra.parallel.rows.row_lists import RowLists
from relibra.parallel.rows.sorted_rows import slot_ends
from relibra.planning.plan import StepPlan
from relibra.planning.traffic.rank_tables import RankTables
from relibra.replay import BatchRoutes
from relibra.routing.demand import Demand, ScheduledDemand
from relibra.timeline import TimelineRecorder


@dataclass(frozen=True, kw_only=True, eq=False)
class ExecutedPlan:
    """A plan, the model that executes it, and this rank's part in it.

    layers      of the model, by position in the plan
    layer_ids   their decoder layers; a plan that is not followed may have others
    source      plan and demand as the user gave them; `plan` has replicas in the slots where they are executed
    demand      under the schedule of the plan; None: the plan is not followed, every expert runs at home
    chunk       token-slots of a chunk of canonical sums (`canonical.py`); None: fast sums
    routes      of micro-batches that are prepared ahead, in the order in which they run
    """

    model: nn.Module
    layers: Sequence[BalancedEP]
    layer_ids: Sequence[int]
    source: tuple[StepPlan, Demand]
    plan: StepPlan
    demand: ScheduledDemand | None
    slots: ReplicaSlots
    chunk: int | None
    agreement: Agreement
    recorder: TimelineRecorder
    routes: Mapping[int, BatchRoutes | None]

    @contextmanager
    def preparing(self, *, first_prepared: bool) -> Iterator[None]:
        """Prepare micro-batches inside, the first one at once if its routes are known; collective.

        first_prepared   all ranks have prepared the first one already
        """
        if self.demand is None:
            yield
            return
        step = PreparedStep(
            source=self.source, plan=self.plan, demand=self.demand, chunk=self.chunk, recorder=self.recorder
        )
        with self.state.preparation.of_step(step):
            if self.routes and not first_prepared:
                self.state.preparation.start(*next(iter(self.routes.items())))
            yield

    def holds(self, number: int, routes: BatchRoutes | None) -> bool:
        """Return whether this rank has prepared a micro-batch with these routes, or is doing so."""
        return self.state.preparation.holds(*self.source, self.chunk, number, routes)

    @property
    def state(self) -> GroupState:
        """Return the state of the group."""
        return self.slots.state

    def micro_batch_after(self, number: int) -> int | None:
        """Return the micro-batch that is prepared after this one; None: the routes of no later one are known."""
        order = list(self.routes)
        here = order.index(number) if number in self.routes else len(order)
        return order[here + 1] if here + 1 < len(order) else None


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedMicroBatch:
    """Tables, row lists and pushes of all layers, and which rows of the batch are planned.

    tables_L, lists_L, ends_L   by position of the layer; ends as in `SortedRows`, on the device
    routes              of this rank; None: it has no sample here, and all its rows are filler
    kinds               planned and live rows of this rank; None: all are planned
    live_apart          live rows of any rank are computed in an exchange of their own, in which all ranks take part
    canonical           whether sums have an order that no plan changes (`canonical.py`)
    """

    tables_L: Sequence[RankTables]
    lists_L: Sequence[RowLists]
    ends_L: Sequence[Int32[Tensor, " P"]]
    pushes: PushSchedule
    routes: BatchRoutes | None
    kinds: RowKinds | None
    live_apart: bool
    canonical: bool

    def kinds_of(self, num_rows: int, position: int) -> RowKinds | None:
        """Return the planned and live rows of this rank; None: all are planned.

        raises   EngineError when the layer sees another number of rows than the routes have
        """
        if self.routes is not None and len(self.routes.valid_T) != num_rows:
            raise EngineError(
                f"{self.tables_L[position].place}: the routes have {len(self.routes.valid_T)} rows, "
                f"the layer sees {num_rows}: pass micro_batch the BatchRoutes of exactly this batch"
            )
        return self.kinds

    def check_choices(self, position: int, experts_TK: Int64[Tensor, "T K"]) -> None:
        """Compare the choices of the router with the routes; on an accelerator only their number, which needs no sync.

        raises   EngineError: the replay did not reach this layer, or something changed its choices
        """
        tables, kinds = self.tables_L[position], self.kinds
        if experts_TK.is_cpu:
            planned_XK = experts_TK if kinds is None else experts_TK[kinds.planned_X]
            actual_E = np.bincount(planned_XK.flatten(), minlength=len(tables.tokens_E))
            wrong = not np.array_equal(actual_E, tables.tokens_E)
        else:
            num_planned = len(experts_TK) if kinds is None else len(kinds.planned_X)
            wrong = num_planned * experts_TK.shape[1] != tables.tokens_E.sum()
        if wrong:
            raise EngineError(
                f"{tables.place}: the layer does not follow the recorded routes that the plan was made for: run the "
                "model that execute_plan was given, and do not change what its routers choose"
            )


def prepare_micro_batch(executed: ExecutedPlan, number: int, routes: BatchRoutes | None) -> PlannedMicroBatch | None:
    """Return tables, row lists and pushes of a micro-batch; None: it does not follow the plan. Collective.

    Rows that are not prepared yet are prepared now, those of the next micro-batch beside this one.

    raises   EngineError when ranks are in different micro-batches or modes, or when a peer is gone
    """
    state, preparation = executed.state, executed.state.preparation
    following = executed.micro_batch_after(number)
    prepared, next_prepared = agree_on_micro_batch(
        executed.agreement,
        number,
        training=executed.model.training,
        passes=executed.slots.digest(),
        prepared=executed.holds(number, routes),
        next_prepared=following is None or executed.holds(following, executed.routes[following]),
    )
    executed.slots.end_pass()
    if executed.demand is None:
        return None
    if not prepared:
        preparation.start(number, routes)
    rows = preparation.wait_for(number)
    if following is not None and not next_prepared:
        preparation.start(following, executed.routes[following])  # may drop what was kept of this one
    if not routes_fit(rows):
        return None
    pushes = PushSchedule(
        slots=executed.slots,
        tables_L=rows.tables_L,
        homes_L=[layer.homes for layer in executed.layers],
        may_push_early=executed.layers[0].homes_stay_whole,
        recorder=executed.recorder,
    )
    kinds = None if rows.kinds is None else rows.kinds.on(state.device)
    return PlannedMicroBatch(
        tables_L=rows.tables_L,
        lists_L=rows.lists_on(state.device, kinds),
        ends_L=slot_ends(rows.tables_L, state.device),
        pushes=pushes,
        routes=routes,
        kinds=kinds,
        live_apart=any(rows.live_R) and not rows.live_travel_along,
        canonical=executed.chunk is not None,
    )
