"""Client of served engines: the token endpoints of SGLang and vLLM, and their weight updates."""

from __future__ import annotations

import base64
import http.client
import io
import json
import time
import urllib.error
import urllib.request
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
from relibra.routing.trace import expert_dtype

ATTEMPTS = 4
"""Attempts per request; a server that starts, restarts or is full may answer a later one."""
_PAUSE_SECONDS = 0.5


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
    timeout_seconds   of one request

    Log-probs have to be those of the tempered policy: vLLM needs `--logprobs-mode processed_logprobs`. A server does
    not report slots, so the cost is the least that `max_batch` of them could have taken.
    """

    url: str
    dialect: Literal["sglang", "vllm"]
    routes: ServedRoutes | None
    stop_ids: tuple[int, ...]
    temperature: float
    seed: int
    max_batch: int = 256
    timeout_seconds: float = 600.0

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
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise EngineError(
                f"{self.url} answered without the requested fields ({error!r}): start it with log-probs and routed "
                f"experts, and check that it speaks the dialect {self.dialect!r}"
            ) from error
        if not (reason == "stop" and 0 < len(tokens) <= limit) and not (reason == "length" and len(tokens) == limit):
            raise EngineError(
                f"{self.url} gave sample {response.sample_id} {len(tokens)} of {limit} tokens, ended by {reason!r}: "
                "expected 'stop', or 'length' at the last of them; look at its longest context and its log"
            )
        if len(log_probs) != len(tokens) or not np.isfinite(log_probs).all():
            raise EngineError(
                f"{self.url} gave {len(tokens)} tokens and {len(log_probs)} log-probs, or not finite ones"
            )
        return Window(
            tokens_w=np.array(tokens, dtype=np.int64),
            log_probs_w=np.array(log_probs, dtype=np.float32),
            experts_mLK=self._checked(routes, len(response.tokens_n) + len(tokens) - 1),
            stopped=reason == "stop",
        )

    def _checked(self, ids: ndarray | None, rows: int) -> Shaped[ndarray, "m L K"] | None:
        """Return the routes of the layers with experts in the narrowest type."""
        if self.routes is None:
            return None
        shape, own = self.routes, len(self.routes.layer_ids)
        assert ids is not None, "the request asked for routes"
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
        return ids.astype(expert_dtype(shape.num_experts))


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
    if not (answer := _post(engine, "/update_weights_from_disk", body)).get("success"):
        raise EngineError(f"{engine.url} did not load {folder}: {answer.get('message', answer)}")


_Answer = tuple[list[int], list[float], str, ndarray | None]


def _ask_sglang(engine: ServerEngine, tokens: list[int], limit: int, seed: int) -> _Answer:
    sampling = {"max_new_tokens": limit, "temperature": engine.temperature, "top_p": 1.0, "top_k": -1}
    body = {
        "input_ids": tokens,
        "sampling_params": {**sampling, "stop_token_ids": list(engine.stop_ids), "sampling_seed": seed},
        "return_logprob": True,
        "return_routed_experts": engine.routes is not None,
    }
    about = _post(engine, "/generate", body)["meta_info"]
    pairs = about["output_token_logprobs"]  # (log-prob, token, text)
    flat = None
    if engine.routes is not None:
        flat = np.frombuffer(base64.b64decode(about["routed_experts"]), dtype="<i4")
    return [int(pair[1]) for pair in pairs], [float(pair[0]) for pair in pairs], about["finish_reason"]["type"], flat


def _ask_vllm(engine: ServerEngine, tokens: list[int], limit: int, seed: int) -> _Answer:
    sampling = {"max_tokens": limit, "temperature": engine.temperature, "top_p": 1.0, "logprobs": 1, "seed": seed}
    body = {"token_ids": tokens, "sampling_params": {**sampling, "stop_token_ids": list(engine.stop_ids)}}
    choice = _post(engine, "/inference/v1/generate", body)["choices"][0]
    log_probs = [float(one["logprob"]) for one in choice["logprobs"]["content"]]
    routes = None
    if engine.routes is not None:
        routes = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])), allow_pickle=False)
    return [int(token) for token in choice["token_ids"]], log_probs, choice["finish_reason"], routes


def _post(engine: ServerEngine, path: str, body: dict[str, Any]) -> Any:
    """Send JSON and return the JSON of the answer; try again after errors that may pass."""
    url = engine.url.rstrip("/") + path
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # engines run beside the trainer
    failure: object = None
    for attempt in range(ATTEMPTS):
        time.sleep(_PAUSE_SECONDS * (2**attempt - 1))
        try:
            request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
            with opener.open(request, timeout=engine.timeout_seconds) as answer:
                return json.loads(answer.read() or b"{}")
        except urllib.error.HTTPError as error:
            with error:
                failure = f"status {error.code}, {error.read(300).decode(errors='replace')!r}"
            if error.code not in (429, 502, 503, 504):
                break
        except (OSError, http.client.HTTPException, ValueError) as error:
            failure = f"{type(error).__name__}: {error}"
            if isinstance(error, ValueError) or isinstance(getattr(error, "reason", error), TimeoutError):
                break  # no JSON, or a timeout
    raise EngineError(f"{url} failed the last of up to {ATTEMPTS} attempts: {failure}; look at its log")
