"""Rollout engine of a run that samples from servers: windows of responses, in their order, from any of the servers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from relibra.rl.rollout.response import Response, RolloutCost, Window
from relibra.rl.rollout.served.client import PublishedVersion, ServerClient
from relibra.rl.rollout.served.sampler import Sampler


@dataclass(frozen=True, kw_only=True)
class ServerEngine:
    """Samples from servers that hold the same weights; each response may come from any of them.

    servers         clients of one model; they share what was published
    seed            one seed per request follows from it; equal samples need servers in their deterministic mode
    max_batch       requests under way at once, at all servers together
    retry_seconds   during which a request that failed is repeated, so that servers may be started again
    weights         folder that servers read new weights from
    sampler         samples while a step trains (`rollout.ahead`); None: nothing does
    rescores        parts before a cut get log-probs of the weights after it (`rollout.mixed_routes`)
    """

    servers: tuple[ServerClient, ...]
    seed: int
    max_batch: int = 256
    retry_seconds: float = 0.0
    weights: Path | None = None
    sampler: Sampler | None = None
    rescores: bool = False

    @property
    def published(self) -> PublishedVersion:
        """Weights that the servers were asked to load last."""
        return self.servers[0].published

    @property
    def names(self) -> str:
        """The addresses of the servers."""
        return ", ".join(server.url for server in self.servers)

    def generate(
        self, responses: Sequence[Response], *, window: int, max_response: int, spare: Iterator[Response] | None = None
    ) -> tuple[list[Window], RolloutCost]:
        """Add up to `window` tokens to each response, none beyond `max_response`; see `RolloutEngine`.

        raises    EngineError when no server can be reached, or one refuses, or answers in another form than requested
        """
        assert not self.published.asleep, "servers take no requests before the update that wakes them"
        assert spare is None, "the settings refuse rollout.refill with a server, which counts no decode steps"
        limits = [min(window, max_response - response.length) for response in responses]
        with closing(self.new_sampler()) as sampler:
            sampler.release()
            return sampler.begin(responses, limits).result()

    def new_sampler(self) -> Sampler:
        """Return a sampler from the same servers, which the caller closes; it asks nothing before `release`."""
        return Sampler(
            self.servers,
            seed=self.seed,
            max_batch=self.max_batch,
            retry_seconds=self.retry_seconds,
            rescores=self.rescores,
        )
