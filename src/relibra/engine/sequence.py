"""`Sequence`: a prompt, how its tokens are sampled, and all that a step of the engine adds to it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
from numpy import ndarray

from relibra.engine.philox import sampling_key

FinishReason = Literal["stop", "length", "abort", "cancelled", "error", "lost"]
"""Why a sequence ends: "abort": paused, "cancelled": not wanted, "error": bad log-probs, "lost": a worker failed."""


@dataclass(frozen=True, kw_only=True)
class SamplingParameters:
    """How tokens are chosen.

    limit              maximum number of new tokens
    temperature        0: the most likely token
    top_p              choose from the fewest most likely tokens whose probabilities sum to at least this
    top_k              most likely tokens to choose from; 0: all
    seed               with `sample` and the token's position, determines the random numbers
    sample             number of the sequence among those with this seed
    position           of the first new token in its response
    stop_ids           tokens that end the sequence
    top_log_probs      number of most likely tokens whose log-probs are returned with each sampled token
    routes             record the experts of every token fed
    prompt_log_probs   score the tokens of the prompt, at temperature 1
    """

    limit: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    sample: int = 0
    position: int = 0
    stop_ids: tuple[int, ...] = ()
    top_log_probs: int = 0
    routes: bool = False
    prompt_log_probs: bool = False


@dataclass(eq=False, kw_only=True)
class Sequence:
    """A request and its state.

    number      unique within an engine
    tokens      sampled so far
    log_probs   of each in the distribution that it was drawn from: after temperature, top-k and top-p
    top         most likely tokens at the place of the latest one, with their log-probs
    fed         tokens in the KV cache
    experts     routes of each piece that was fed, where they are asked for
    scores      log-probs of pieces of the prompt, from its second token on, where they are asked for
    finish      None: it goes on
    error       sentence, where it ends by "error" or "lost"
    """

    number: int
    prompt: tuple[int, ...]
    sampling: SamplingParameters
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    top: list[tuple[int, float]] = field(default_factory=list)
    fed: int = 0
    experts: list[ndarray] = field(default_factory=list)
    scores: list[ndarray] = field(default_factory=list)
    finish: FinishReason | None = None
    error: str = ""

    @cached_property
    def key(self) -> tuple[int, int]:
        """Key of its random numbers."""
        return sampling_key(self.sampling.seed)

    @property
    def length(self) -> int:
        """Tokens of prompt and response."""
        return len(self.prompt) + len(self.tokens)

    @property
    def longest(self) -> int:
        """Tokens of prompt and response if it ends at its limit."""
        return len(self.prompt) + self.sampling.limit

    @property
    def latest(self) -> int:
        """The token that is fed next."""
        return self.tokens[-1] if self.tokens else self.prompt[-1]

    @property
    def routes(self) -> ndarray | None:
        """Experts `[m, L, K]` of every token fed; None: not asked for, or nothing is fed yet."""
        return np.concatenate(self.experts) if self.experts else None

    def add(self, token: int, log_prob: float) -> None:
        """Append a token; the sequence ends where it is a stop token, the last allowed, or its log-prob not finite."""
        self.tokens.append(token)
        self.log_probs.append(log_prob)
        if not math.isfinite(log_prob):
            self.finish = "error"
            position = self.sampling.position + len(self.tokens) - 1
            self.error = (
                f"the model gives token {position} of the response the log-prob {log_prob}: its weights are broken"
            )
        elif token in self.sampling.stop_ids:
            self.finish = "stop"
        elif len(self.tokens) == self.sampling.limit:
            self.finish = "length"

    def can_reuse_prompt(self, other: Sequence) -> bool:
        """Return whether `other` has the same prompt, and its routes if they are asked for; scores are never reused."""
        recorded = (other.sampling.routes or not self.sampling.routes) and not self.sampling.prompt_log_probs
        return recorded and self.prompt == other.prompt
