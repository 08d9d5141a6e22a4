"""`PlannedActivations`: what the layers of the trained policy keep, by the routes of a step (`update.activations`)."""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist
from torch import nn

from relibra.cluster import Cluster
from relibra.planning.plan import StepPlan
from relibra.rl.batch.training_batch import TrainingBatch
from relibra.rl.memory.activation_memory import ActivationMemory
from relibra.rl.memory.estimate import ESTIMATE_FILE
from relibra.rl.model.sharding import keep_activations
from relibra.rl.run.ranks import broadcast_json
from relibra.simulation import ModelShape

_log = logging.getLogger(__name__)


class PlannedActivations:
    """The choice of a run: made for its first update, and kept until it does not fit another one."""

    def __init__(self, memory: ActivationMemory, model: nn.Module, cluster: Cluster, shape: ModelShape) -> None:
        """Choose nothing yet: every layer is recomputed."""
        self.memory, self.option_L = memory, list[str]()
        self._model, self._cluster, self._shape, self._line = model, cluster, shape, ""

    @classmethod
    def of_run(
        cls, run: Path, model: nn.Module, cluster: Cluster, shape: ModelShape | None, slot_gib: float | None
    ) -> PlannedActivations | None:
        """Return the choice, by the run's estimate; None and a warning: no figures of it, or no `shape`. Collective.

        slot_gib    most GiB of slots of layers
        """
        figures = None
        if dist.get_rank() == 0:
            with suppress(OSError, ValueError, KeyError):
                figures = json.loads((run / ESTIMATE_FILE).read_text(encoding="utf-8"))["activations"]
        figures = broadcast_json(figures)
        if figures is None or shape is None:
            if dist.get_rank() == 0:
                _log.warning(
                    "update.activations 'plan': the run has no estimate of its memory (--force, Ray or torchrun), so "
                    "every layer is recomputed"
                )
            return None
        return cls(ActivationMemory(**figures).beside_replica_slots(slot_gib), model, cluster, shape)

    def prepare(self, batch: TrainingBatch) -> None:
        """Let the layers keep what the choice says; make a new one where there is none that fits; collective."""
        if batch.demand is None:
            return
        planned, demand = batch.plan, batch.demand
        demand = demand if planned is None else planned.scheduled(demand)
        plan = planned or StepPlan.static(demand, self._cluster.topology)
        if self.option_L and self.memory.fits(self.option_L, plan, demand, self._shape):
            return
        choice = self.memory.choose(plan, demand, self._cluster, self._shape)
        self.option_L = broadcast_json(list(choice.option_L))  # seconds may differ where machines do
        self._line = str(choice)
        keep_activations(self._model, self.option_L)

    def take_line(self) -> str:
        """Return a new choice and its runner-up in a line; "" where an earlier call has returned it."""
        line, self._line = self._line, ""
        return line
