"""`ExpertPlacement`: the workers that hold each expert of each layer, their copies apart from their homes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from jaxtyping import Bool, Int64
from numpy import ndarray
from pydantic import Field

from relibra.errors import PlanError

Worker = Annotated[int, Field(ge=0, lt=1 << 16)]
Expert = Annotated[int, Field(ge=0, lt=1 << 16)]


@dataclass(frozen=True, kw_only=True)
class ExpertPlacement:
    """What each expert worker holds.

    layer_ids   decoder layers with experts, ascending
    homes       worker of each expert, by layer
    copies      further experts of each worker, ascending, by layer
    cap         load of the busiest worker / mean up to which tokens choose copies that save rows
    """

    layer_ids: tuple[int, ...]
    homes: tuple[tuple[Worker, ...], ...]
    copies: tuple[tuple[tuple[Expert, ...], ...], ...]
    cap: Annotated[float, Field(ge=1)]

    @classmethod
    def from_arrays(
        cls,
        layer_ids: Int64[ndarray, " L"],
        home_LNE: Bool[ndarray, "L N E"],
        held_LNE: Bool[ndarray, "L N E"],
        cap: float,
    ) -> ExpertPlacement:
        """Return the placement with these homes, one worker per expert, of workers that hold these experts."""
        copy_LNE = held_LNE & ~home_LNE
        return cls(
            layer_ids=tuple(layer_ids.tolist()),
            homes=tuple(tuple(worker_E.tolist()) for worker_E in home_LNE.argmax(axis=1)),
            copies=tuple(tuple(tuple(np.flatnonzero(own_E).tolist()) for own_E in own_NE) for own_NE in copy_LNE),
            cap=cap,
        )

    @property
    def workers(self) -> int:
        """Expert workers."""
        return len(self.copies[0])

    @property
    def spare(self) -> int:
        """Most copies of a worker in a layer."""
        return max(len(own) for layer in self.copies for own in layer)

    @property
    def home_LNE(self) -> Bool[ndarray, "L N E"]:
        """Whether a worker is the home of an expert."""
        return np.array(self.homes)[:, None, :] == np.arange(self.workers)[:, None]

    @property
    def held_LNE(self) -> Bool[ndarray, "L N E"]:
        """Whether a worker holds an expert."""
        held_LNE = self.home_LNE
        for layer, workers in enumerate(self.copies):
            for worker, own in enumerate(workers):
                held_LNE[layer, worker, list(own)] = True
        return held_LNE

    def validate(self) -> None:
        """Raise PlanError where layers differ in size, or a worker holds nothing, an unknown expert, or one twice."""
        for number, (worker_E, copies) in enumerate(zip(self.homes, self.copies, strict=False)):
            layer, experts, workers = f"layer {number} of a placement", len(self.homes[0]), len(self.copies[0])
            if (
                not worker_E
                or (len(worker_E), len(copies)) != (experts, workers)
                or sorted(set(worker_E)) != list(range(workers))
            ):
                raise PlanError(f"{layer}: each of {workers} workers is the home of some of {experts} experts")
            for worker, own in enumerate(copies):
                if list(own) != sorted(set(own)) or any(e >= experts or worker_E[e] == worker for e in own):
                    raise PlanError(
                        f"{layer}: copies {list(own)} of worker {worker} are ascending and of other workers"
                    )
        if not len(self.layer_ids) == len(self.homes) == len(self.copies) or not self.homes:
            raise PlanError("a placement has homes and copies of each of its layers, and at least one layer")
