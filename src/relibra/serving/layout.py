"""How many workers of each role serve a model, and which experts each holds."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from jaxtyping import Bool, Float64, Int64, Shaped
from numpy import ndarray
from pydantic import Field

from relibra.errors import ConfigError, EngineError
from relibra.field_checks import check_fields
from relibra.planning.deployment.worker_choice import LOAD_CAP

Transport = Literal["shared", "tcp"]
"""How rows travel: through memory that both processes map, or over TCP."""
WorkerCount = Annotated[int, Field(ge=1, le=64)]


@dataclass(frozen=True, kw_only=True)
class WorkerLayout:
    """Workers of one served model.

    attention       attention workers: data parallel, each with all weights except those of experts
    experts         expert workers: each holds some experts of every layer
    micro_batches   of each attention worker: the attention of one runs while experts run another
    spare_experts   copies of other workers' experts that each expert worker holds in a layer, at most
    cap             tokens choose a copy that saves rows only on a worker whose load / mean load is below this
    transport       how rows travel between attention and experts
    max_tokens      most tokens of one forward pass of one micro-batch: sizes every buffer
    max_batch       most requests that one attention worker decodes at once, over its micro-batches
    max_length      most tokens of one request, prompt and answer
    kv_tokens       tokens of the KV caches of one attention worker; a micro-batch uses (its requests under way) x
                    (tokens that the longest of them may reach)
    timeout         seconds that one side waits for the other before it gives up
    """

    attention: WorkerCount = 1
    experts: WorkerCount = 1
    micro_batches: Annotated[int, Field(ge=1, le=4)] = 2
    spare_experts: Annotated[int, Field(ge=0)] = 0
    cap: Annotated[float, Field(ge=1)] = LOAD_CAP
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


ExpertsOf = tuple[tuple[tuple[int, ...], ...], ...]
"""Experts of each worker in each layer, ascending: by worker, then layer."""


def experts_of(held_LNE: Bool[ndarray, "L N E"]) -> ExpertsOf:
    """Return the experts of each worker in each layer."""
    workers = range(held_LNE.shape[1])
    return tuple(tuple(tuple(np.flatnonzero(own_E).tolist()) for own_E in held_LNE[:, worker]) for worker in workers)


def held_by(experts_of: Sequence[Sequence[Sequence[int]]], num_experts: int) -> Bool[ndarray, "L N E"]:
    """Return which experts each worker holds in each layer."""
    held_LNE = np.zeros((len(experts_of[0]), len(experts_of), num_experts), dtype=np.bool_)
    for worker, layers in enumerate(experts_of):
        for layer, own in enumerate(layers):
            held_LNE[layer, worker, list(own)] = True
    return held_LNE


def place_copies(
    home_LNE: Bool[ndarray, "L N E"], spare: int, load_LE: Int64[ndarray, "L E"] | None = None
) -> Bool[ndarray, "L N E"]:
    """Return which experts each worker holds: its own, and in each layer up to `spare` copies of the most loaded.

    load_LE   rows of each expert so far; None: unknown, all alike
    """
    loads = np.ones(home_LNE[:, 0].shape) if load_LE is None else load_LE + 1.0
    return np.stack([add_copies(home_NE, load_E, spare) for home_NE, load_E in zip(home_LNE, loads, strict=True)])


def add_copies(home_NE: Bool[ndarray, "N E"], load_E: Float64[ndarray, " E"], spare: int) -> Bool[ndarray, "N E"]:
    """Return what workers of a layer hold with up to `spare` more experts each; what a worker has stays.

    Of the experts that some worker with room lacks, the one with the most load per copy is copied to the least loaded
    such worker, again and again; ties: lower id. MegaScale-Infer (arXiv 2504.02263) gives copies by the same rule;
    there, experts move too.
    """
    held_NE, room_N = home_NE.copy(), np.full(len(home_NE), spare)
    while True:
        share_E = load_E / held_NE.sum(axis=0)
        open_E = (~held_NE & (room_N > 0)[:, None]).any(axis=0)
        if not open_E.any():
            return held_NE
        expert = int(np.argmax(np.where(open_E, share_E, -1.0)))
        fits_N = ~held_NE[:, expert] & (room_N > 0)
        worker = int(np.argmin(np.where(fits_N, (held_NE * share_E).sum(axis=1), np.inf)))
        held_NE[worker, expert] = True
        room_N[worker] -= 1


def worker_imbalance(held_LNE: Bool[ndarray, "L N E"], load_LE: Shaped[ndarray, "L E"]) -> float:
    """Return the busiest worker's load / the mean load, each summed over layers; copies share an expert's rows."""
    load_LN = (held_LNE * (load_LE / held_LNE.sum(axis=1))[:, None]).sum(axis=2)
    return float(load_LN.max(axis=1).sum() / max(load_LN.mean(axis=1).sum(), 1e-9))


def check_holders(held_LNE: Bool[ndarray, "L N E"], lost: Collection[int]) -> None:
    """Raise EngineError where an expert has no copy left on workers that are not lost."""
    there_N = ~np.isin(np.arange(held_LNE.shape[1]), list(lost))
    gone_LE = ~held_LNE[:, there_N].any(axis=1)
    if gone_LE.any():
        layer, expert = np.argwhere(gone_LE)[0].tolist()
        raise EngineError(
            f"expert workers {sorted(lost)} are lost, and with them {gone_LE.sum()} experts that no other worker holds "
            f"(the first is {expert} of layer {layer}): requests end until they are back; --spare-experts keeps copies"
        )
