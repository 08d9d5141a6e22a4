"""`Stopwatch`: seconds of each stage of a step, and skews of those that balanced live."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import nn

from relibra.cluster import Cluster
from relibra.errors import EngineError, library_errors
from relibra.parallel import LiveBalancing, LiveSkew
from relibra.rl.batch.training_batch import balancing
from relibra.rl.config.settings import PlanSettings
from relibra.rl.model.host_weights import on_device
from relibra.rl.run.ranks import begin_stage, is_peer_loss


@dataclass
class Stopwatch:
    """Seconds per stage of a step, and the skew in the stages that balanced live."""

    step: int
    seconds: dict[str, float] = field(default_factory=dict)
    skews: dict[str, LiveSkew] = field(default_factory=dict)

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
            self.keep_skew(name, live)

    def keep_skew(self, name: str, live: LiveBalancing | None) -> None:
        """Keep the skew of a stage before and after balancing."""
        if live is not None:
            self.skews[name] = live.skew()
