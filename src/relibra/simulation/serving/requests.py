"""Requests that arrive, take free places, decode there, and leave when they are complete.

A place belongs to a micro-batch of an attention node. Prefill is done elsewhere: a prompt comes cached.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64, Shaped
from numpy import ndarray
from numpy.random import Generator

from relibra.simulation.rollout import LengthDistribution


@dataclass(frozen=True, kw_only=True)
class RequestStream:
    """Requests in order of arrival: when they arrive in seconds, tokens of prompt and response (at least one)."""

    arrival_S: Float64[ndarray, " S"]
    prompt_S: Int64[ndarray, " S"]
    response_S: Int64[ndarray, " S"]


def poisson_stream(
    per_second: float, number: int, prompt: LengthDistribution, response: LengthDistribution, rng: Generator
) -> RequestStream:
    """Return requests that arrive independently of each other."""
    return RequestStream(
        arrival_S=np.cumsum(rng.exponential(1 / per_second, number)),
        prompt_S=prompt.draw(number, rng),
        response_S=response.draw(number, rng),
    )


class Places:
    """Places of M micro-batches on X attention nodes, B each: which request is where, and how long it is by now."""

    def __init__(self, stream: RequestStream, micro_batches: int, nodes: int, places: int) -> None:
        shape = (micro_batches, nodes, places)
        self._stream, self._next = stream, 0
        self._request_MXB = np.full(shape, -1, dtype=np.int64)
        self._tokens_MXB, self._left_MXB = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self.admitted_S = np.full(len(stream.arrival_S), np.inf)
        self.finished_S = np.full(len(stream.arrival_S), np.inf)

    @property
    def arrival_S(self) -> Float64[ndarray, " S"]:
        """Return the arrivals of all requests."""
        return self._stream.arrival_S

    @property
    def next_arrival(self) -> float:
        """Return when the next request that has no place arrives; infinity: there is none."""
        left = self._next < len(self._stream.arrival_S)
        return float(self._stream.arrival_S[self._next]) if left else float("inf")

    def admit(self, micro_batch: int, now: float) -> None:
        """Give requests that have arrived free places of a micro-batch, each on the node that attends to fewest tokens.

        A micro-batch takes no more than its share of all requests, so that the others are not empty beside it.
        """
        waiting = int(np.searchsorted(self._stream.arrival_S, now, side="right")) - self._next
        here_M = (self._request_MXB >= 0).sum(axis=(1, 2))
        share = -(-(int(here_M.sum()) + waiting) // len(here_M))
        for _ in range(min(waiting, share - int(here_M[micro_batch]))):
            free_X = (self._request_MXB[micro_batch] < 0).any(axis=-1)
            if not free_X.any():
                return
            load_X = np.where(free_X, self._tokens_MXB[micro_batch].sum(axis=-1), np.inf)
            node = int(np.argmin(load_X))
            place = int(np.argmax(self._request_MXB[micro_batch, node] < 0))
            at = micro_batch, node, place
            self._request_MXB[at] = self._next
            self._tokens_MXB[at] = self._stream.prompt_S[self._next]
            self._left_MXB[at] = self._stream.response_S[self._next]
            self.admitted_S[self._next] = now
            self._next += 1

    def loads(self) -> tuple[Shaped[ndarray, "M X"], Shaped[ndarray, "M X"]]:
        """Return requests of each micro-batch on each node, and the tokens that they attend to."""
        rows_MX: Shaped[ndarray, "M X"] = (self._request_MXB >= 0).sum(axis=-1)
        return rows_MX, self._tokens_MXB.sum(axis=-1)

    def decode(self, end_M: Float64[ndarray, " M"]) -> None:
        """Give every request one more token; those that are complete leave at the end of their micro-batch's step."""
        here_MXB = self._request_MXB >= 0
        self._tokens_MXB += here_MXB
        self._left_MXB -= here_MXB
        done_MXB = here_MXB & (self._left_MXB == 0)
        micro_batch_X, *_ = np.nonzero(done_MXB)
        self.finished_S[self._request_MXB[done_MXB]] = end_M[micro_batch_X]
        self._request_MXB[done_MXB] = -1
        self._tokens_MXB[done_MXB] = 0
