"""Rollout without an engine: responses of known or drawn lengths decode in slots, whole or in windows.

A decode step costs `fixed + per_active x active responses`: weights are read once for all, keys and values for each.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int, Int64
from numpy import ndarray
from numpy.random import Generator

from relibra.cluster import Cluster
from relibra.errors import ConfigError
from relibra.simulation.cost_model import memory_bandwidth
from relibra.simulation.model_shape import ModelShape

Draw = Callable[[int, Generator], Int64[ndarray, " S"]]
"""Draws a number of lengths."""


@dataclass(frozen=True, kw_only=True)
class LengthDistribution:
    """Lognormal lengths of responses, whole tokens from 1 to `longest`; `sigma`: of the logarithm.

    raises    ConfigError for values out of range
    """

    median: float
    sigma: float
    longest: int

    def __post_init__(self) -> None:
        if not (self.median > 0 and self.sigma >= 0 and self.longest >= 1):
            raise ConfigError(
                f"lengths of median {self.median}, sigma {self.sigma} and at most {self.longest}: the median is above "
                "0, sigma at least 0, the longest at least 1"
            )

    def draw(self, number: int, rng: Generator) -> Int64[ndarray, " S"]:
        """Return `number` lengths."""
        lengths = np.rint(rng.lognormal(np.log(self.median), self.sigma, number))
        return np.clip(lengths, 1, self.longest).astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class DecodeCost:
    """Seconds of one decode step of an engine: `fixed + per_active x active responses`."""

    fixed: float
    per_active: float

    def seconds(self, decode_steps: int, tokens: int) -> float:
        """Return the seconds of decode steps that decode `tokens` tokens together."""
        return self.fixed * decode_steps + self.per_active * tokens


def decode_cost(model: ModelShape, cluster: Cluster, engine_ranks: int, context: float) -> DecodeCost:
    """Return the decode cost of an engine that is bound by its memory bandwidth.

    fixed        all weights of the rank are read (many responses use every expert), and the latencies of
                 two exchanges per layer, a message to each other rank in both
    per_active   keys and values of the context are read, and 2 flops per active weight are computed

    engine_ranks   ranks that share one copy of the model
    context        mean tokens of a response and its prompt while it decodes
    raises         ClusterError when the memory bandwidth is not known
    """
    bandwidth = memory_bandwidth(cluster)
    weights = model.parameters * model.expert.bytes_per_value / engine_ranks / bandwidth
    link = cluster.intra if engine_ranks <= cluster.ranks_per_node else cluster.inter_send
    exchanges = 2 * model.layers * (engine_ranks - 1) * link.latency_seconds
    cache = model.cache_bytes_per_token * context / engine_ranks / bandwidth
    flops = 2 * model.active_parameters / engine_ranks / cluster.flops_per_second
    return DecodeCost(fixed=weights + exchanges, per_active=cache + flops)


def prefill_seconds(model: ModelShape, cluster: Cluster, engine_ranks: int, tokens_S: Int[ndarray, " S"]) -> float:
    """Return the seconds of prefilling sequences: 2 flops per token and active weight but the head, and scores."""
    flops = 2.0 * (model.active_parameters - model.head_parameters) * float(tokens_S.sum())
    flops += model.layers * float(model.score_flops(tokens_S).sum())
    return flops / engine_ranks / cluster.flops_per_second


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """Decoding of one engine.

    decode_steps   until the last response ends
    tokens         decoded in all
    slots          of the engine
    """

    decode_steps: int
    tokens: int
    slots: int

    @property
    def idle(self) -> float:
        """Return the share of slots x decode steps without a response."""
        return 1 - self.tokens / (self.slots * self.decode_steps) if self.decode_steps else 0.0


def decode_whole(lengths_S: Int[ndarray, " S"], slots: int) -> Decoded:
    """Return the decoding of whole responses; a free slot takes the next one, in order.

    raises   ConfigError for an engine without slots
    """
    if slots < 1:
        raise ConfigError(f"an engine of {slots} slots decodes nothing: give it at least 1")
    ends: list[int] = []
    for length in lengths_S.tolist():
        start = heapq.heappop(ends) if len(ends) == slots else 0
        heapq.heappush(ends, start + length)
    return Decoded(decode_steps=max(ends, default=0), tokens=int(lengths_S.sum()), slots=slots)


@dataclass(frozen=True, kw_only=True)
class WindowTotals:
    """Totals over some steps of windows.

    tokens, decode_steps   decoded, and until the last response of each step stops
    continued              slots that go on with a response of the step before
    fed_again              earlier tokens of those responses, which an engine without their cache feeds in again
    slots                  slots x steps
    """

    tokens: int
    decode_steps: int
    continued: int
    fed_again: int
    slots: int

    def idle(self, slots: int) -> float:
        """Return the share of `slots` x decode steps without a response."""
        return 1 - self.tokens / (slots * self.decode_steps)

    def tokens_per_time(self, cost_per_response: float) -> float:
        """Return tokens per time if a decode step costs 1 + cost x active responses, summed up: the tokens."""
        return self.tokens / (self.decode_steps + cost_per_response * self.tokens)


def decode_in_windows(draw: Draw, slots: int, window: int, rng: Generator, *, steps: int, burn_in: int) -> WindowTotals:
    """Return totals of steps of at most `window` tokens per response; unfinished ones continue in the next step.

    A slot whose response has ended, or used up its window, idles until the step does (T-PPO, arXiv 2506.15050).

    draw      lengths of new responses, such as `LengthDistribution.draw`
    steps     that count, after `burn_in` steps that do not
    raises    ConfigError for an engine without slots, or windows without tokens
    """
    if slots < 1 or window < 1:
        raise ConfigError(f"an engine of {slots} slots and windows of {window} tokens decodes nothing: give at least 1")
    length_B = draw(slots, rng)
    done_B = np.zeros(slots, dtype=np.int64)
    tokens = decode_steps = continued = fed_again = 0
    for step in range(burn_in + steps):
        added_B = np.minimum(length_B - done_B, window)
        if step >= burn_in:
            tokens += int(added_B.sum())
            decode_steps += int(added_B.max())
            continued += int((done_B > 0).sum())
            fed_again += int(done_B.sum())
        done_B += added_B
        finished_B = done_B == length_B
        length_B = np.where(finished_B, draw(slots, rng), length_B)
        done_B[finished_B] = 0
    return WindowTotals(
        tokens=tokens, decode_steps=decode_steps, continued=continued, fed_again=fed_again, slots=slots * steps
    )
