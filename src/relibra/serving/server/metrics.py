"""`ServerMetrics`: what the API server and its workers count, in the text format of Prometheus."""

from __future__ import annotations

import time
from asyncio import CancelledError
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from relibra.serving.server.choice import Choice
from relibra.serving.server.errors import answer_failure

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0, 300.0)
WorkerCounts = Mapping[tuple[str, int], Mapping[str, int | float]]
"""Counts by role ("attention" or "experts") and number of the worker."""
_WORKER = ("role", "worker")
_Histogram = partial(Histogram, buckets=_SECONDS)
METRICS: dict[str, tuple[Callable[..., Any], str, tuple[str, ...]]] = {
    "requests": (Counter, "Answers over HTTP, by path and status.", ("path", "status")),
    "prompt_tokens": (Counter, "Tokens of prompts.", ()),
    "generated_tokens": (Counter, "Tokens of answers.", ()),
    "finished": (Counter, "Answers that ended, by reason.", ("reason",)),
    "time_to_first_token_seconds": (_Histogram, "Until the first token of an answer.", ()),
    "answer_seconds": (_Histogram, "Until the end of an answer.", ()),
    "waiting": (Gauge, "Answers in the queue.", ()),
    "running": (Gauge, "Answers at the workers.", ()),
    "lost_workers": (Gauge, "Workers that are gone.", ()),
    "busy_seconds": (Counter, "Seconds in which a worker computed.", _WORKER),
    "rows": (Counter, "Tokens that a worker sent to another: to experts, or summed up on the way back.", _WORKER),
    "bytes": (Counter, "Bytes of these rows, and of the choices and gates with them.", _WORKER),
    "empty_messages": (Counter, "Messages of a layer that had no rows, and were not sent.", _WORKER),
    "busy_share": (Gauge, "Share of time in which workers of a role computed, since the reading before.", ("role",)),
    "kv_cache_usage": (Gauge, "Share of the KV cache that requests under way may need; at 1 others wait.", ("worker",)),
    "kv_cache_bytes": (Gauge, "Bytes of the KV cache now.", ("worker",)),
    "kv_cache_most_bytes": (Gauge, "Bytes of the KV cache when it is full.", ("worker",)),
}
"""Kind, meaning and labels of each metric, whose name begins with relibra_."""


class CountAnswers:
    """Counts the answers of an application by path and status, those to requests that failed among them."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics) -> None:
        """Stand in front of an application."""
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the application answer, and count the status."""

        begun = False

        def count(status: int) -> None:
            self._metrics.answered(getattr(scope.get("route"), "path", "other"), status)

        async def look(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                count(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, look)
        except (Exception, CancelledError) as error:  # noqa: BLE001 - uvicorn would print it for every request
            if not isinstance(error, Exception):
                return  # the server stops
            answer = answer_failure(error)
            if begun:
                count(500)  # beside the status that was sent: the connection breaks
            else:
                await answer(scope, receive, look)


class ServerMetrics:
    """The metrics of a server and its workers."""

    def __init__(self) -> None:
        """Begin at zero."""
        self._registry = CollectorRegistry()
        self._metrics: dict[str, Any] = {
            name: kind(f"relibra_{name}", about, labels, registry=self._registry)
            for name, (kind, about, labels) in METRICS.items()
        }
        self._before: dict[tuple[str, int], tuple[float, Mapping[str, int | float]]] = {}  # time of a reading, counts

    def answered(self, path: str, status: int) -> None:
        """Count an answer over HTTP."""
        self._metrics["requests"].labels(path, str(status)).inc()

    def count_prompts(self, prompts: Sequence[Sequence[int]]) -> None:
        """Count the tokens of a request that was admitted."""
        self._metrics["prompt_tokens"].inc(sum(map(len, prompts)))

    def count(self, choice: Choice, before: int) -> None:
        """Count what has been added to a choice that had `before` tokens."""
        self._metrics["generated_tokens"].inc(choice.num_tokens - before)
        elapsed = time.monotonic() - choice.began
        if not before:
            self._metrics["time_to_first_token_seconds"].observe(elapsed)
        if choice.finish is not None:
            self._metrics["finished"].labels(choice.finish).inc()
            self._metrics["answer_seconds"].observe(elapsed)

    def text(self, workers: WorkerCounts, gauges: Mapping[str, int | float]) -> bytes:
        """Return all metrics.

        workers  counts of each worker since it was started
        gauges   values of metrics without labels
        """
        for name, value in gauges.items():
            self._metrics[name].set(value)
        self._update(workers, time.monotonic())
        return generate_latest(self._registry)

    def _update(self, workers: WorkerCounts, now: float) -> None:
        """Take over the counters of workers, which begin at 0 again where a worker was started again."""
        caches = [name for name, (_, _, labels) in METRICS.items() if labels == ("worker",)]
        counters = [name for name, (_, _, labels) in METRICS.items() if labels == _WORKER]
        for name in ("busy_share", *caches):
            self._metrics[name].clear()
        shares: dict[str, list[float]] = {role: [] for role, _ in workers}
        for (role, number), counts in workers.items():
            then, before = self._before.get((role, number), (now, {}))
            self._before[role, number] = now, counts
            restarted = counts["busy_seconds"] < before.get("busy_seconds", 0.0)
            more = {name: counts[name] - (0 if restarted else before.get(name, 0)) for name in counters}
            for name, count in more.items():
                self._metrics[name].labels(role, number).inc(count)
            if now > then:
                shares[role].append(more["busy_seconds"] / (now - then))
            for name in counts.keys() & set(caches):
                self._metrics[name].labels(number).set(counts[name])
        for role, found in shares.items():
            self._metrics["busy_share"].labels(role).set(sum(found) / len(found) if found else 0.0)
