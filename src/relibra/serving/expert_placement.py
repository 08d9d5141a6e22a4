"""Which worker holds which experts, and which copy of an expert computes a row."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from relibra.errors import ConfigError, EngineError
from relibra.planning.deployment.expert_redundancy import place_copies
from relibra.serving.layout import split_experts

Placement = tuple[tuple[int, ...], ...]
"""Experts of each worker, ascending; the same in all layers."""


def place_experts(num_experts: int, workers: int, spare: int, load_E: Int64[ndarray, " E"] | None = None) -> Placement:
    """Return which experts each worker holds.

    spare    experts that a worker holds beyond its share: copies of the most loaded ones, or for which no worker has
             room otherwise
    load_E   rows of each expert so far; None: unknown, all alike
    raises   ConfigError with more workers than experts, or more spare experts than there are others
    """
    if not spare:
        return split_experts(num_experts, workers)
    slots = -(-num_experts // workers) + spare
    if slots > num_experts or workers < 2:
        raise ConfigError(
            f"--spare-experts {spare} on {workers} workers: a worker then holds {slots} of {num_experts} experts, and "
            "two copies on one worker are of no use; use more workers or fewer spare experts"
        )
    placed_NP = place_copies(np.ones(num_experts) if load_E is None else load_E + 1, workers, slots)
    return tuple(tuple(sorted(int(expert) for expert in row if expert >= 0)) for row in placed_NP)


@dataclass(frozen=True, eq=False)
class PlaceTable:
    """Places of experts: a place is an expert of a worker, those of worker 0 first.

    place_EX    places of the copies of each expert, by ascending worker; the first again where there are fewer
    copies_E    copies of each expert
    """

    place_EX: Int64[ndarray, "E X"]
    copies_E: Int64[ndarray, " E"]
    num_places: int

    def place_rows(self, expert_Y: Int64[ndarray, " Y"]) -> Int64[ndarray, " Y"]:
        """Return the place of each row: rows of an expert are shared by its copies in even, consecutive parts."""
        if self.place_EX.shape[1] == 1:
            return self.place_EX[expert_Y, 0]
        order_Y = np.argsort(expert_Y, kind="stable")
        rows_E = np.bincount(expert_Y, minlength=len(self.copies_E))
        nth_Y = np.empty_like(order_Y)
        nth_Y[order_Y] = np.arange(len(order_Y)) - np.repeat(np.cumsum(rows_E) - rows_E, rows_E)
        return self.place_EX[expert_Y, nth_Y * self.copies_E[expert_Y] // np.maximum(rows_E[expert_Y], 1)]


def place_table(placement: Sequence[Sequence[int]], lost: Collection[int] = ()) -> PlaceTable:
    """Return the places of experts on workers that are not lost.

    raises   EngineError when an expert has no copy left
    """
    num_experts = 1 + max(max(experts) for experts in placement)
    places: list[list[int]] = [[] for _ in range(num_experts)]
    first = 0
    for worker, experts in enumerate(placement):
        for number, expert in enumerate(experts):
            if worker not in lost:
                places[expert].append(first + number)
        first += len(experts)
    gone = [expert for expert, own in enumerate(places) if not own]
    if gone:
        raise EngineError(
            f"expert workers {sorted(lost)} are lost, and with them {len(gone)} experts that no other worker holds "
            f"(the first is {gone[0]}): requests end until they are back; --spare-experts keeps copies"
        )
    most = max(map(len, places))
    return PlaceTable(
        place_EX=np.array([own + own[:1] * (most - len(own)) for own in places], dtype=np.int64),
        copies_E=np.array([len(own) for own in places], dtype=np.int64),
        num_places=first,
    )
