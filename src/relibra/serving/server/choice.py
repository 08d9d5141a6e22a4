"""`Choice`: one answer of a request and all of its state at the API server, from the queue to the last event."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence as Several
from dataclasses import dataclass, field, replace

from fastapi import HTTPException

from relibra.engine.sequence import FinishReason, SamplingParameters, Sequence
from relibra.serving.channel import Progress
from relibra.serving.server.text import AnswerText, TextCodec

MOST_CHOICES = 256
"""Choices of one request: prompts times `n`."""
READ_AT_ONCE = 32
"""Most `Progress` that one `read` takes in; many may wait for a client that reads slowly."""
LEAST_LOG_PROB = -9999.0
"""Stands for minus infinity, which JSON does not have."""


@dataclass(eq=False, kw_only=True)
class Choice:
    """An answer: what a worker is asked for, and what has come of it.

    index        among the choices of its request
    prompt       the same object for all samples of a prompt
    arrived      is set when something has come for any choice of the request
    number       at its worker; None: it has not begun
    num_tokens   so far
    new          progress that no event has sent to the client yet, and `new_text` its text
    offsets      where the text of each token of `new` begins in that of the answer, in characters
    first        no event has been sent
    echo         text of the prompt, where the answer repeats it; None: not known yet
    """

    index: int
    prompt: tuple[int, ...]
    sampling: SamplingParameters
    answer: AnswerText
    arrived: asyncio.Event
    began: float = field(default_factory=time.monotonic)
    number: int | None = None
    num_tokens: int = 0
    finish: str | None = None
    new: list[Progress] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    new_text: str = ""
    first: bool = True
    echo: str | None = None
    _unread: list[Progress] = field(default_factory=list)
    _held: deque[tuple[int, Progress]] = field(default_factory=deque)

    @property
    def entries(self) -> int:
        """Numbers and names to write for what is new; plain tokens of the prompt and bytes of routes count less."""
        prompt = len(self.prompt) >> (0 if self.sampling.prompt_log_probs else 4) if self.first else 0
        return prompt + len(self.new) * (1 + self.sampling.top_log_probs) + (len(self.routes or b"") >> 11)

    def request(self, number: int) -> Sequence:
        """Return what a worker is asked for."""
        self.number = number
        return Sequence(number=number, prompt=self.prompt, sampling=self.sampling)

    def put(self, progress: Progress) -> None:
        """Add progress for a later `read`: nobody waits for a slow client; its answer's length bounds what waits."""
        self._unread.append(progress)
        self.arrived.set()

    def end(self, finish: FinishReason, error: str = "") -> None:
        """End with an error sentence; without one, with the tokens that have come."""
        self.put(Progress(number=-1, finish=finish, error=error))

    def read(self) -> bool:
        """Take in up to `READ_AT_ONCE` progress; return whether there was some; raises HTTPException for an error."""
        unread, self._unread = self._unread[:READ_AT_ONCE], self._unread[READ_AT_ONCE:]
        if not unread or self.finish is not None:
            return False
        if self._unread:
            self.arrived.set()  # the rest is read after others had their turn
        if unread[-1].error:
            raise HTTPException(503 if unread[-1].finish == "lost" else 500, unread[-1].error)
        for progress in unread:
            self._held.append((self.answer.length, progress))
            tokens, finish = [] if progress.token is None else [progress.token], progress.finish
            self.new_text += self.answer.add(tokens, last=finish is not None, stops=finish == "stop")
            self.num_tokens += progress.token is not None
            self.finish = "stop" if self.answer.stopped_by is not None else progress.finish
            if self.finish is not None:
                break
        # A token waits while its text begins behind the certain characters: a stop text may still cut it off.
        while self._held and (self.finish is not None or self._held[0][0] <= self.answer.sent):
            offset, progress = self._held.popleft()
            self.new.append(progress)
            self.offsets.append(min(offset, self.answer.sent))
        return True

    def clear(self) -> None:
        """Forget what an event has sent."""
        self.new, self.offsets, self.new_text, self.first = [], [], "", False

    @property
    def tokens(self) -> list[int]:
        """New tokens."""
        return [progress.token for progress in self.new if progress.token is not None]

    @property
    def log_probs(self) -> list[float]:
        """Of the new tokens."""
        return [progress.log_prob for progress in self.new if progress.token is not None]

    @property
    def tops(self) -> list[list[tuple[int, float]]]:
        """Likeliest tokens and their log-probs at each new token."""
        return [
            [(token, max(value, LEAST_LOG_PROB)) for token, value in progress.top]
            for progress in self.new
            if progress.token is not None
        ]

    @property
    def routes(self) -> bytes | None:
        """With the last token, where asked for: a .npy file."""
        return self.new[-1].routes if self.new else None

    @property
    def prompt_log_probs(self) -> list[float] | None:
        """With the first token, where asked for."""
        scores = self.new[0].prompt_log_probs if self.new else None
        return None if scores is None else [max(score, LEAST_LOG_PROB) for score in scores]


def make_choices(
    codec: TextCodec,
    prompts: Several[Several[int]],
    samples: int,
    sampling: SamplingParameters,
    stops: Several[str],
    max_length: int,
    **how: bool,
) -> list[Choice]:
    """Return the choices of a request, still empty.

    samples      answers per prompt
    stops        texts that end an answer
    how          as of `AnswerText`
    max_length   most tokens of prompt and answer
    raises       HTTPException (400) for an empty prompt, unknown tokens, or more tokens than fit
    """
    if not prompts or not all(map(len, prompts)):
        raise HTTPException(400, "the prompt is empty: send at least one token")
    for tokens in (*prompts, sampling.stop_ids):
        if tokens and not 0 <= min(tokens) <= max(tokens) < codec.vocab_size:
            raise HTTPException(400, f"there is a token that is not 0 to {codec.vocab_size - 1}, which the model knows")
    longest = max(map(len, prompts))
    if longest + sampling.limit > max_length:
        raise HTTPException(
            400,
            f"prompt of {longest} tokens and max_tokens {sampling.limit} are more than {max_length}, the longest "
            "request of this server: shorten them",
        )
    arrived, shared = asyncio.Event(), [tuple(prompt) for prompt in prompts]
    special_of_stops = codec.special_tokens(stops)
    return [
        Choice(
            index=index,
            prompt=shared[index // samples],
            sampling=replace(sampling, sample=index % samples),
            answer=AnswerText(codec, shared[index // samples], special_of_stops, **how),
            arrived=arrived,
        )
        for index in range(len(prompts) * samples)
    ]
