"""`ExecutedPlan`: what the micro-batches of an executed plan have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import nn

from relibra.parallel.balanced import BalancedEP
from relibra.parallel.canonical import CHUNK
from relibra.parallel.replicas.group_state import GroupState
from relibra.parallel.rows.rank_tables import RankTables, rank_tables
from relibra.planning.plan import StepPlan
from relibra.routing.demand import ScheduledDemand
from relibra.timeline import TimelineRecorder


@dataclass(frozen=True, kw_only=True, eq=False)
class ExecutedPlan:
    """A plan, the model that executes it, and this rank's part in it.

    layers      of the model, by position in the plan
    demand      under the schedule of the plan; None: the plan is not followed, every expert runs at home
    canonical   whether sums have an order that no plan changes (`canonical.py`)
    """

    model: nn.Module
    layers: Sequence[BalancedEP]
    plan: StepPlan
    demand: ScheduledDemand | None
    canonical: bool
    state: GroupState
    recorder: TimelineRecorder

    def tables(self, micro_batch: int, position: int) -> RankTables:
        """Return the tables of this rank in a micro-batch and layer."""
        assert self.demand is not None, "a plan that is not followed has no tables"
        chunk = CHUNK if self.canonical else None
        return rank_tables(self.plan, self.demand, self.state.rank, micro_batch, position, chunk)

    def first_push(self, micro_batch: int) -> tuple[int, RankTables] | None:
        """Return position and tables of the first layer with pushes; None: there is none, or no such micro-batch."""
        if micro_batch >= len(self.plan.replica_MLRB):
            return None
        with_replicas_L = (self.plan.replica_MLRB[micro_batch] >= 0).any(axis=(1, 2))
        for position in np.flatnonzero(with_replicas_L).tolist():
            tables = self.tables(micro_batch, position)
            if tables.pushes:
                return position, tables
        return None
