"""How many workers of each role serve a model, which experts each holds, and which copy of an expert computes a row."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from jaxtyping import Float64, Int64, Shaped
from numpy import ndarray
from pydantic import Field

from relibra.errors import ConfigError, EngineError
from relibra.field_checks import check_fields

Transport = Literal["shared", "tcp"]
"""How rows travel: through memory that both processes map, or over TCP."""
WorkerCount = Annotated[int, Field(ge=1, le=64)]


@dataclass(frozen=True, kw_only=True)
class WorkerLayout:
    """Workers of one served model.

    attention       attention workers: data parallel, each with all weights except those of experts
    experts         expert workers: each holds some experts of every layer
    micro_batches   of each attention worker: the attention of one runs while experts run another
    spare_experts   experts that each expert worker holds beyond its share, so that others have copies
    transport       of rows between the two
    max_tokens      most tokens of one forward pass of one micro-batch: sizes every buffer
    max_batch       most requests that one attention worker decodes at once, over its micro-batches
    max_length      most tokens of one request, prompt and answer
    kv_tokens       tokens of the KV cache of one attention worker: of each micro-batch, its requests under way x the
                    tokens that the longest of them may reach
    timeout         seconds that one side waits for the other before it gives up
    """

    attention: WorkerCount = 1
    experts: WorkerCount = 1
    micro_batches: Annotated[int, Field(ge=1, le=4)] = 2
    spare_experts: Annotated[int, Field(ge=0)] = 0
    transport: Transport = "shared"
    max_tokens: Annotated[int, Field(ge=1, le=1 << 20)] = 512
    max_batch: Annotated[int, Field(ge=1, le=1 << 16)] = 64
    max_length: Annotated[int, Field(ge=1, le=1 << 24)] = 4096
    kv_tokens: Annotated[int, Field(ge=1, le=1 << 40)] = 65536
    timeout: Annotated[float, Field(gt=0)] = 60.0

    def __post_init__(self) -> None:
        """Raise ConfigError for values out of range."""
        check_fields(WorkerLayout, vars(self), "relibra serve", ConfigError)
        if self.max_length * self.micro_batches > self.kv_tokens:
            raise ConfigError(
                f"--kv-tokens {self.kv_tokens} leaves {self.kv_tokens // self.micro_batches} tokens to each of "
                f"{self.micro_batches} micro-batches, less than --max-length {self.max_length}: raise it, or lower the "
                "length"
            )

    @property
    def micro_batch_kv_tokens(self) -> int:
        """Tokens of the KV cache of one micro-batch."""
        return self.kv_tokens // self.micro_batches

    @property
    def max_running(self) -> int:
        """Most requests that one micro-batch decodes at once."""
        return -(-self.max_batch // self.micro_batches)


def split_experts(num_experts: int, workers: int) -> tuple[tuple[int, ...], ...]:
    """Return the experts of each worker, in ascending order; the first workers take the remainder.

    raises   ConfigError with more workers than experts

    >>> split_experts(5, 2)
    ((0, 1, 2), (3, 4))
    """
    if workers > num_experts:
        raise ConfigError(
            f"--experts {workers} is more than the {num_experts} experts of a layer: use at most {num_experts} workers"
        )
    return tuple(tuple(part.tolist()) for part in np.array_split(np.arange(num_experts), workers))


Placement = tuple[tuple[int, ...], ...]
"""Experts of each worker, ascending; the same in all layers."""


def place_experts(num_experts: int, workers: int, spare: int, load_E: Int64[ndarray, " E"] | None = None) -> Placement:
    """Return which experts each worker holds.

    spare    experts that a worker holds beyond its share: copies of the most loaded ones
    load_E   rows of each expert so far; None: unknown, all alike
    raises   ConfigError with more workers than experts, or more spare experts than there are others
    """
    base = split_experts(num_experts, workers)
    if not spare:
        return base
    slots = -(-num_experts // workers) + spare
    if slots > num_experts or workers < 2:
        raise ConfigError(
            f"--spare-experts {spare} on {workers} workers: a worker then holds {slots} of {num_experts} experts, and "
            "two copies on one worker are of no use; use more workers or fewer spare experts"
        )
    return add_copies(base, np.ones(num_experts) if load_E is None else load_E + 1.0, spare)


def add_copies(base: Placement, load_E: Float64[ndarray, " E"], spare: int) -> Placement:
    """Return a placement with up to `spare` more experts per worker; what a worker holds in `base` stays.

    A copy goes to the expert with the most load per copy that some worker with room does not hold, and to the least
    loaded of these workers; ties: lower id. MegaScale-Infer (arXiv 2504.02263) gives copies by the same rule; there,
    experts move too.
    """
    held_NE = np.array([np.isin(np.arange(len(load_E)), experts) for experts in base])
    room_N = np.full(len(base), spare)
    while True:
        share_E = load_E / held_NE.sum(axis=0)
        open_E = (~held_NE & (room_N > 0)[:, None]).any(axis=0)
        if not open_E.any():
            return tuple(tuple(np.flatnonzero(row).tolist()) for row in held_NE)
        expert = int(np.argmax(np.where(open_E, share_E, -1.0)))
        fits_N = ~held_NE[:, expert] & (room_N > 0)
        worker = int(np.argmin(np.where(fits_N, (held_NE * share_E).sum(axis=1), np.inf)))
        held_NE[worker, expert] = True
        room_N[worker] -= 1


def worker_imbalance(placement: Placement, load_E: Shaped[ndarray, " E"]) -> float:
    """Return the load of the busiest worker / that of the mean, where copies share rows evenly."""
    held_NE = np.array([np.isin(np.arange(len(load_E)), experts) for experts in placement])
    load_N = (held_NE * (load_E / held_NE.sum(axis=0))).sum(axis=1)
    return float(load_N.max() / max(load_N.mean(), 1e-9))


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
    """Return the places of experts on workers that are not lost; raises EngineError when an expert has no copy left."""
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
