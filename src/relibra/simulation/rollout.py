"""Rollout without an engine: responses of known or drawn lengths decode in slots, beside the update or before it.

A decode step costs `fixed + per_active x active responses`: weights are read once for all, keys and values for each.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Int, Int64
from numpy import ndarray
from numpy.random import Generator

from relibra.cluster import Cluster
from relibra.errors import ConfigError
from relibra.simulation.cost_model import memory_bandwidth
from relibra.simulation.model_shape import ModelShape


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
class Engines:
    """Rollout engines of one job.

    num_engines   each with a copy of the model
    ranks         of one engine, which share that copy
    slots         responses that one engine decodes at a time
    raises        ConfigError for numbers below 1
    """

    num_engines: int
    ranks: int
    slots: int

    def __post_init__(self) -> None:
        for name in ("num_engines", "ranks", "slots"):
            if getattr(self, name) < 1:
                raise ConfigError(f"engines have {name} {getattr(self, name)}: it must be at least 1")


@dataclass(frozen=True, kw_only=True)
class SimulatedRollout:
    """Seconds of the rollout of one iteration, of the slowest engine.

    decode, prefill, fed_again   seconds; `fed_again`: to prefill again the responses that new weights cut
    tokens                       decoded by all engines
    idle                         share of slots x decode steps without a response, mean over engines
    """

    decode: float
    prefill: float
    fed_again: float
    tokens: int
    idle: float

    @property
    def seconds(self) -> float:
        """Return decode, prefill and tokens fed again together."""
        return self.decode + self.prefill + self.fed_again


def simulate_rollout(
    lengths_S: Int[ndarray, " S"], prompt_tokens: float, engines: Engines, model: ModelShape, cluster: Cluster
) -> SimulatedRollout:
    """Return the rollout of responses of known lengths; response s goes to engine s modulo the number of engines.

    prompt_tokens   mean length of a prompt
    cluster         whose ranks the engines run on
    """
    cost = decode_cost(model, cluster, engines.ranks, prompt_tokens + mean_context(lengths_S))
    parts = [lengths_S[engine :: engines.num_engines] for engine in range(engines.num_engines)]
    decoded = [decode_whole(part_S, engines.slots) for part_S in parts]
    prefill = [
        prefill_seconds(model, cluster, engines.ranks, np.full(len(part_S), round(prompt_tokens))) for part_S in parts
    ]
    seconds = [cost.seconds(item.decode_steps, item.tokens) for item in decoded]
    slowest = int(np.argmax(np.add(seconds, prefill)))
    return SimulatedRollout(
        decode=seconds[slowest],
        prefill=prefill[slowest],
        fed_again=0.0,
        tokens=int(lengths_S.sum()),
        idle=float(np.mean([item.idle for item in decoded])),
    )


def rollout_ahead(
    rollout: SimulatedRollout,
    lengths_S: Int[ndarray, " S"],
    prompt_tokens: float,
    engines: Engines,
    model: ModelShape,
    cluster: Cluster,
) -> SimulatedRollout:
    """Return the rollout of an iteration whose engines sample the next batch beside the update, on ranks of their own.

    Responses of the next batch fill the slots of those that ended. At each push of weights responses under way are cut,
    and their tokens so far fed again.

    rollout    the same responses where the update waits for them (`simulate_rollout`)
    """
    cut = np.full(min(engines.slots, len(lengths_S)), round(prompt_tokens + mean_context(lengths_S)))
    again = prefill_seconds(model, cluster, engines.ranks, cut)
    return replace(rollout, decode=rollout.decode * (1 - rollout.idle), fed_again=again, idle=0.0)


def mean_context(lengths_S: Int[ndarray, " S"]) -> float:
    """Return the position of a decoded token in its response, mean over all decoded tokens."""
    total = float(lengths_S.sum())
    return float((lengths_S.astype(np.float64) ** 2).sum()) / (2 * total) if total else 0.0
