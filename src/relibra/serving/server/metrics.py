"""`FrontMetrics`: what a front counts, in the text format of Prometheus."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0, 300.0)


class Growing(Protocol):
    """A choice, as far as it is counted."""

    began: float
    num_tokens: int
    finish: str | None


class CountAnswers:
    """Counts the answers of an application by path and status."""

    def __init__(self, app: ASGIApp, metrics: FrontMetrics) -> None:
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


class FrontMetrics:
    """Counters and histograms of one front."""

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

    def begun(self, prompt_tokens: int) -> None:
        """Count the prompts of a request that was let in."""
        self._prompt.inc(prompt_tokens)

    def count(self, choice: Growing, before: int) -> None:
        """Count what has been added to a choice that had so many tokens."""
        self._tokens.inc(choice.num_tokens - before)
        elapsed = time.monotonic() - choice.began
        if not before:
            self._first.observe(elapsed)
        if choice.finish is not None:
            self._finished.labels(choice.finish).inc()
            self._whole.observe(elapsed)

    def text(self) -> bytes:
        """Return all figures."""
        return generate_latest(self._registry)
