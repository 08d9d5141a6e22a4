"""Client of served engines: the token endpoints of SGLang and vLLM, and their weight updates."""

from __future__ import annotations

import base64
import binascii
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Shaped
from numpy import ndarray
from safetensors import SafetensorError

from relibra.errors import EngineError
from relibra.rl.rollout.philox import uniform_numbers
from relibra.rl.rollout.response import Response, RolloutCost, Window
from relibra.rl.rollout.server_requests import RequestFailed, post_json
from relibra.routing.readers.npz_arrays import parse_npy
from relibra.routing.trace import expert_dtype, first_illegal_row

ATTEMPTS = 4
"""Attempts per request; a server that starts, restarts or is full may answer a later one."""
TIMED_OUT_ATTEMPTS = 2
"""Attempts where the time ran out, which may take long each."""
FULL_LENGTH = 1024
"""Tokens of a request that has `timeout_seconds`; longer ones get proportionally more."""
LARGEST_LOG_PROB, LEAST_LOG_PROB = 1e-3, -1e6
"""Log-probs are at most 0, up to rounding."""
PAUSE_SECONDS = 0.5
_FIXED_BYTES, _TOKEN_BYTES, _ROUTE_BYTES = 1 << 20, 1 << 10, 11
"""Largest answer: fixed part, of each token with its text and log-prob, of each choice (8 bytes in base64)."""


@dataclass(frozen=True, kw_only=True)
class ServedRoutes:
    """Shape of the routes of a served model; servers report all decoder layers, or only those with experts."""

    num_experts: int
    layer_ids: tuple[int, ...]
    num_layers: int
    top_k: int


