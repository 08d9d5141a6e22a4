"""The token endpoints of SGLang and vLLM: what is sent, and what is read of an answer; `client.py` checks the values.

Answers are decoded into the types below: what they do not name is passed over, and routes are views of the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from msgspec import Raw, Struct
from numpy import ndarray

from relibra.routing.readers.formats.wire_routes import decode_text
from relibra.routing.readers.npz_arrays import parse_npy

Dialect = Literal["sglang", "vllm"]
PATHS: dict[Dialect, str] = {"sglang": "/generate", "vllm": "/inference/v1/generate"}
HEALTH_PATHS: dict[Dialect, str] = {"sglang": "/ready", "vllm": "/health"}
"""SGLang's `/health` samples a token and takes a second; `/ready` answers from what the server knows already."""
ABORTED = "abort"
"""Why an answer ended that the server was told to cut; it holds what was sampled until then."""
_NULL = Raw(b"null")


class _Span(Struct):
    version: str | int


class _Versions(Struct, kw_only=True):
    weight_version: str | int | None = None
    weight_versions: list[_Span] | None = None


class _Reason(Struct):
    type: str


class _MetaInfo(_Versions, kw_only=True):
    """Log-probs are (log-prob, token, text)."""

    finish_reason: _Reason | None = None
    output_token_logprobs: list[tuple[float, int, str | None]] = []
    input_token_logprobs: list[tuple[float | None, int, str | None]] | None = None
    routed_experts: Raw = _NULL


class SglangAnswer(Struct):
    """An answer of SGLang with new tokens."""

    meta_info: _MetaInfo


class _ScoredInfo(Struct):
    input_token_logprobs: list[tuple[float | None, int, str | None]]


class SglangScores(Struct):
    """An answer of SGLang with the log-probs of given tokens."""

    meta_info: _ScoredInfo


class _LogProb(Struct, gc=False):
    logprob: float


class _LogProbs(Struct):
    content: list[_LogProb]


class _Choice(_Versions, kw_only=True):
    token_ids: list[int]
    logprobs: _LogProbs | None = None
    finish_reason: str | None = None
    routed_experts: Raw = _NULL


class VllmAnswer(Struct):
    """An answer of vLLM with new tokens."""

    choices: list[_Choice]
    prompt_logprobs: list[dict[str, _LogProb] | None] | None = None


class VllmScores(Struct):
    """An answer of vLLM with the log-probs of given tokens."""

    prompt_logprobs: list[dict[str, _LogProb] | None]


ANSWERS: dict[Dialect, type[SglangAnswer | VllmAnswer]] = {"sglang": SglangAnswer, "vllm": VllmAnswer}
SCORES: dict[Dialect, type[SglangScores | VllmScores]] = {"sglang": SglangScores, "vllm": VllmScores}


@dataclass(frozen=True, kw_only=True)
class TokenAnswer:
    """What a server sent; values are not yet checked.

    reason     why the response ended
    routes     as sent: any shape and type; None where none were asked for, or the answer was aborted
    versions   of the weights that sampled the tokens, where the server says so
    given      log-probs of the request's tokens but the first, where they were asked for and the answer is whole
    """

    tokens: list[int]
    log_probs: list[float]
    reason: str | None
    routes: ndarray | None
    versions: tuple[str, ...] = ()
    given: list[float] = field(default_factory=list)


