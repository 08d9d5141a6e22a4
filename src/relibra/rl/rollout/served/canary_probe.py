"""The probes of the canary: sequences of the task, scored by a server and by the trainer's copy of the policy."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import httpx
import numpy as np
import torch
from numpy import ndarray
from torch import nn

from relibra.errors import EngineError
from relibra.replay import record_routing
from relibra.rl.rollout.served.canary import CanaryScores, find_fault, share_made
from relibra.rl.rollout.served.dialects import PATHS, TokenAnswer, read_scores, scoring_body
from relibra.rl.rollout.served.engine import ServerEngine

_log = logging.getLogger(__name__)

SEQUENCES, SEQUENCE_TOKENS = 8, 272
"""More than two blocks of vLLM's cache each, of 128 tokens on a CPU."""
SAMPLED_TOKENS = 16
"""Sampled after each sequence, to see log-probs at the run's temperature."""
ANSWER_TOKENS = 64
PROMPTS_AT_ONCE, MOST_PROMPTS = 32, 256
_REQUESTS = 32
"""Under way at once."""


@dataclass(frozen=True)
class CanaryReport:
    """What a canary saw that passed.

    difference      mean absolute difference of log-probs of given tokens, to the trainer's
    share_made      of the update that the server made, 1 in theory; None: nothing to compare with
    equal_routes    share of (token, layer) with the trainer's experts; None: not compared
    """

    difference: float
    share_made: float | None
    equal_routes: float | None


