"""`ServingResult`: figures of simulated decode steps, and what they were limited by."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Shaped
from numpy import ndarray

from relibra.planning.deployment.colocated import ColocatedPlan
from relibra.simulation.serving.ping_pong import Events, Work
from relibra.simulation.serving.requests import Places
from relibra.simulation.serving.site import Plan, Site
from relibra.timeline import Event, Timeline

FULL = 0.97
"""A resource that is busy for this share of the time is the limit."""


@dataclass(frozen=True, kw_only=True)
class ServingResult:
    """Figures of the steps that count; all simulated.

    iteration_seconds, p99_seconds               mean time between two tokens of a request, and its 99th percentile
    tokens_per_second                            of the instance
    attention_busy, experts_busy                 share of the time that the mean node computes
    network_busy                                 share of the time that the busiest NIC sends or receives
    network_bytes                                that the NIC of an attention GPU sends in a step
    queue_seconds, queue_p99_seconds             of requests before they got a place; 0 without a stream
    finished                                     requests that ended
    limit                                        "attention", "experts", "computing" (both on the same GPUs), "network"
                                                 or "round trip": none of these is full
    """

    plan: Plan
    iteration_seconds: float
    p99_seconds: float
    tokens_per_second: float
    attention_busy: float
    experts_busy: float
    network_busy: float
    network_bytes: float
    queue_seconds: float
    queue_p99_seconds: float
    finished: int
    limit: str
    last: tuple[Work, Events]

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Return tokens per second and GPU, those of experts included."""
        return self.tokens_per_second / self.plan.gpus

    @property
    def tokens_per_second_per_price(self) -> float:
        """Return tokens per second and price."""
        return self.tokens_per_second / self.plan.price

    @property
    def tokens_per_second_per_watt(self) -> float:
        """Return tokens per second and watt."""
        return self.tokens_per_second / self.plan.watts

    @property
    def bubble(self) -> float:
        """Return the share of the time in which the busier pool waits; the one pool of a colocated plan does both."""
        busy = self.attention_busy, self.experts_busy
        return max(0.0, 1 - (sum(busy) if isinstance(self.plan, ColocatedPlan) else max(busy)))  # rounding may pass 1

    def timeline(self, layers: int = 4) -> Timeline:
        """Return the first layers of the last step: attention nodes are the first ranks, expert nodes the others."""
        work, events = self.last
        _, M, X = work.attention_LMX.shape
        Y = work.send_LMXY.shape[3]
        found = []
        experts_LMY = work.experts_LMXY.sum(axis=2)
        ended_LMY = events.experts_LMY + experts_LMY
        origin = float(events.attention_LMX[0].min())
        for layer in range(min(layers, len(work.attention_LMX))):
            for m in range(M):
                for x in range(X):
                    start, seconds = events.attention_LMX[layer, m, x] - origin, work.attention_LMX[layer, m, x]
                    found.append(_event("attention", layer, m, x, start, seconds))
                    done = max(start + seconds, float(ended_LMY[layer, m].max()) - origin)
                    back = max(0.0, float(events.returned_LMX[layer, m, x]) - origin - done)
                    found.append(_event("combine", layer, m, x, done, back))
                for y in range(Y):
                    start = events.experts_LMY[layer, m, y] - origin
                    found.append(_event("experts", layer, m, X + y, start, experts_LMY[layer, m, y]))
        timeline = Timeline(
            events=tuple(sorted(found, key=lambda event: event.start)), num_ranks=X + Y, label="simulated"
        )
        timeline.validate()
        return timeline


def _event(stage: str, layer: int, micro_batch: int, rank: int, start: float, seconds: float) -> Event:
    return Event(stage, layer, micro_batch, rank, float(start), float(seconds), 0, "")


class Tally:
    """Sums over steps."""

    def __init__(self, plan: Plan, site: Site, micro_batches: int, places: Places | None) -> None:
        self._plan, self._site, self._places = plan, site, places
        self._end_M, self._began = np.zeros(micro_batches), 0.0
        self._tokens, self._steps = 0.0, 0
        self._busy, self._bytes = {"attention": 0.0, "experts": 0.0, "network": 0.0}, 0.0
        self._iterations: list[float] = []
        self._last: tuple[Work, Events] | None = None

    def add(
        self,
        rows_MX: Shaped[ndarray, "M X"],
        work: Work,
        events: Events,
        bytes_LMXY: Float64[ndarray, "L M X Y"],
        end_M: Float64[ndarray, " M"],
        *,
        counts: bool,
    ) -> None:
        """Add a step; the counted time begins at the end of the last step that does not count."""
        seconds_M, self._end_M = end_M - self._end_M, end_M.copy()
        self._last = work, events
        if not counts:
            self._began = float(end_M.mean())
            return
        self._steps += 1
        self._tokens += float(rows_MX.sum())
        self._iterations += np.repeat(seconds_M, rows_MX.sum(axis=1)).tolist()
        self._busy["attention"] += float(work.attention_LMX.sum(axis=(0, 1)).mean())
        self._busy["experts"] += float(work.experts_LMXY.sum(axis=(0, 1, 2)).mean())
        send_X, take_X = work.send_LMXY.sum(axis=(0, 1, 3)), work.take_LMXY.sum(axis=(0, 1, 3))
        receive_Y, give_Y = work.receive_LMXY.sum(axis=(0, 1, 2)), work.give_LMXY.sum(axis=(0, 1, 2))
        if self._site.shared:  # one NIC sends rows and gives results, receives rows and takes results
            send_X, take_X = send_X + give_Y, take_X + receive_Y
        self._busy["network"] += float(max(nics.max() for nics in (send_X, take_X, receive_Y, give_Y)))
        sent_XY = bytes_LMXY.sum(axis=(0, 1)) * self._site.by_network_XY * (1 + self._site.shared)  # results go back
        self._bytes += float(sent_XY.sum(axis=1).mean()) / self._site.compute.attention_node.ways

    def result(self) -> ServingResult:
        """Return the figures."""
        elapsed = max(float(self._end_M.mean()) - self._began, 1e-12)
        iterations = np.array(self._iterations or [0.0])
        rounds = self._plan.micro_batches // len(self._end_M)  # above 1: one stands for all in a pipeline
        busy = {name: seconds / elapsed for name, seconds in self._busy.items()}
        assert self._last is not None, "at least one step was run"
        waits = self._waits()
        return ServingResult(
            plan=self._plan,
            iteration_seconds=float(iterations.mean()),
            p99_seconds=float(np.quantile(iterations, 0.99)),
            tokens_per_second=rounds * self._tokens / elapsed,
            attention_busy=busy["attention"],
            experts_busy=busy["experts"],
            network_busy=busy["network"],
            network_bytes=self._bytes / max(1, self._steps),
            queue_seconds=float(waits.mean()),
            queue_p99_seconds=float(np.quantile(waits, 0.99)),
            finished=0 if self._places is None else int(np.isfinite(self._places.finished_S).sum()),
            limit=self._limit(busy),
            last=self._last,
        )

    def _limit(self, busy: dict[str, float]) -> str:
        if self._site.shared:
            busy = {"computing": busy["attention"] + busy["experts"], "network": busy["network"]}
        fullest = max(busy, key=lambda name: busy[name])
        return fullest if busy[fullest] >= FULL else "round trip"

    def _waits(self) -> Float64[ndarray, " S"]:
        if self._places is None:
            return np.zeros(1)
        admitted_S = self._places.admitted_S
        waits_S = (admitted_S - self._places.arrival_S)[np.isfinite(admitted_S)]
        return waits_S if len(waits_S) else np.zeros(1)
