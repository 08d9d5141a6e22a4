"""`Generator`: runs what an HTTP request asks for, and says what has been added to its choices."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from relibra.serving.engine.request import SamplingParameters
from relibra.serving.server.admission import Admission
from relibra.serving.server.metrics import FrontMetrics
from relibra.serving.server.refusals import BadRequest, Refusal, Unavailable
from relibra.serving.server.text import AnswerText, TextCodec
from relibra.serving.server.workers.connection import Mailbox, SampleGroup, Step

MOST_CHOICES = 256
"""Choices of one request: prompts times `n`."""
LEAST_LOG_PROB = -9999.0
"""Stands for minus infinity, which JSON does not have."""


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """What an endpoint has read from a body.

    samples   answers per prompt
    sampling  of all of them
    stops     texts that end an answer
    client    whom it counts for
    """

    prompts: Sequence[Sequence[int]]
    samples: int
    sampling: SamplingParameters
    stops: Sequence[str] = ()
    client: str = ""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What has been added to a choice since the last piece.

    tops                likeliest tokens and their log-probs, of each token
    finish              why the choice has ended; None: it goes on
    stopped_by          stop text that ended it; None: something else did, or it goes on
    routes              base64 of a .npy, at the end, where asked for
    prompt_log_probs    of the prompt, in the first piece, where asked for
    """

    index: int
    first: bool
    text: str
    tokens: list[int]
    log_probs: list[float]
    tops: list[list[tuple[int, float]]]
    finish: str | None
    stopped_by: str | None
    routes: str | None
    prompt_log_probs: list[float] | None


@dataclass(eq=False)
class Choice:
    """One answer as it grows; `take` returns what is new.

    num_tokens   of the answer so far
    """

    index: int
    prompt: Sequence[int]
    answer: AnswerText
    began: float
    num_tokens: int = 0
    finish: str | None = None
    _text: str = ""
    _steps: list[Step] = field(default_factory=list)
    _told: bool = False

    def add(self, steps: Sequence[Step]) -> None:
        """Append steps; raises Unavailable or Refusal where they end in an error."""
        last = steps[-1]
        if last.get("finish") == "lost":
            raise Unavailable(last["error"])
        if last.get("finish") == "error":
            raise Refusal(last["error"])
        for step in steps:
            ends = "finish" in step
            shown = [] if step.get("finish") == "stop" else [step["token"]]
            self._text += self.answer.add(shown, last=ends)
            self._steps.append(step)
            self.num_tokens += 1
            self.finish = "stop" if self.answer.stopped else step.get("finish")
            if self.finish is not None:
                return

    def take(self) -> Piece:
        """Return what has been added since the last call."""
        steps, text, first = self._steps, self._text, not self._told
        self._steps, self._text, self._told = [], "", True
        return Piece(
            index=self.index,
            first=first,
            text=text,
            tokens=[step["token"] for step in steps],
            log_probs=[step["log_prob"] for step in steps],
            tops=[[(token, max(value, LEAST_LOG_PROB)) for token, value in step.get("top", ())] for step in steps],
            finish=self.finish,
            stopped_by=self.answer.stopped_by,
            routes=steps[-1].get("routes") if steps else None,
            prompt_log_probs=_finite(steps[0].get("prompt_log_probs")) if steps else None,
        )


@dataclass(frozen=True, eq=False)
class Generator:
    """Runs requests.

    max_length   most tokens of prompt and answer
    """

    admission: Admission
    codec: TextCodec
    metrics: FrontMetrics
    max_length: int

    def begin(self, request: GenerationRequest) -> list[Choice]:
        """Check a request against the limits; return its choices, still empty.

        raises   BadRequest, Overloaded, Unavailable
        """
        total = len(request.prompts) * request.samples
        if total > MOST_CHOICES:
            raise BadRequest(f"{len(request.prompts)} prompts with n {request.samples} are more than {MOST_CHOICES}")
        check_tokens([*request.prompts, request.sampling.stop_ids], self.codec.vocab_size)
        longest = max(map(len, request.prompts)) + request.sampling.limit
        if longest > self.max_length:
            raise BadRequest(
                f"prompt of {longest - request.sampling.limit} tokens and max_tokens {request.sampling.limit} are more "
                f"than {self.max_length}, the longest request of this server: shorten them"
            )
        self.admission.check(total)
        now = time.monotonic()
        return [
            Choice(index, request.prompts[index // request.samples], self._answer(request, index), now)
            for index in range(total)
        ]

    def _answer(self, request: GenerationRequest, index: int) -> AnswerText:
        return AnswerText(self.codec, request.prompts[index // request.samples], request.stops)

    async def run(self, request: GenerationRequest, choices: Sequence[Choice]) -> AsyncGenerator[list[Choice], None]:
        """Yield the choices that grew, until all have ended; closing the generator cancels those that have not.

        raises   Unavailable where workers are lost, or the time is over
        """
        mailbox, admission = Mailbox(), self.admission
        until = asyncio.get_running_loop().time() + admission.limits.deadline
        groups = [
            SampleGroup(
                tokens=tokens,
                sampling=request.sampling,
                samples=request.samples,
                first=number * request.samples,
                client=request.client,
                mailbox=mailbox,
            )
            for number, tokens in enumerate(request.prompts)
        ]
        for group in groups:
            admission.submit(group)
        try:
            unfinished = len(choices)
            while unfinished:
                grown = self._add(await self._take(mailbox, until), choices)
                for choice in grown:
                    if choice.finish is not None:
                        unfinished -= 1
                        admission.clients.cancel(groups[choice.index // request.samples], choice.index)
                yield grown
        finally:
            for group in groups:
                admission.release(group)

    async def _take(self, mailbox: Mailbox, until: float) -> list[tuple[int, Step]]:
        try:
            async with asyncio.timeout_at(until):
                return await mailbox.take()
        except TimeoutError as error:
            raise Unavailable(
                f"the answer did not end within {self.admission.limits.deadline:g} s (--deadline): send fewer requests "
                "at once, or ask for fewer tokens",
                retry_after=1,
            ) from error

    def _add(self, steps: list[tuple[int, Step]], choices: Sequence[Choice]) -> list[Choice]:
        """Add steps to their choices; return those that grew."""
        of_choice: dict[int, list[Step]] = {}
        for index, step in steps:
            of_choice.setdefault(index, []).append(step)
        grown = []
        for index, own in of_choice.items():
            choice = choices[index]
            if choice.finish is None:
                before = choice.num_tokens
                choice.add(own)
                self.metrics.count(choice, before)
                grown.append(choice)
        return grown


def _finite(log_probs: list[float] | None) -> list[float] | None:
    return None if log_probs is None else [max(one, LEAST_LOG_PROB) for one in log_probs]


def check_tokens(prompts: Sequence[Sequence[int]], vocab_size: int) -> None:
    """Raise BadRequest for an empty prompt, and for tokens that the model does not know."""
    *own, stops = prompts
    if not own or not all(map(len, own)):
        raise BadRequest("the prompt is empty: send at least one token")
    for tokens in (*own, stops):
        if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
            raise BadRequest(f"there is a token that is not 0 to {vocab_size - 1}, which the model knows")