@dataclass
class Canary:
    """Scores fixed sequences before and after each update of a server's weights; on rank 0.

    encode_prompt   from number to tokens of a prompt of the task
    context         most tokens of a request
    exact           server and trainer both compute in float32
    sequences       chosen before the first update: prompts and answers of the task, end to end
    earlier_T       log-probs of the sequences under weights that the server had before, by their version
    first_T         of the server before the first update
    """

    engine: ServerEngine
    encode_prompt: Callable[[int], list[int]]
    context: int
    exact: bool
    sequences: list[list[int]] = field(default_factory=list)
    earlier_T: dict[int, ndarray] = field(default_factory=dict)
    first_T: ndarray | None = None

    def before_update(self) -> None:
        """Choose the sequences, or put them into the server's cache, where an update must not leave them.

        raises    EngineError
        """
        asyncio.run(self._prepare())

    def after_update(self, model: nn.Module, version: int) -> CanaryReport:
        """Compare the server with the policy that was published.

        model     full copy of the policy, in evaluation mode
        raises    EngineError naming what is wrong
        """
        served_T, answers = asyncio.run(self._ask())
        trained = [
            score_sequence(
                model,
                [*sequence, *answer.tokens],
                given=len(sequence),
                temperature=self.engine.temperature,
                with_routes=self.engine.routes is not None,
            )
            for sequence, answer in zip(self.sequences, answers, strict=True)
        ]
        trained_T = np.concatenate([one.given_T for one in trained])
        scores = CanaryScores(
            served_T=served_T,
            trained_T=trained_T,
            earlier_T=dict(self.earlier_T),
            first_T=self.first_T,
            sampled_S=np.array([value for answer in answers for value in answer.log_probs], dtype=np.float64),
            tempered_S=np.concatenate([one.tempered_S for one in trained]),
            raw_S=np.concatenate([one.raw_S for one in trained]),
            temperature=self.engine.temperature,
            exact=self.exact,
            equal_routes=self._equal_routes(answers, trained),
        )
        if (fault := find_fault(scores)) is not None:
            raise EngineError(
                f"{self.engine.url} cannot be trained from after the update to version {version}: {fault}"
            )
        made = [share_made(served_T, earlier_T, trained_T) for earlier_T in scores.earlier_T.values()]
        if not made or any(one.is_made for one in made):
            self.earlier_T = {}  # the server is past all of them
        elif len(self.earlier_T) > 1:  # the oldest stays: small updates add up until they can be told apart
            self.earlier_T.pop(list(self.earlier_T)[-1])
        self.earlier_T[version], self.first_T = trained_T, None
        return CanaryReport(
            difference=scores.difference,
            share_made=made[-1].share if made else None,
            equal_routes=scores.equal_routes,
        )

    async def _prepare(self) -> None:
        async with self.engine.connections(_REQUESTS) as client:
            if not self.sequences:
                self.sequences = await self._choose(client)
                self.first_T = await self._served(client)
            await asyncio.gather(*(self.engine.ask(client, one, limit=1, seed=0) for one in self.sequences))

    async def _choose(self, client: httpx.AsyncClient) -> list[list[int]]:
        """Return prompts of the task with answers of the server, end to end, cut into sequences."""
        length = max(2, min(SEQUENCE_TOKENS, self.context - SAMPLED_TOKENS))
        joined: list[int] = []
        for first in range(0, MOST_PROMPTS, PROMPTS_AT_ONCE):
            prompts = [self.encode_prompt(first + index)[: length // 2] for index in range(PROMPTS_AT_ONCE)]
            limit = max(1, min(ANSWER_TOKENS, self.context - length // 2))
            answers = await asyncio.gather(
                *(self.engine.ask(client, prompt, limit=limit, seed=first) for prompt in prompts)
            )
            for prompt, answer in zip(prompts, answers, strict=True):
                self.engine.check_tokens(answer)
                joined += [*prompt, *answer.tokens]
            if len(joined) >= SEQUENCES * length:
                break
        sequences = [joined[start : start + length] for start in range(0, SEQUENCES * length, length)]
        return [sequence for sequence in sequences if len(sequence) == length] or [joined]

    async def _served(self, client: httpx.AsyncClient) -> ndarray:
        """Return the server's log-probs of the sequences' tokens."""

        async def score(sequence: Sequence[int]) -> list[float]:
            body = await self.engine.call(
                client, PATHS["vllm"], scoring_body(sequence), tokens=len(sequence), rows=len(sequence) + 1
            )
            try:
                return read_scores(body, sequence)
            except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
                raise EngineError(f"{self.engine.url} answered without prompt_logprobs ({error!r})") from error

        return np.concatenate(await asyncio.gather(*(score(one) for one in self.sequences))).astype(np.float64)

    async def _ask(self) -> tuple[ndarray, list[TokenAnswer]]:
        """Return the server's log-probs of the sequences, and tokens that it samples after each."""
        async with self.engine.connections(_REQUESTS) as client:
            sampled = await asyncio.gather(
                *(
                    self.engine.ask(client, one, limit=SAMPLED_TOKENS, seed=index)
                    for index, one in enumerate(self.sequences)
                )
            )
            for answer in sampled:
                self.engine.check_tokens(answer)
            return await self._served(client), sampled

    def _equal_routes(self, answers: Sequence[TokenAnswer], trained: Sequence[TrainedScores]) -> float | None:
        """Return the share of (token, layer) with equal experts, in any order; None: a model without."""
        equal, total = 0, 0
        for sequence, answer, one in zip(self.sequences, answers, trained, strict=True):
            routes_mLK = self.engine.check_routes(answer.routes, len(sequence) + len(answer.tokens) - 1)
            if routes_mLK is None or one.experts_TLK is None:
                return None
            pair = np.sort(routes_mLK, axis=2) == np.sort(one.experts_TLK[: len(routes_mLK)], axis=2)
            equal, total = equal + int(pair.all(axis=2).sum()), total + pair.shape[0] * pair.shape[1]
        return equal / total if total else None


@dataclass(frozen=True)
class TrainedScores:
    """Log-probs of the trainer's copy: of given tokens, and of those after them with and without temperature.

    experts_TLK   native routes of all tokens; None: a model without experts
    """

    given_T: ndarray
    tempered_S: ndarray
    raw_S: ndarray
    experts_TLK: ndarray | None


@torch.inference_mode()
def score_sequence(
    model: nn.Module, tokens: Sequence[int], *, given: int, temperature: float, with_routes: bool
) -> TrainedScores:
    """Return the log-probs of a sequence whose first tokens are given, and its native routes."""
    ids_1N = torch.tensor([tokens], device=next(model.parameters()).device)
    with record_routing(model) if with_routes else nullcontext() as recorder:
        logits_NV = model(input_ids=ids_1N, use_cache=False).logits[0, :-1].float()
    next_N1 = ids_1N[0, 1:, None]
    raw_N = logits_NV.log_softmax(-1).gather(1, next_N1)[:, 0].double().cpu().numpy()
    tempered_N = (logits_NV / temperature).log_softmax(-1).gather(1, next_N1)[:, 0].double().cpu().numpy()
    routes = None if recorder is None else recorder.take()[0].cpu().numpy()
    return TrainedScores(
        given_T=raw_N[: given - 1], tempered_S=tempered_N[given - 1 :], raw_S=raw_N[given - 1 :], experts_TLK=routes
    )