def request_body(
    dialect: Dialect,
    tokens: Sequence[int],
    *,
    limit: int,
    seed: int,
    temperature: float,
    stop_ids: Sequence[int],
    wants_routes: bool,
    wants_scores: bool = False,
    adapter: str | None = None,
) -> dict[str, Any]:
    """Return the JSON of a request for at most `limit` tokens after `tokens`; `wants_routes`: SGLang's asks for routes.

    wants_scores   log-probs of the given tokens too, at temperature 1
    adapter        name of one that the server computes with; None: with its weights alone
    """
    sampling = {"temperature": temperature, "top_p": 1.0, "stop_token_ids": list(stop_ids)}
    if dialect == "sglang":
        return {
            "input_ids": list(tokens),
            "sampling_params": {**sampling, "max_new_tokens": limit, "top_k": -1, "sampling_seed": seed},
            "return_logprob": True,
            **({"logprob_start_len": 0} if wants_scores else {}),
            "return_routed_experts": wants_routes,
            **_naming(dialect, adapter),
        }
    return {
        "token_ids": list(tokens),
        "sampling_params": {**sampling, "max_tokens": limit, "logprobs": 0, "seed": seed, "detokenize": False}
        | ({"prompt_logprobs": 0} if wants_scores else {}),
        **_naming(dialect, adapter),
    }


def _naming(dialect: Dialect, adapter: str | None) -> dict[str, str]:
    return {} if adapter is None else {"lora_path" if dialect == "sglang" else "model": adapter}


def read_answer(answer: SglangAnswer | VllmAnswer, *, wants_routes: bool, scored: Sequence[int] = ()) -> TokenAnswer:
    """Return what an answer holds; raises ValueError where it has no choice, no routes or no scores.

    scored   tokens whose log-probs were asked for
    """
    if isinstance(answer, SglangAnswer):
        about = answer.meta_info
        reason = about.finish_reason.type if about.finish_reason else None
        has_routes = wants_routes and reason != ABORTED
        return TokenAnswer(
            routes=decode_text("routed_experts", about.routed_experts).view("<i4") if has_routes else None,
            tokens=[token for _, token, _ in about.output_token_logprobs],
            log_probs=[log_prob for log_prob, _, _ in about.output_token_logprobs],
            reason=reason,
            versions=_versions_of(about),
            given=read_scores(answer, scored) if scored and reason != ABORTED else [],
        )
    [choice] = answer.choices
    has_routes = wants_routes and choice.finish_reason != ABORTED
    return TokenAnswer(
        routes=parse_npy(decode_text("routed_experts", choice.routed_experts)) if has_routes else None,
        tokens=choice.token_ids,
        log_probs=[one.logprob for one in choice.logprobs.content] if choice.logprobs else [],
        reason=choice.finish_reason,
        versions=_versions_of(choice),
        given=read_scores(answer, scored) if scored and choice.finish_reason != ABORTED else [],
    )


def _versions_of(about: _Versions) -> tuple[str, ...]:
    """Return the versions that sampled parts of an answer; of a server that tells no parts, the last one."""
    told: list[str | int | None] = [span.version for span in about.weight_versions or ()]
    return tuple(str(version)[:80] for version in told or [about.weight_version] if version is not None)


def scoring_body(dialect: Dialect, tokens: Sequence[int], adapter: str | None = None) -> dict[str, Any]:
    """Return the JSON of a request for the log-probs of given tokens at temperature 1; it reads no cache."""
    if dialect == "sglang":
        return {
            "input_ids": list(tokens),
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            **_naming(dialect, adapter),
        }
    return {
        "token_ids": list(tokens),
        "sampling_params": {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "detokenize": False},
        **_naming(dialect, adapter),
    }


def read_scores(answer: SglangScores | SglangAnswer | VllmScores | VllmAnswer, tokens: Sequence[int]) -> list[float]:
    """Return the log-probs of all tokens but the first; raises ValueError where one is missing, or of other tokens."""
    if isinstance(answer, SglangScores | SglangAnswer):
        listed = zip(answer.meta_info.input_token_logprobs or [], tokens, strict=True)
        values = [value if one == token else None for (value, one, _), token in listed]
    else:
        known = zip(answer.prompt_logprobs or [], tokens, strict=True)
        values = [one[str(token)].logprob if one and str(token) in one else None for one, token in known]
    found = [value for value in values[1:] if value is not None]
    if len(found) < len(tokens) - 1:
        raise ValueError(f"log-probs of {len(found)} of {len(tokens) - 1} tokens")
    return found
