"""`ExpertPlacement`: the workers that hold each expert of each layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from jaxtyping import Bool, Int
from numpy import ndarray
from pydantic import Field

from relibra.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class ExpertPlacement:
    """What each expert worker holds.

    layer_ids   decoder layers with experts, ascending
    holders     workers of each expert of each layer, its home first
    workers     number of workers
    cap         tokens choose copies so that they save rows on workers with load / mean below this, else by load
    """

    layer_ids: tuple[int, ...]
    holders: tuple[tuple[tuple[int, ...], ...], ...]
    workers: Annotated[int, Field(ge=1, le=1 << 16)]
    cap: Annotated[float, Field(ge=1)]

    @classmethod
    def from_arrays(
        cls,
        layer_ids: Int[ndarray, " L"],
        home_LNE: Bool[ndarray, "L N E"],
        held_LNE: Bool[ndarray, "L N E"],
        cap: float,
    ) -> ExpertPlacement:
        """Return the placement of workers that hold these experts, each the home of some."""
        order_LNE = np.argsort(2 - held_LNE - home_LNE.astype(int), axis=1, kind="stable")  # home, copies, the others
        copies_LE = held_LNE.sum(axis=1)
        holders = tuple(
            tuple(tuple(own_N[:count].tolist()) for own_N, count in zip(order_NE.T, copies_E, strict=True))
            for order_NE, copies_E in zip(order_LNE, copies_LE, strict=True)
        )
        return cls(layer_ids=tuple(layer_ids.tolist()), holders=holders, workers=held_LNE.shape[1], cap=cap)

    @property
    def home_LNE(self) -> Bool[ndarray, "L N E"]:
        """Return whether a worker is the home of an expert."""
        return self._arrays(most=1)

    @property
    def held_LNE(self) -> Bool[ndarray, "L N E"]:
        """Return whether a worker holds an expert."""
        return self._arrays(most=self.workers)

    def _arrays(self, most: int) -> Bool[ndarray, "L N E"]:
        held_LNE = np.zeros((len(self.holders), self.workers, len(self.holders[0])), dtype=np.bool_)
        for layer, experts in enumerate(self.holders):
            for expert, own in enumerate(experts):
                held_LNE[layer, list(own[:most]), expert] = True
        return held_LNE

    @property
    def spare(self) -> int:
        """Return the most copies, homes aside, that a worker holds in a layer."""
        return int((self.held_LNE & ~self.home_LNE).sum(axis=2).max())

    def validate(self) -> None:
        """Raise PlanError for layers of unlike sizes, a worker that is no home, and experts with wrong workers."""
        if not self.holders or not self.holders[0] or len(self.layer_ids) != len(self.holders):
            raise PlanError("a placement has the holders of the experts of each of its layers, and at least one layer")
        for layer, experts in zip(self.layer_ids, self.holders, strict=True):
            legal = all(own and len(set(own)) == len(own) and set(own) <= set(range(self.workers)) for own in experts)
            homes = len({own[0] for own in experts if own})
            if not legal or len(experts) != len(self.holders[0]) or homes < self.workers:
                raise PlanError(
                    f"layer {layer} of a placement: each of {len(self.holders[0])} experts must list one or more of "
                    f"{self.workers} workers, its home first, none twice, and each worker must be the home of one"
                )
