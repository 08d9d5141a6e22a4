"""The token endpoints of SGLang and vLLM: what is sent, and what an answer holds; `engine.py` checks it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import UInt8
from numpy import ndarray

from relibra.routing.readers.encodings.base64_text import decode_base64
from relibra.routing.readers.npz_arrays import parse_npy

Dialect = Literal["sglang", "vllm"]
PATHS: dict[Dialect, str] = {"sglang": "/generate", "vllm": "/inference/v1/generate"}
HEALTH_PATHS: dict[Dialect, str] = {"sglang": "/ready", "vllm": "/health"}
"""SGLang's `/health` samples a token and takes a second; `/ready` says what it knows."""


@dataclass(frozen=True, kw_only=True)
class TokenAnswer:
    """What a server sent, not yet checked.

    reason     why the response ended
    routes     as sent: any shape and type; None where none were asked for
    versions   of the weights that sampled the tokens, where the server says so
    """

    tokens: list[Any]
    log_probs: list[Any]
    reason: Any
    routes: ndarray | None
    versions: tuple[str, ...] = ()


def request_body(
    dialect: Dialect,
    tokens: Sequence[int],
    *,
    limit: int,
    seed: int,
    temperature: float,
    stop_ids: Sequence[int],
    wants_routes: bool,
) -> dict[str, Any]:
    """Return the JSON of a request for at most `limit` tokens after others, and the experts of all of them."""
    sampling = {"temperature": temperature, "top_p": 1.0, "stop_token_ids": list(stop_ids)}
    if dialect == "sglang":
        return {
            "input_ids": list(tokens),
            "sampling_params": {**sampling, "max_new_tokens": limit, "top_k": -1, "sampling_seed": seed},
            "return_logprob": True,
            "return_routed_experts": wants_routes,
        }
    return {
        "token_ids": list(tokens),
        "sampling_params": {**sampling, "max_tokens": limit, "logprobs": 0, "seed": seed, "detokenize": False},
    }


def read_answer(dialect: Dialect, body: Any, *, wants_routes: bool) -> TokenAnswer:
    """Return what an answer holds; log-probs are taken out of it, which frees them before the routes are decoded.

    raises    KeyError, IndexError, TypeError, AttributeError or ValueError for an answer of another form
    """
    if dialect == "sglang":
        about = body["meta_info"]
        both = [(pair[0], pair[1]) for pair in about.pop("output_token_logprobs")]  # (log-prob, token, text)
        return TokenAnswer(
            tokens=[token for _, token in both],
            log_probs=[log_prob for log_prob, _ in both],
            reason=about["finish_reason"]["type"],
            routes=np.frombuffer(_decoded(about["routed_experts"]), dtype="<i4") if wants_routes else None,
            versions=_versions_of(about),
        )
    choice = body["choices"][0]
    return TokenAnswer(
        tokens=list(choice["token_ids"]),
        log_probs=[one["logprob"] for one in choice.pop("logprobs")["content"]],
        reason=choice["finish_reason"],
        routes=parse_npy(_decoded(choice["routed_experts"])) if wants_routes else None,
        versions=_versions_of(choice),
    )


def _versions_of(about: Any) -> tuple[str, ...]:
    """Return the versions that sampled parts of an answer; of a server that tells no parts, the last one."""
    spans = about.get("weight_versions")
    if spans:
        return tuple(str(span["version"])[:80] for span in spans)
    return (str(about["weight_version"])[:80],) if about.get("weight_version") is not None else ()


def scoring_body(dialect: Dialect, tokens: Sequence[int]) -> dict[str, Any]:
    """Return the JSON of a request for the log-probs of given tokens at temperature 1; it reads no cache."""
    if dialect == "sglang":
        return {
            "input_ids": list(tokens),
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
    return {
        "token_ids": list(tokens),
        "sampling_params": {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "detokenize": False},
    }


def read_scores(dialect: Dialect, body: Any, tokens: Sequence[int]) -> list[float]:
    """Return the log-probs of all tokens but the first.

    raises    KeyError, IndexError, TypeError, AttributeError or ValueError for an answer of another form
    """
    listed = body["meta_info"]["input_token_logprobs"] if dialect == "sglang" else body["prompt_logprobs"]
    if len(listed) != len(tokens):
        raise ValueError(f"log-probs of {len(listed)} of {len(tokens)} tokens")
    later = list(zip(listed[1:], tokens[1:], strict=True))
    if dialect == "sglang":  # (log-prob, token, text)
        if any(one[1] != token for one, token in later):
            raise ValueError("log-probs of other tokens than were sent")
        found = [one[0] for one, _ in later]
    else:
        found = [one[str(token)]["logprob"] for one, token in later]
    if not all(isinstance(value, int | float) for value in found):
        raise TypeError("log-probs are no numbers")
    return [float(value) for value in found]


def _decoded(text: Any) -> UInt8[ndarray, " X"]:
    """Return the bytes of a text in base64, a view of the answer where it is long.

    raises    TypeError or ValueError for anything else
    """
    if not isinstance(text, str | memoryview):
        raise TypeError(f"routed_experts is {type(text).__name__}, not text")
    return decode_base64("routed_experts", text.encode() if isinstance(text, str) else text)
