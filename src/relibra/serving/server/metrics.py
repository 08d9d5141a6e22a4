"""`ServerMetrics`: what the API server counts, in the text format of Prometheus."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from relibra.serving.server.choice import Choice

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_CACHE_FIGURES = {
    "kv_cache_usage": "Share of the KV cache that requests under way may need; at 1 others wait.",
    "kv_cache_bytes": "Bytes of the KV cache now.",
    "kv_cache_most_bytes": "Bytes of the KV cache when it is full.",
}
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0, 300.0)


class CountAnswers:
    """Counts the answers of an application by path and status."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics) -> None:
        """Stand in front of an application."""
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let it answer, and look at the status."""

        async def look(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = getattr(scope.get("route"), "path", "other")
                self._metrics.answered(path, message["status"])
            await send(message)

        await self._app(scope, receive, look)


class WorkerCounters(NamedTuple):
    """Counts of a worker since it was started.

    role     "attention" or "experts"
    """

    role: str
    number: int
    counts: Mapping[str, float]


class WorkerFigures(Collector):
    """Figures of workers at the last reading."""

    def __init__(self) -> None:
        """Begin without workers."""
        self._counters: Sequence[WorkerCounters] = ()
        self._busy: dict[tuple[str, int], tuple[float, float]] = {}
        self._share: dict[str, float] = {}

    def update(self, counters: Sequence[WorkerCounters], now: float) -> None:
        """Take over the counters of all workers.

        now   seconds of a clock that does not go back: shares of time count from the update before
        """
        busy = {(one.role, one.number): (now, one.counts["busy_seconds"]) for one in counters}
        for role in {one.role for one in counters}:
            spans = [(busy[who], self._busy[who]) for who in busy if who[0] == role and who in self._busy]
            shares = [max(0.0, (b - b0) / (t - t0)) for (t, b), (t0, b0) in spans if t > t0]
            self._share[role] = sum(shares) / len(shares) if shares else 0.0
        self._counters, self._busy = counters, busy

    def collect(self) -> Iterator[Metric]:
        """Yield the figures."""
        seconds = CounterMetricFamily(
            "relibra_busy_seconds", "Seconds in which a worker computed.", labels=("role", "worker")
        )
        share = GaugeMetricFamily(
            "relibra_busy_share", "Share of time in which workers of a role computed, since the reading before.",
            labels=("role",),
        )  # fmt: skip
        cache = {
            name: GaugeMetricFamily(f"relibra_{name}", about, labels=("worker",))
            for name, about in _CACHE_FIGURES.items()
        }
        for role, number, counts in self._counters:
            seconds.add_metric((role, str(number)), counts["busy_seconds"])
            for name in cache.keys() & counts.keys():
                cache[name].add_metric((str(number),), counts[name])
        for role, value in sorted(self._share.items()):
            share.add_metric((role,), value)
        yield from (seconds, share, *cache.values())


class ServerMetrics:
    """Counters and histograms."""

    def __init__(self) -> None:
        """Begin at zero."""
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "relibra_requests", "Answers over HTTP, by path and status.", ["path", "status"], registry=self._registry
        )
        self._prompt = Counter("relibra_prompt_tokens", "Tokens of prompts.", registry=self._registry)
        self._tokens = Counter("relibra_generated_tokens", "Tokens of answers.", registry=self._registry)
        self._finished = Counter(
            "relibra_finished", "Answers that ended, by reason.", ["reason"], registry=self._registry
        )
        self._workers = WorkerFigures()
        self._registry.register(self._workers)
        self._first = self._histogram("relibra_time_to_first_token_seconds", "Until the first token of an answer.")
        self._whole = self._histogram("relibra_answer_seconds", "Until the end of an answer.")

    def _histogram(self, name: str, about: str) -> Histogram:
        return Histogram(name, about, buckets=_SECONDS, registry=self._registry)

    def watch(self, name: str, about: str, read: Callable[[], float]) -> None:
        """Add a gauge that is read when it is asked for."""
        Gauge(name, about, registry=self._registry).set_function(read)

    def answered(self, path: str, status: int) -> None:
        """Count an answer over HTTP."""
        self._requests.labels(path, str(status)).inc()

    def count_prompts(self, prompts: Sequence[Sequence[int]]) -> None:
        """Count the tokens of a request that was admitted."""
        self._prompt.inc(sum(map(len, prompts)))

    def count(self, choice: Choice, before: int) -> None:
        """Count what has been added to a choice that had so many tokens."""
        self._tokens.inc(choice.num_tokens - before)
        elapsed = time.monotonic() - choice.began
        if not before:
            self._first.observe(elapsed)
        if choice.finish is not None:
            self._finished.labels(choice.finish).inc()
            self._whole.observe(elapsed)

    def text(self, workers: Sequence[WorkerCounters]) -> bytes:
        """Return all figures."""
        self._workers.update(workers, time.monotonic())
        return generate_latest(self._registry)
