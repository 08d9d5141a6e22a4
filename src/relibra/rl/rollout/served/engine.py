"""Client of served engines: windows of responses from the token endpoints of SGLang and vLLM, checked."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from jaxtyping import Shaped
from numpy import ndarray

from relibra.errors import EngineError
from relibra.rl.rollout.philox import uniform_numbers
from relibra.rl.rollout.response import Response, RolloutCost, Window
from relibra.rl.rollout.served.dialects import PATHS, Dialect, TokenAnswer, TokenRequest, read_answer, request_body
from relibra.rl.rollout.served.loading import load_weights, read_version, shown
from relibra.rl.rollout.served.requests import RequestFailed, Restore, ServerAddress, call_server, request_json
from relibra.routing.trace import expert_dtype, first_illegal_row

_log = logging.getLogger(__name__)

FULL_LENGTH = 1024
"""Tokens of a request that has `timeout_seconds`; longer ones get proportionally more."""
LARGEST_LOG_PROB, LEAST_LOG_PROB = 1e-3, -1e6
"""Log-probs are at most 0, up to rounding."""
_FIXED_BYTES, _TOKEN_BYTES, _ROUTE_BYTES = 1 << 20, 1 << 10, 11
"""Largest answer: fixed part, of each token with its text and log-prob, of each choice (8 bytes in base64)."""


@dataclass(frozen=True, kw_only=True)
class ServedRoutes:
    """Shape of the routes of a served model; servers report all decoder layers, or only those with experts."""

    num_experts: int
    layer_ids: tuple[int, ...]
    num_layers: int
    top_k: int


@dataclass
class PublishedVersion:
    """Version of the weights that a server was told to load last, and their folder; None: none yet."""

    version: int | None = None
    folder: Path | None = None


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
    key               that the server asks for; empty: none
    retry_seconds     during which a request that failed is repeated, so that a server may be started again
    published         weights that the server was told to load last

    Log-probs have to be those of the tempered policy: vLLM needs `--logprobs-mode processed_logprobs`. A server does
    not report slots, so the cost is the least that `max_batch` of them could have taken.
    """

    url: str
    dialect: Dialect
    routes: ServedRoutes | None
    stop_ids: tuple[int, ...]
    vocab_size: int
    temperature: float
    seed: int
    max_batch: int = 256
    timeout_seconds: float = 600.0
    key: str = field(default="", repr=False)
    retry_seconds: float = 0.0
    published: PublishedVersion = field(default_factory=PublishedVersion)

    @property
    def address(self) -> ServerAddress:
        """Where the server is."""
        return ServerAddress(url=self.url, key=self.key)

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
        limits = [min(window, max_response - response.length) for response in responses]
        windows = asyncio.run(self._windows(responses, limits, max(1, slots)))
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

    async def _windows(self, responses: Sequence[Response], limits: Sequence[int], slots: int) -> list[Window]:
        """Return a window of each response, at most `slots` requests under way; the first failure ends the others."""
        free, restoring = asyncio.Semaphore(slots), asyncio.Lock()

        async def ask(client: httpx.AsyncClient, response: Response, limit: int) -> Window:
            async def restore() -> None:
                async with restoring:
                    await self._restore(client)

            async with free:
                return await self._window(client, response, limit, restore)

        try:
            async with self.connections(slots) as client:
                with suppress(RequestFailed):  # the requests tell it, after their repetitions
                    await self._restore(client)
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(ask(client, *pair)) for pair in zip(responses, limits, strict=True)]
        except ExceptionGroup as failures:
            first = failures.exceptions[0]
        else:
            return [task.result() for task in tasks]
        raise first from first.__cause__

    async def _restore(self, client: httpx.AsyncClient) -> None:
        """Let a vLLM server that was started again load the weights that were published last.

        Every rank does so before it repeats a request: none is answered by other weights.

        raises    RequestFailed where the server does not answer yet
        """
        version, folder = self.published.version, self.published.folder
        if self.dialect != "vllm" or version is None or folder is None:
            return

        async def call(path: str, body: dict[str, Any] | None = None, /) -> Any:
            try:
                return await request_json(
                    client, path, body, seconds=self.timeout_seconds, max_bytes=self.max_answer_bytes(0, 0)
                )
            except RequestFailed as failure:
                if failure.may_pass:
                    raise
                raise EngineError(f"{self.url}{path}: {self.address.hide_key(str(failure))}") from failure

        found = await read_version(call)
        if found not in (str(version), None):
            _log.warning("%s was started again: it loads version %d of the weights", self.url, version)
            await load_weights(call, self.dialect, self.url, folder, version)

    def connections(self, most: int) -> httpx.AsyncClient:
        """Return a pool of at most so many connections.

        raises    EngineError where `url` is no address
        """
        try:
            return self.address.connections(most)
        except RequestFailed as failure:
            raise EngineError(f"rollout.url {self.url!r}: {failure}") from failure

    async def call(
        self,
        client: httpx.AsyncClient,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        tokens: int = 0,
        rows: int = 0,
        restore: Restore | None = None,
    ) -> Any:
        """Send JSON (None: GET) and return the JSON of the answer.

        tokens, rows   new tokens and rows of routes that are asked for: they limit time and size of the answer
        restore        called before a repetition
        raises         EngineError
        """
        return await call_server(
            client,
            self.address,
            path,
            body,
            seconds=self.request_seconds(tokens),
            max_bytes=self.max_answer_bytes(tokens, rows),
            retry_seconds=self.retry_seconds,
            restore=restore,
        )

    async def ask(
        self,
        client: httpx.AsyncClient,
        tokens: Sequence[int],
        *,
        limit: int,
        seed: int,
        restore: Restore | None = None,
    ) -> TokenAnswer:
        """Return at most `limit` tokens after others, and their log-probs, as the server sent them.

        raises    EngineError for an answer without them
        """
        wants_routes = self.routes is not None
        request = TokenRequest(
            tokens=tokens,
            limit=limit,
            seed=seed,
            temperature=self.temperature,
            stop_ids=self.stop_ids,
            wants_routes=wants_routes,
        )
        body = request_body(self.dialect, request)
        rows = len(tokens) + limit
        answer = await self.call(client, PATHS[self.dialect], body, tokens=limit, rows=rows, restore=restore)
        try:
            return read_answer(self.dialect, answer, wants_routes=wants_routes)
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            raise EngineError(
                f"{self.url} answered without the requested fields ({error!r}): start it with log-probs and routed "
                f"experts, and check that it speaks the dialect {self.dialect!r}"
            ) from error

    async def _window(self, client: httpx.AsyncClient, response: Response, limit: int, restore: Restore) -> Window:
        share = uniform_numbers(self.seed, np.array([response.sample_id]), np.array([response.length]))[0]
        prompt, seed = response.tokens_n.tolist(), int(share * (1 << 31))
        answer = await self.ask(client, prompt, limit=limit, seed=seed, restore=restore)
        tokens, reason = answer.tokens, answer.reason
        if not (reason == "stop" and 0 < len(tokens) <= limit) and not (reason == "length" and len(tokens) == limit):
            raise EngineError(
                f"{self.url} gave sample {response.sample_id} {len(tokens)} of {limit} tokens, ended by "
                f"{shown(reason)}: expected 'stop', or 'length' at the last of them; look at its longest context and "
                "its log"
            )
        self.check_tokens(answer)
        return Window(
            tokens_w=np.array(tokens, dtype=np.int64),
            log_probs_w=np.array(answer.log_probs, dtype=np.float32),
            experts_mLK=self.check_routes(answer.routes, len(response.tokens_n) + len(tokens) - 1),
            stopped=reason == "stop",
        )

    def check_tokens(self, answer: TokenAnswer) -> None:
        """Raise EngineError for tokens outside of the vocabulary or of other weights, and for what is no log-prob."""
        tokens, log_probs = answer.tokens, answer.log_probs
        expected = str(self.published.version)
        other = [version for version in answer.versions if version != expected]
        if other and self.published.version is not None:
            raise EngineError(
                f"{self.url} sampled with weights of version {shown(other[0])}: expected {expected}; does anything "
                "else update the weights of this server?"
            )
        for token in tokens:
            if type(token) is not int or not 0 <= token < self.vocab_size:
                raise EngineError(
                    f"{self.url} gave the token {shown(token)}: expected whole numbers from 0 to "
                    f"{self.vocab_size - 1}, the vocabulary; does it serve this model?"
                )
        for value in log_probs:
            if type(value) not in (int, float) or not LEAST_LOG_PROB <= value <= LARGEST_LOG_PROB:
                raise EngineError(
                    f"{self.url} gave the log-prob {shown(value)}: expected finite numbers up to 0; start it with "
                    "log-probs of the tempered policy"
                )
        if len(log_probs) != len(tokens):
            raise EngineError(f"{self.url} gave {len(tokens)} tokens and {len(log_probs)} log-probs: expected one each")

    def check_routes(self, ids: ndarray | None, rows: int) -> Shaped[ndarray, "m L K"] | None:
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
            if not ids.any():
                raise EngineError(
                    f"{self.url} sent only zeros as routes: it recorded none. vLLM records none in compiled graphs on "
                    "a CPU: install relibra beside it, whose plug-in repairs that, or start it with --enforce-eager"
                )
            raise EngineError(f"{self.url} sent the expert ids {ids[row, layer].tolist()} of a token: they must differ")
        return ids
