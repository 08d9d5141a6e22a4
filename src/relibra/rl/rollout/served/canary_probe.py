"""The probes of the canary: sequences of the task, scored by each server and by the trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import httpx
import numpy as np
from numpy import ndarray

from relibra.errors import EngineError
from relibra.rl.rollout.served.canary import CanaryScores, find_fault, share_made
from relibra.rl.rollout.served.client import ServerClient
from relibra.rl.rollout.served.dialects import PATHS, SCORES, TokenAnswer, read_scores, scoring_body
from relibra.rl.rollout.served.loading import adapter_name
from relibra.rl.rollout.served.pool import on_every_server
from relibra.rl.rollout.served.requests import ServerLost
from relibra.rl.rollout.served.trained_scores import Scorer, TrainedScores

SEQUENCES, MOST_SEQUENCES, SEQUENCE_TOKENS = 8, 32, 272
"""More than two blocks of vLLM's cache each (128 tokens on a CPU); up to MOST_SEQUENCES if they reach few experts."""
ENOUGH_EXPERTS = 0.9
"""Share of (layer, expert) that the sequences should reach: a fault in an expert that nothing reaches is not seen."""
SAMPLED_TOKENS = 16
"""Sampled after each sequence, to see log-probs at the run's temperature."""
ANSWER_TOKENS = 64
PROMPTS_AT_ONCE, MOST_PROMPTS = 32, 256
_REQUESTS = 32
"""Under way at once, at each server."""


@dataclass(frozen=True)
class CanaryReport:
    """What a canary that passed saw; of several servers the worst.

    difference      mean absolute difference of log-probs of given tokens, to the trainer's
    share_made      share of the update that the server made, 1 in theory; None: nothing to compare with
    equal_routes    share of (token, layer) with the trainer's experts; None: not compared
    reached         share of (layer, expert) that a token of the sequences goes to; None: a model without experts
    servers         that were compared: those that answered
    """

    difference: float
    share_made: float | None
    equal_routes: float | None
    reached: float | None = None
    servers: int = 1


@dataclass
class WatchedServer:
    """A server, and log-probs that it is compared with.

    exact       server and trainer both compute in float32
    earlier_T   the trainer's log-probs of the sequences under weights that the server had before, by their version
    first_T     the server's own before the first update
    """

    client: ServerClient
    exact: bool
    earlier_T: dict[int, ndarray] = field(default_factory=dict)
    first_T: ndarray | None = None


@dataclass(frozen=True)
class ServedScores:
    """Log-probs of the sequences by a server, and tokens that it sampled after each."""

    served_T: ndarray
    answers: list[TokenAnswer]


