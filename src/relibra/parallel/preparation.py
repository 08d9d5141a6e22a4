"""`Preparation`: the rows of micro-batches, prepared in a thread and kept for the next pass over the same ones.

The thread has a process group of its own. All ranks ask for the same micro-batches in the same order, each time after
an agreement, so their messages meet; what is kept is used if all ranks have kept it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from relibra.parallel.rows.prepared_rows import PreparedRows, prepare_rows
from relibra.planning.plan import StepPlan
from relibra.planning.traffic.rank_tables import micro_batch_tables
from relibra.replay import BatchRoutes
from relibra.routing.demand import Demand, ScheduledDemand
from relibra.timeline import TimelineRecorder

KEPT_BYTES = 1 << 30
"""Most bytes of row lists that a rank keeps: the first micro-batches of a pass, and the one that runs. They take 12
bytes per token-slot and layer with canonical sums, up to 24 with fast ones."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PreparedStep:
    """What the micro-batches of a step are prepared from.

    source      plan and demand as the user gave them; rows are kept for these two objects
    plan        with replicas in the slots where they are executed
    demand      under the schedule of the plan
    chunk       token-slots of a chunk of canonical sums; None: sums are fast
    """

    source: tuple[StepPlan, Demand]
    plan: StepPlan
    demand: ScheduledDemand
    chunk: int | None
    recorder: TimelineRecorder


class _Kept(NamedTuple):
    """Rows of a micro-batch, or their preparation under way, and their routes; None: this rank has no sample."""

    routes: weakref.ref[BatchRoutes] | None
    rows: Future[PreparedRows]


class Preparation:
    """Prepares micro-batches of one model on one rank, one after another."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Prepare nothing yet.

        group    of the ranks of the expert-parallel group, for preparations alone; exchanges tensors of the CPU
        device   of the model
        """
        self._group, self._rank, self._device = group, dist.get_rank(group), device
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="relibra-preparation")
        self._step: PreparedStep | None = None
        self._kept: dict[int, _Kept] = {}
        self._kept_for: tuple[weakref.ref[StepPlan], weakref.ref[Demand], int | None] | None = None

    @contextmanager
    def of_step(self, step: PreparedStep) -> Iterator[None]:
        """Prepare micro-batches of a step inside; what was prepared before from the same plan and demand is used."""
        if not self._keeps(*step.source, step.chunk):
            self._forget()
            plan, demand = step.source
            self._kept_for = weakref.ref(plan, self._forget), weakref.ref(demand, self._forget), step.chunk
        self._step = step
        try:
            yield
        finally:
            self._step = None

    def holds(self, plan: StepPlan, demand: Demand, chunk: int | None, number: int, routes: BatchRoutes | None) -> bool:
        """Return whether a micro-batch with these routes is prepared from a plan and demand, or is about to be."""
        kept = self._kept.get(number)
        if kept is None or not self._keeps(plan, demand, chunk) or _failed(kept.rows):
            return False
        if routes is None or kept.routes is None:
            return kept.routes is None and routes is None
        return kept.routes() is routes

    def start(self, number: int, routes: BatchRoutes | None) -> None:
        """Start to prepare a micro-batch; all ranks start the same ones in the same order.

        routes   None: this rank has no sample in it
        """
        assert self._step is not None, "a step has begun"
        self._kept.pop(number, None)
        self._keep_first()
        reference = None if routes is None else weakref.ref(routes)
        self._kept[number] = _Kept(reference, self._thread.submit(self._prepare, self._step, number, routes))

    def wait_for(self, number: int) -> PreparedRows:
        """Return the rows of a micro-batch whose preparation has been started.

        raises   EngineError when a peer is gone or the group's time-out has passed
        """
        assert self._step is not None, "a step has begun"
        with self._step.recorder.record("wait prepare", micro_batch=number):
            return self._kept[number].rows.result()

    def _keeps(self, plan: StepPlan, demand: Demand, chunk: int | None) -> bool:
        if self._kept_for is None:
            return False
        of_plan, of_demand, of_chunk = self._kept_for
        return of_plan() is plan and of_demand() is demand and of_chunk == chunk

    def _forget(self, _reference: object = None) -> None:
        self._kept, self._kept_for = {}, None

    def _keep_first(self) -> None:
        """Drop finished preparations, from the last but one backwards, until those left have at most `KEPT_BYTES`.

        The first ones stay: the next pass runs the same micro-batches in the same order.
        """
        done = {number: kept.rows for number, kept in self._kept.items() if kept.rows.done()}
        nbytes = {number: 0 if _failed(rows) else rows.result().numbers.nbytes for number, rows in done.items()}
        total = sum(nbytes.values())
        for number in list(done)[-2::-1]:
            if total <= KEPT_BYTES:
                return
            del self._kept[number]
            total -= nbytes[number]

    def _prepare(self, step: PreparedStep, number: int, routes: BatchRoutes | None) -> PreparedRows:
        on_gpu = self._device.type != "cpu"
        with (
            step.recorder.record("prepare", micro_batch=number),
            torch.get_device_module(self._device).device(self._device) if on_gpu else nullcontext(),
        ):
            tables_L = micro_batch_tables(step.plan, step.demand, self._rank, number, step.chunk)
            return prepare_rows(
                tables_L,
                routes,
                self._group,
                dispatch=step.plan.dispatch,
                may_join_live=step.chunk is None,
                pinned=on_gpu,
            )


def _failed(rows: Future[PreparedRows]) -> bool:
    return rows.done() and rows.exception() is not None
