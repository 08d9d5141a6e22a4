"""`Stopwatch`: seconds of each stage of a step, skews of those that balanced live, and rows with known addresses."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from relibra.cluster import Cluster
from relibra.errors import EngineError, library_errors
from relibra.parallel import LiveBalancing, LiveSkew
from relibra.rl.batch.training_batch import BatchExecution, balancing
from relibra.rl.config.settings import PlanSettings
from relibra.rl.model.host_weights import on_device
from relibra.rl.run.ranks import begin_stage, is_peer_loss


@dataclass
class Stopwatch:
    """Seconds per stage of a step, and the skew in the stages that balanced live.

    rows     token-slots of passes with a plan or live balancing: "all"; "known", whose addresses a plan gave
    waited   seconds of this rank in live balancing, by what was waited for
    """

    step: int
    seconds: dict[str, float] = field(default_factory=dict)
    skews: dict[str, LiveSkew] = field(default_factory=dict)
    rows: Counter[str] = field(default_factory=Counter)
    waited: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time of the block to a stage; an error of a library inside names the stage.

        raises    EngineError
        """
        begin_stage(f"{name} of step {self.step}")
        start = time.perf_counter()
        with library_errors(f"the stage {name!r} of step {self.step} failed", EngineError, stays=is_peer_loss):
            yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    @contextmanager
    def balanced_stage(self, name: str, model: nn.Module, settings: PlanSettings, cluster: Cluster) -> Iterator[None]:
        """Balance a model live in a stage, its weights on the device, and keep its skew; collective."""
        with self.stage(name), on_device(model), balancing(model, settings, cluster) as live:
            yield
            self.keep_live(name, live)

    def keep_execution(self, name: str, context: BatchExecution) -> None:
        """Count the rows that a stage ran, and those whose addresses its plan knew; then do as `keep_live`."""
        known, planned = context.planned_rows
        self.rows.update(known=known, all=planned)
        self.keep_live(name, context.live)

    def keep_live(self, name: str, live: LiveBalancing | None) -> None:
        """Keep the skew of a stage before and after balancing, its rows and its waits."""
        if live is not None:
            self.skews[name] = live.skew()
            self.rows["all"] += live.token_slots
            self.waited.update(live.waited())

    def row_metrics(self) -> dict[str, Any]:
        """Return the share of rows whose address was known before the step, and waits; None where there were none."""
        waited = {name: round(seconds, 4) for name, seconds in self.waited.items()}
        known = self.rows["known"] / self.rows["all"] if self.rows["all"] else None
        return {"known_rows": known, "wait_seconds": waited if any(waited.values()) else None}