@dataclass(frozen=True, kw_only=True)
class ServerEngine:
    """Samples from a server that was started with routed experts switched on (`--enable-return-routed-experts`).

    url               of the server, as in http://127.0.0.1:30000
    dialect           "sglang": /generate; "vllm": /inference/v1/generate
    routes            None: a model without experts
    seed              one seed per request follows from it; equal samples need a server in its deterministic mode
    max_batch         requests under way at once
    vocab_size        of the model; a server that sends other tokens is refused
    timeout_seconds   of one request for up to FULL_LENGTH tokens; `request_seconds` scales it

    Log-probs have to be those of the tempered policy: vLLM needs `--logprobs-mode processed_logprobs`. A server does
    not report slots, so the cost is the least that `max_batch` of them could have taken.
    """

    url: str
    dialect: Literal["sglang", "vllm"]
    routes: ServedRoutes | None
    stop_ids: tuple[int, ...]
    vocab_size: int
    temperature: float
    seed: int
    max_batch: int = 256
    timeout_seconds: float = 600.0

    def request_seconds(self, num_tokens: int) -> float:
        """Return the seconds that a request for so many new tokens may take."""
        return self.timeout_seconds * max(1.0, num_tokens / FULL_LENGTH)

    def max_answer_bytes(self, num_tokens: int, rows: int) -> int:
        """Return the largest answer that is read, for new tokens and rows of routes."""
        choices = rows * self.routes.num_layers * self.routes.top_k if self.routes else 0
        return _FIXED_BYTES + _TOKEN_BYTES * num_tokens + _ROUTE_BYTES * choices

    def generate(
        self, responses: Sequence[Response], *, window: int, max_response: int, spare: Iterator[Response] | None = None
    ) -> tuple[list[Window], RolloutCost]:
        """Add up to `window` tokens to each response, none beyond `max_response`; see `RolloutEngine`.

        raises    EngineError when the server cannot be reached, refuses, or answers in another form than requested
        """
        assert spare is None, "the settings refuse rollout.refill with a server, which counts no decode steps"
        slots = min(self.max_batch, len(responses))
        with ThreadPoolExecutor(max_workers=max(1, slots)) as threads:
            limits = [min(window, max_response - response.length) for response in responses]
            pending = [threads.submit(self._window, *pair) for pair in zip(responses, limits, strict=True)]
            try:
                windows = [one.result() for one in pending]
            finally:
                threads.shutdown(cancel_futures=True)  # after a failure, requests not yet sent are dropped
        lengths = [len(one.tokens_w) for one in windows]
        steps = max(max(lengths, default=0), -(-sum(lengths) // max(1, slots)))
        prefilled = sum(len(response.tokens_n) for response in responses)
        return windows, RolloutCost(
            decode_steps=steps,
            passes=None,
            slot_steps=steps * slots,
            busy_slot_steps=sum(lengths),
            prefilled_tokens=prefilled,
        )

    def _window(self, response: Response, limit: int) -> Window:
        share = uniform_numbers(self.seed, np.array([response.sample_id]), np.array([response.length]))[0]
        ask = _ask_sglang if self.dialect == "sglang" else _ask_vllm
        try:
            tokens, log_probs, reason, routes = ask(self, response.tokens_n.tolist(), limit, int(share * (1 << 31)))
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            raise EngineError(
                f"{self.url} answered without the requested fields ({error!r}): start it with log-probs and routed "
                f"experts, and check that it speaks the dialect {self.dialect!r}"
            ) from error
        if not (reason == "stop" and 0 < len(tokens) <= limit) and not (reason == "length" and len(tokens) == limit):
            raise EngineError(
                f"{self.url} gave sample {response.sample_id} {len(tokens)} of {limit} tokens, ended by "
                f"{_shown(reason)}: expected 'stop', or 'length' at the last of them; look at its longest context and "
                "its log"
            )
        self._check_tokens(tokens, log_probs)
        return Window(
            tokens_w=np.array(tokens, dtype=np.int64),
            log_probs_w=np.array(log_probs, dtype=np.float32),
            experts_mLK=self._checked(routes, len(response.tokens_n) + len(tokens) - 1),
            stopped=reason == "stop",
        )

    def _check_tokens(self, tokens: list[Any], log_probs: list[Any]) -> None:
        """Raise EngineError for tokens outside of the vocabulary, and for what is no log-prob."""
        for token in tokens:
            if type(token) is not int or not 0 <= token < self.vocab_size:
                raise EngineError(
                    f"{self.url} gave the token {_shown(token)}: expected whole numbers from 0 to "
                    f"{self.vocab_size - 1}, the vocabulary; does it serve this model?"
                )
        for value in log_probs:
            if type(value) not in (int, float) or not LEAST_LOG_PROB <= value <= LARGEST_LOG_PROB:
                raise EngineError(
                    f"{self.url} gave the log-prob {_shown(value)}: expected finite numbers up to 0; start it with "
                    "log-probs of the tempered policy"
                )
        if len(log_probs) != len(tokens):
            raise EngineError(f"{self.url} gave {len(tokens)} tokens and {len(log_probs)} log-probs: expected one each")

    def _checked(self, ids: ndarray | None, rows: int) -> Shaped[ndarray, "m L K"] | None:
        """Return the routes of the layers with experts in the narrowest type."""
        if self.routes is None:
            return None
        shape, own = self.routes, len(self.routes.layer_ids)
        assert ids is not None, "the request asked for routes"
        if ids.dtype.kind not in "iu":
            raise EngineError(f"{self.url} sent routes of type {ids.dtype}: expected whole numbers, the ids of experts")
        if ids.ndim == 1 and ids.size % (rows * shape.top_k) == 0:  # SGLang sends no shape
            ids = ids.reshape(rows, -1, shape.top_k)
        if ids.shape not in ((rows, shape.num_layers, shape.top_k), (rows, own, shape.top_k)):
            raise EngineError(
                f"{self.url} sent routes of shape {ids.shape}: expected {rows} rows, one less "
                f"than tokens, of {shape.num_layers} or {own} layers and {shape.top_k} choices"
            )
        ids = ids[:, list(shape.layer_ids)] if ids.shape[1] == shape.num_layers else ids
        if ids.size and not 0 <= ids.min() <= ids.max() < shape.num_experts:
            raise EngineError(f"{self.url} sent expert ids {ids.min()}..{ids.max()} of {shape.num_experts} experts")
        ids = np.ascontiguousarray(ids.astype(expert_dtype(shape.num_experts)))
        row, layer, fault = first_illegal_row(ids, np.ones(rows, dtype=bool), shape.num_experts)
        if fault:
            raise EngineError(f"{self.url} sent the expert ids {ids[row, layer].tolist()} of a token: they must differ")
        return ids


def publish_weights(model: Any, folder: Path, engine: ServerEngine, weight_version: int) -> None:
    """Write a `transformers` model as a plain folder, let the server load it, and drop the server's caches.

    folder    visible to the server under the same path; vLLM must have been started from it, with
              VLLM_SERVER_DEV_MODE=1, because it reloads from its start folder
    raises    EngineError when the folder cannot be written or the server does not load it
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(folder)  # not atomic: the server reads it only on request
    except (OSError, SafetensorError) as error:
        raise EngineError(f"cannot write weights for {engine.url} into {folder}: {error}") from error
    if engine.dialect == "vllm":
        _post(engine, "/collective_rpc", {"method": "reload_weights"})
        _post(engine, "/reset_prefix_cache", {})
        return
    body = {"model_path": str(folder), "weight_version": str(weight_version), "flush_cache": True}
    answer = _post(engine, "/update_weights_from_disk", body)
    if not isinstance(answer, dict) or answer.get("success") is not True:
        said = answer.get("message") if isinstance(answer, dict) else answer
        raise EngineError(f"{engine.url} did not load {folder}: {_shown(said, 300)}")


_Answer = tuple[list[Any], list[Any], Any, ndarray | None]
"""Tokens, log-probs, reason of the end, routes: as the server sent them, not yet checked."""


def _ask_sglang(engine: ServerEngine, tokens: list[int], limit: int, seed: int) -> _Answer:
    sampling = {"max_new_tokens": limit, "temperature": engine.temperature, "top_p": 1.0, "top_k": -1}
    body = {
        "input_ids": tokens,
        "sampling_params": {**sampling, "stop_token_ids": list(engine.stop_ids), "sampling_seed": seed},
        "return_logprob": True,
        "return_routed_experts": engine.routes is not None,
    }
    about = _post(engine, "/generate", body, limit, len(tokens) + limit)["meta_info"]
    pairs = about["output_token_logprobs"]  # (log-prob, token, text)
    flat = None
    if engine.routes is not None:
        flat = np.frombuffer(_decoded(about["routed_experts"]), dtype="<i4")
    return [pair[1] for pair in pairs], [pair[0] for pair in pairs], about["finish_reason"]["type"], flat


def _ask_vllm(engine: ServerEngine, tokens: list[int], limit: int, seed: int) -> _Answer:
    sampling = {"max_tokens": limit, "temperature": engine.temperature, "top_p": 1.0, "logprobs": 1, "seed": seed}
    body = {"token_ids": tokens, "sampling_params": {**sampling, "stop_token_ids": list(engine.stop_ids)}}
    choice = _post(engine, "/inference/v1/generate", body, limit, len(tokens) + limit)["choices"][0]
    log_probs = [one["logprob"] for one in choice["logprobs"]["content"]]
    routes = None
    if engine.routes is not None:
        routes = parse_npy(_decoded(choice["routed_experts"]))
    return list(choice["token_ids"]), log_probs, choice["finish_reason"], routes


def _shown(value: Any, longest: int = 40) -> str:
    """Return a value of an answer for a message: the type of what may be long or deep."""
    return repr(value)[:longest] if isinstance(value, str | int | float) else f"({type(value).__name__})"


def _decoded(text: Any) -> bytes:
    """Return the bytes of a text in base64; raises TypeError or ValueError for anything else."""
    if not isinstance(text, str):
        raise TypeError(f"routed_experts is {type(text).__name__}, not text")
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"routed_experts is no base64: {error}") from error


def _post(engine: ServerEngine, path: str, body: dict[str, Any], num_tokens: int = 0, rows: int = 0) -> Any:
    """Send JSON and return the JSON of the answer; try again after errors that may pass.

    num_tokens, rows   new tokens and rows of routes that are asked for: they limit time and size of the answer
    """
    url, attempts, attempt = engine.url.rstrip("/") + path, ATTEMPTS, 0
    while True:
        time.sleep(PAUSE_SECONDS * (2**attempt - 1))
        attempt += 1
        try:
            return post_json(
                url,
                body,
                seconds=engine.request_seconds(num_tokens),
                max_bytes=engine.max_answer_bytes(num_tokens, rows),
            )
        except RequestFailed as failure:
            attempts = min(attempts, TIMED_OUT_ATTEMPTS) if failure.timed_out else attempts
            if not failure.may_pass or attempt >= attempts:
                hint = "; increase rollout.timeout_seconds, or" if failure.timed_out else ";"
                raise EngineError(
                    f"{url} failed the last of up to {attempts} attempts: {failure}{hint} look at its log"
                ) from failure
