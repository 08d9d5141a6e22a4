"""`GenerateRequest`: what is asked of an engine, and `Progress`: what a step adds to the answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float32, Shaped
from numpy import ndarray

FinishReason = Literal["stop", "length", "cancelled", "error", "lost"]
"""Why an answer ends; "error": its own numbers are broken, "lost": the experts do not answer any more."""


@dataclass(frozen=True, kw_only=True)
class SamplingParameters:
    """How tokens are chosen.

    limit         most new tokens
    temperature   0: the most likely token
    top_p         of the tokens by falling probability, the first whose sum reaches this
    top_k         most likely tokens to choose from; 0: all
    seed          with `sample` and the token's position, determines the random numbers
    sample        number of the answer among those of a prompt
    stop_ids      tokens that end the answer
    top_log_probs  most likely tokens whose log-probs are told with each token
    routes        the experts of every token are told at the end
    prompt_log_probs  log-probs of the prompt's tokens at temperature 1 are told with the first token
    """

    limit: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    sample: int = 0
    stop_ids: tuple[int, ...] = ()
    top_log_probs: int = 0
    routes: bool = False
    prompt_log_probs: bool = False


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """Tokens to go on from; `number` is unique within an engine."""

    number: int
    tokens: tuple[int, ...]
    sampling: SamplingParameters


@dataclass(frozen=True, kw_only=True)
class Progress:
    """A token of an answer, or its end.

    token        None: an end without a token (cancelled, error)
    log_prob     of the token in the distribution that it was drawn from: after temperature, top-k and top-p
    top          most likely tokens with their log-probs
    finish       why the answer ends with this; None: it goes on
    routes       at the end, if asked for: experts of every token fed, in ascending layers
    prompt_log_probs  with the first token, if asked for: of all tokens of the prompt but the first
    error        sentence, where `finish` is "error" or "lost"
    """

    number: int
    token: int | None = None
    log_prob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()
    finish: FinishReason | None = None
    routes: Shaped[ndarray, "m L K"] | None = None
    prompt_log_probs: Float32[ndarray, " n"] | None = None
    error: str = ""