@dataclass
class Canary:
    """Scores fixed sequences before and after each update of the servers' weights; on rank 0.

    encode_prompt   from number to tokens of a prompt of the task
    context         most tokens of a request
    retry_seconds   during which servers are waited for while none answers
    sequences       chosen before the first update: prompts and answers of the task, end to end
    """

    servers: Sequence[WatchedServer]
    encode_prompt: Callable[[int], list[int]]
    context: int
    retry_seconds: float = 0.0
    sequences: list[list[int]] = field(default_factory=list)

    def before_update(self) -> None:
        """Choose sequences once, and put them into servers' caches, which an update must drop; raises EngineError."""
        asyncio.run(self._prepare())

    def after_update(self, score: Scorer, version: int) -> CanaryReport:
        """Compare the servers with the policy that was published.

        score     returns what the trained model computes for sequences
        raises    EngineError naming what is wrong, and where
        """
        found = asyncio.run(on_every_server(self.servers, self._ask, retry_seconds=self.retry_seconds))
        answered = [
            (server, scores)
            for server, scores in zip(self.servers, found, strict=True)
            if not isinstance(scores, ServerLost)
        ]
        sampled_of = [
            [(*sequence, *answer.tokens) for sequence, answer in zip(self.sequences, scores.answers, strict=True)]
            for _, scores in answered
        ]
        given_by_tokens = {  # equal servers sample equal tokens
            tokens: len(sequence)
            for sampled in sampled_of
            for tokens, sequence in zip(sampled, self.sequences, strict=True)
        }
        trained_by_tokens = dict(zip(given_by_tokens, score(list(given_by_tokens.items())), strict=True))
        return worst_of(
            [
                self._compare(server, scores, [trained_by_tokens[tokens] for tokens in sampled], version)
                for (server, scores), sampled in zip(answered, sampled_of, strict=True)
            ]
        )

    def exact_scores(self) -> list[ndarray | ServerLost]:
        """Return the log-probs [2, T] of the sequences by each server, asked for twice; raises EngineError."""
        return asyncio.run(on_every_server(self.servers, self._score_twice, retry_seconds=self.retry_seconds))

    def check_unmoved(self, before: Sequence[ndarray | ServerLost]) -> None:
        """Check that the same weights, sent again, moved no bit of the servers' log-probs.

        before    by `exact_scores`; where a server's two scores differ, it may move by as much
        raises    EngineError
        """
        for server, one_2T, other_2T in zip(self.servers, before, self.exact_scores(), strict=True):
            if isinstance(one_2T, ServerLost) or isinstance(other_2T, ServerLost):
                continue
            moved, noise = float(np.abs(other_2T[0] - one_2T[0]).max()), float(np.abs(one_2T[1] - one_2T[0]).max())
            if not moved <= noise:
                raise EngineError(
                    f"{server.client.url} cannot be trained from: the same weights, sent once more, moved its "
                    f"log-probs by {moved:.2g}; it does not load what it receives (rollout.transfer), so use "
                    "rollout.transfer=folder or another version of the server"
                )

    async def _score_twice(self, server: WatchedServer) -> ndarray:
        async with server.client.connections(1) as client:
            return np.stack([await self._scored(server.client, client) for _ in range(2)])

    def _compare(
        self, server: WatchedServer, served: ServedScores, trained: Sequence[TrainedScores], version: int
    ) -> CanaryReport:
        """Return what a comparison of one server shows; raises EngineError naming what is wrong."""
        answers, trained_T = served.answers, np.concatenate([one.given_T for one in trained])
        scores = CanaryScores(
            served_T=served.served_T,
            trained_T=trained_T,
            earlier_T=dict(server.earlier_T),
            first_T=server.first_T,
            sampled_S=np.array([value for answer in answers for value in answer.log_probs], dtype=np.float64),
            tempered_S=np.concatenate([one.tempered_S for one in trained]),
            raw_S=np.concatenate([one.raw_S for one in trained]),
            temperature=server.client.temperature,
            exact=server.exact,
            dialect=server.client.dialect,
            equal_routes=self._equal_routes(server.client, answers, trained),
        )
        if (fault := find_fault(scores)) is not None:
            raise EngineError(
                f"{server.client.url} cannot be trained from after the update to version {version}: {fault}"
            )
        made = [share_made(served.served_T, earlier_T, trained_T) for earlier_T in scores.earlier_T.values()]
        if not made or any(one.is_made for one in made):
            server.earlier_T = {}  # the server is past all of them
        elif len(server.earlier_T) > 1:  # the oldest stays: small updates add up until they can be told apart
            server.earlier_T.pop(list(server.earlier_T)[-1])
        server.earlier_T[version], server.first_T = trained_T, None
        return CanaryReport(
            difference=scores.difference,
            share_made=made[-1].share if made else None,
            equal_routes=scores.equal_routes,
            reached=self._reached(server.client, [one.experts_TLK for one in trained]),
        )

    async def _prepare(self) -> None:
        if not self.sequences:
            chosen = await on_every_server(self.servers, self._choose, retry_seconds=self.retry_seconds)
            self.sequences = next(one for one in chosen if not isinstance(one, ServerLost))
            await on_every_server(self.servers, self._remember_first, retry_seconds=self.retry_seconds)
        await on_every_server(self.servers, self._fill_cache, retry_seconds=self.retry_seconds)

    async def _choose(self, server: WatchedServer) -> list[list[int]]:
        """Return prompts of the task with answers of a server, end to end, cut into sequences."""
        length = max(2, min(SEQUENCE_TOKENS, self.context - SAMPLED_TOKENS))
        joined: list[int] = []
        routes: list[ndarray | None] = []
        async with server.client.connections(_REQUESTS) as client:
            for first in range(0, MOST_PROMPTS, PROMPTS_AT_ONCE):
                prompts = [self.encode_prompt(first + index)[: length // 2] for index in range(PROMPTS_AT_ONCE)]
                limit = max(1, min(ANSWER_TOKENS, self.context - length // 2))
                answers = await asyncio.gather(
                    *(server.client.ask(client, prompt, limit=limit, seed=first) for prompt in prompts)
                )
                for prompt, answer in zip(prompts, answers, strict=True):
                    server.client.check_tokens(answer)
                    joined += [*prompt, *answer.tokens]
                    routes.append(server.client.check_routes(answer.routes, len(prompt) + len(answer.tokens) - 1))
                reached = self._reached(server.client, routes)
                if len(joined) >= SEQUENCES * length and (reached is None or reached >= ENOUGH_EXPERTS):
                    break
        most = max(SEQUENCES, min(MOST_SEQUENCES, len(joined) // length))
        sequences = [joined[start : start + length] for start in range(0, most * length, length)]
        return [sequence for sequence in sequences if len(sequence) == length] or [joined]

    async def _remember_first(self, server: WatchedServer) -> None:
        async with server.client.connections(_REQUESTS) as client:
            server.first_T = await self._scored(server.client, client)

    async def _fill_cache(self, server: WatchedServer) -> None:
        async with server.client.connections(_REQUESTS) as client:
            await asyncio.gather(*(server.client.ask(client, one, limit=1, seed=0) for one in self.sequences))

    async def _scored(self, server: ServerClient, client: httpx.AsyncClient) -> ndarray:
        """Return the server's log-probs of the sequences' tokens."""

        async def score(sequence: Sequence[int]) -> list[float]:
            answer = await server.call(
                client,
                PATHS[server.dialect],
                scoring_body(server.dialect, sequence, adapter_name(server.published.folder)),
                kind=SCORES[server.dialect],
                tokens=len(sequence),
                rows=len(sequence) + 1,
            )
            try:
                return read_scores(answer, sequence)
            except ValueError as error:
                raise EngineError(f"{server.url} answered without log-probs of given tokens ({error})") from error

        return np.concatenate(await asyncio.gather(*(score(one) for one in self.sequences))).astype(np.float64)

    async def _ask(self, server: WatchedServer) -> ServedScores:
        """Return a server's log-probs of the sequences, and tokens that it samples after each."""
        async with server.client.connections(_REQUESTS) as client:
            await server.client.bring_up(client)  # it may have been started again since it loaded the weights
            sampled = await asyncio.gather(
                *(
                    server.client.ask(client, one, limit=SAMPLED_TOKENS, seed=index)
                    for index, one in enumerate(self.sequences)
                )
            )
            for answer in sampled:
                server.client.check_tokens(answer)
            return ServedScores(await self._scored(server.client, client), sampled)

    def _reached(self, server: ServerClient, routes: Sequence[ndarray | None]) -> float | None:
        """Return the share of (layer, expert) in routes [T, L, K] of sequences; None: a model without experts."""
        if server.routes is None:
            return None
        reached_LE = np.zeros((len(server.routes.layer_ids), server.routes.num_experts), dtype=bool)
        layer_1L1 = np.arange(len(reached_LE))[None, :, None]
        for experts_TLK in routes:
            if experts_TLK is not None:
                reached_LE[layer_1L1, experts_TLK] = True
        return float(reached_LE.mean())

    def _equal_routes(
        self, server: ServerClient, answers: Sequence[TokenAnswer], trained: Sequence[TrainedScores]
    ) -> float | None:
        """Return the share of (token, layer) with equal experts, in any order; None: a model without."""
        equal, total = 0, 0
        for sequence, answer, one in zip(self.sequences, answers, trained, strict=True):
            routes_mLK = server.check_routes(answer.routes, len(sequence) + len(answer.tokens) - 1)
            if routes_mLK is None or one.experts_TLK is None:
                return None
            pair = np.sort(routes_mLK, axis=2) == np.sort(one.experts_TLK[: len(routes_mLK)], axis=2)
            equal, total = equal + int(pair.all(axis=2).sum()), total + pair.shape[0] * pair.shape[1]
        return equal / total if total else None


def worst_of(reports: Sequence[CanaryReport]) -> CanaryReport:
    """Return the worst of what the comparisons of several servers show."""
    shares = [one.share_made for one in reports if one.share_made is not None]
    routes = [one.equal_routes for one in reports if one.equal_routes is not None]
    reached = [one.reached for one in reports if one.reached is not None]
    return CanaryReport(
        difference=max(one.difference for one in reports),
        share_made=max(shares, key=lambda share: abs(share - 1.0), default=None),
        equal_routes=min(routes, default=None),
        reached=min(reached, default=None),
        servers=len(reports),
    )
