"""Client of one rollout server: requests to the token endpoints of SGLang and vLLM, and what is checked of answers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

import httpx
import numpy as np
from jaxtyping import Shaped
from numpy import ndarray

from relibra.errors import EngineError
from relibra.rl.rollout.response import Response, Window
from relibra.rl.rollout.served.dialects import (
    ABORTED,
    ANSWERS,
    HEALTH_PATHS,
    PATHS,
    Dialect,
    TokenAnswer,
    read_answer,
    request_body,
)
from relibra.rl.rollout.served.loading import adapter_name, load_weights, read_version, shown
from relibra.rl.rollout.served.requests import RequestFailed, ServerLost, open_connections, request_json
from relibra.routing.trace import expert_dtype, first_illegal_row

_log = logging.getLogger(__name__)

FULL_LENGTH = 1024
"""Tokens of a request that has `timeout_seconds`; longer ones get proportionally more."""
LOOK_SECONDS = 10.0
"""Seconds for an answer to whether a server is healthy."""
LARGEST_LOG_PROB, LEAST_LOG_PROB = 1e-3, -1e6
"""Log-probs are at most 0, up to rounding."""
_WRONG_ANSWER = "start it with log-probs and routed experts, and check that rollout.engine names the engine there"
_FIXED_BYTES, _TOKEN_BYTES, _ROUTE_BYTES = 1 << 20, 1 << 10, 11
"""Bytes of the largest answer: fixed, per token with text and log-prob, and per choice (8 bytes in base64)."""


@dataclass(frozen=True, kw_only=True)
class ServedRoutes:
    """Shape of the routes of a served model; servers report all decoder layers, or only those with experts."""

    num_experts: int
    layer_ids: tuple[int, ...]
    num_layers: int
    top_k: int


@dataclass
class PublishedVersion:
    """Weights that servers were asked to load last.

    version      None: none yet
    folder       None: they went without files, and cannot be loaded again
    asleep       servers gave their memory back (`rollout.sleep`), and take no request
    as_adapter   new weights of a policy with adapters are sent as adapters
    """

    version: int | None = None
    folder: Path | None = None
    asleep: bool = False
    as_adapter: bool = False


@dataclass(frozen=True, kw_only=True)
class ServerClient:
    """Asks one server, which was started with routed experts switched on (`--enable-return-routed-experts`).

    url               of the server, as in http://127.0.0.1:30000
    dialect           "sglang": /generate; "vllm": /inference/v1/generate
    routes            None: a model without experts
    vocab_size        of the model; a server that sends other tokens is refused
    timeout_seconds   of one request for up to FULL_LENGTH tokens; `request_seconds` scales it
    key               that the server asks for; empty: none
    published         weights that servers were asked to load last; the clients of a run share it
    transfer          how new weights come (rollout.transfer)
    sleeps            it gives its memory back while the trainer works (rollout.sleep)
    pauses            updates of the weights cut its answers (rollout.ahead)
    keeps             instead of a cut, the server goes on with its answers under the new weights (rollout.on_update)

    Log-probs have to be those of the tempered policy: vLLM needs `--logprobs-mode processed_logprobs`.
    """

    url: str
    dialect: Dialect
    routes: ServedRoutes | None
    stop_ids: tuple[int, ...]
    vocab_size: int
    temperature: float
    timeout_seconds: float = 600.0
    key: str = field(default="", repr=False)
    published: PublishedVersion = field(default_factory=PublishedVersion)
    transfer: Literal["folder", "nccl", "ipc", "gloo"] = "folder"
    sleeps: bool = False
    pauses: bool = False
    keeps: bool = False

    def hide_key(self, text: str) -> str:
        """Return a text of the server without the key, which it may repeat."""
        return text.replace(self.key, "(the key)") if self.key else text

    def request_seconds(self, num_tokens: int) -> float:
        """Return the seconds that a request for so many new tokens may take."""
        return self.timeout_seconds * max(1.0, num_tokens / FULL_LENGTH)

    def max_answer_bytes(self, num_tokens: int, rows: int) -> int:
        """Return the largest answer that is read, for new tokens and rows of routes."""
        choices = rows * self.routes.num_layers * self.routes.top_k if self.routes else 0
        return _FIXED_BYTES + _TOKEN_BYTES * num_tokens + _ROUTE_BYTES * choices

    def connections(self, most: int) -> httpx.AsyncClient:
        """Return a pool of at most so many connections; raises EngineError where `url` is no address."""
        return open_connections(self.url, self.key, most)

    async def check_health(self, client: httpx.AsyncClient) -> None:
        """Check that the server says that it is healthy, or does not know the question; raises RequestFailed."""
        try:
            await request_json(client, HEALTH_PATHS[self.dialect], seconds=LOOK_SECONDS, max_bytes=1 << 16)
        except RequestFailed as failure:
            if failure.status is None or failure.may_pass:  # else the requests that follow tell what it is
                raise

    async def call(
        self,
        client: httpx.AsyncClient,
        path: str,
        body: Mapping[str, Any] | None = None,
        /,
        *,
        kind: Any = Any,
        tokens: int = 0,
        rows: int = 0,
    ) -> Any:
        """Send JSON (None: GET) and return the JSON of the answer, decoded into a type; one attempt.

        tokens, rows   new tokens and rows of routes that are asked for: they limit time and size of the answer
        raises         EngineError; ServerLost where the server does not answer, or answers that its engine is dead
        """
        seconds, max_bytes = self.request_seconds(tokens), self.max_answer_bytes(tokens, rows)
        try:
            return await request_json(client, path, body, seconds=seconds, max_bytes=max_bytes, kind=kind)
        except RequestFailed as failure:
            lost = failure.may_pass or ((failure.status or 0) >= 500 and not await self._is_healthy(client))
            text = f"{self.url.rstrip('/')}{path} failed: {self.hide_key(str(failure))}; {_next_step(failure)}"
            raise (ServerLost(text, timed_out=failure.timed_out) if lost else EngineError(text)) from failure

    async def _is_healthy(self, client: httpx.AsyncClient) -> bool:
        try:
            await self.check_health(client)
        except RequestFailed:
            return False
        return True

    async def bring_up(self, client: httpx.AsyncClient) -> None:
        """Check that the server can be asked; one that was started again first loads the last weights.

        Every rank does so before it asks a server, and after each failure: no request is answered by other weights.

        raises    ServerLost where it cannot be asked now; EngineError where it refuses
        """
        try:
            await self.check_health(client)
        except RequestFailed as failure:
            path, text = HEALTH_PATHS[self.dialect], self.hide_key(str(failure))
            why = f"{self.url.rstrip('/')}{path} failed: {text}; start it, or look at its log"
            raise (ServerLost(why, timed_out=False) if failure.may_pass else EngineError(why)) from failure
        version, folder = self.published.version, self.published.folder
        if version is None or (folder is None and self.transfer == "folder"):
            return
        if await read_version(partial(self.call, client), self.dialect) in (str(version), None):
            return
        if folder is None:
            raise ServerLost(
                f"{self.url} was started again and lacks version {version} of the weights, which went without files "
                "(rollout.transfer): it gets the next version, and with rollout.transfer=folder it would load this one",
                timed_out=False,
            )
        _log.warning("%s was started again: it loads version %d of the weights", self.url, version)
        await self.load(client, folder, version)

    async def load(self, client: httpx.AsyncClient, folder: Path, version: int) -> None:
        """Let the server load weights, drop its caches, and know their version; one attempt; raises as `call` does."""
        call, before = partial(self.call, client), self.published.folder
        await load_weights(call, self.dialect, self.url, folder, version, before)

    async def ask(
        self, client: httpx.AsyncClient, tokens: Sequence[int], *, limit: int, seed: int, wants_scores: bool = False
    ) -> TokenAnswer:
        """Return at most `limit` tokens after the given ones, with log-probs, as the server sent them; one attempt.

        wants_scores   log-probs of the given tokens too, at temperature 1
        raises         EngineError for an answer without them; ServerLost where the server does not answer
        """
        wants_routes = self.routes is not None
        body = request_body(
            self.dialect,
            tokens,
            limit=limit,
            seed=seed,
            temperature=self.temperature,
            stop_ids=self.stop_ids,
            wants_routes=wants_routes,
            wants_scores=wants_scores,
            adapter=adapter_name(self.published.folder),
        )
        path, kind, rows = PATHS[self.dialect], ANSWERS[self.dialect], len(tokens) + limit
        answer = await self.call(client, path, body, kind=kind, tokens=rows if wants_scores else limit, rows=rows)
        try:
            return read_answer(answer, wants_routes=wants_routes, scored=tokens if wants_scores else ())
        except ValueError as error:
            raise EngineError(f"{self.url} answered without the requested fields ({error}): {_WRONG_ANSWER}") from error

    async def window(
        self,
        client: httpx.AsyncClient,
        response: Response,
        *,
        limit: int,
        seed: int,
        may_be_cut: Callable[[], bool] = lambda: False,
        rescored: int = 0,
    ) -> Window:
        """Return at most `limit` tokens after a response, checked; one attempt.

        may_be_cut   whether an answer that ended early was cut by the run, for an update of the weights
        rescored     last tokens of the response whose log-probs are asked for too (`Window.rescored_v`)
        raises       EngineError for an answer that cannot be trained on; ServerLost where the server does not answer
        """
        tokens_n, version = response.tokens_n.tolist(), self.published.version
        answer = await self.ask(client, tokens_n, limit=limit, seed=seed, wants_scores=rescored > 0)
        if answer.reason == ABORTED and may_be_cut():
            return self._cut_window(answer, limit)
        tokens, reason = answer.tokens, answer.reason
        if not (reason == "stop" and 0 < len(tokens) <= limit) and not (reason == "length" and len(tokens) == limit):
            message = (
                f"{self.url} gave sample {response.sample_id} {len(tokens)} of {limit} tokens, ended by "
                f"{shown(reason)}: expected 'stop', or 'length' at the last of them; look at its longest context and "
                "its log"
            )
            if reason == ABORTED:  # it is being stopped
                raise ServerLost(message, timed_out=False)
            raise EngineError(message)
        self.check_tokens(answer, version if self.keeps else None)
        routes = self.check_routes(answer.routes, len(tokens_n) + len(tokens) - 1)
        window = self._window(answer, routes, stopped=reason == "stop")
        if self.keeps and window.versions_w is not None:  # servers do not say which token is of which version
            window.versions_w[:-1] = version
        return replace(window, rescored_v=np.array(answer.given[-rescored:], np.float32)) if rescored else window

    def _cut_window(self, answer: TokenAnswer, limit: int) -> Window:
        """Return the first tokens of an answer that was cut: at most `limit` - 1; the rest is asked for again.

        Tokens without a log-prob, and one that ends the response, are sampled again.
        """
        whole = zip(answer.tokens[: limit - 1], answer.log_probs, strict=False)
        pairs = list(takewhile(lambda pair: pair[0] not in self.stop_ids, whole))
        kept = replace(answer, tokens=[token for token, _ in pairs], log_probs=[value for _, value in pairs])
        self.check_tokens(kept)
        return self._window(kept, None, cut=True)

    def _window(
        self, answer: TokenAnswer, experts_mLK: ndarray | None, *, stopped: bool = False, cut: bool = False
    ) -> Window:
        version = self.published.version
        return Window(
            tokens_w=np.array(answer.tokens, dtype=np.int64),
            log_probs_w=np.array(answer.log_probs, dtype=np.float32),
            experts_mLK=experts_mLK,
            stopped=stopped,
            versions_w=None if version is None else np.full(len(answer.tokens), version, dtype=np.int32),
            cut=cut,
        )

    def check_tokens(self, answer: TokenAnswer, since: int | None = None) -> None:
        """Raise EngineError for tokens outside of the vocabulary or of other weights, and for what is no log-prob.

        since   oldest version that may have sampled them; None: the newest alone
        """
        tokens, log_probs = answer.tokens, answer.log_probs
        newest = self.published.version or 0
        expected = [str(version) for version in range(newest if since is None else since, newest + 1)]
        other = [version for version in answer.versions if version not in expected]
        if other and self.published.version is not None:
            raise EngineError(
                f"{self.url} sampled with weights of version {shown(other[0])}: expected {expected[-1]}; does anything "
                "else update the weights of this server?"
            )
        for token in tokens:
            if not 0 <= token < self.vocab_size:
                raise EngineError(
                    f"{self.url} gave the token {token}: expected whole numbers from 0 to "
                    f"{self.vocab_size - 1}, the vocabulary; does it serve this model?"
                )
        for value in (*log_probs, *answer.given):
            if not LEAST_LOG_PROB <= value <= LARGEST_LOG_PROB:
                raise EngineError(
                    f"{self.url} gave the log-prob {value}: expected finite numbers up to 0; start it with "
                    "log-probs of the tempered policy"
                )
        if len(log_probs) != len(tokens):
            raise EngineError(f"{self.url} gave {len(tokens)} tokens and {len(log_probs)} log-probs: expected one each")

    def check_routes(self, ids: ndarray | None, rows: int) -> Shaped[ndarray, "m L K"] | None:
        """Return the routes of the layers with experts in the narrowest type; raises EngineError for illegal ones."""
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
        if ids.shape[1] != own:
            ids = ids.take(shape.layer_ids, axis=1)
        if ids.size and not 0 <= ids.min() <= ids.max() < shape.num_experts:
            raise EngineError(f"{self.url} sent expert ids {ids.min()}..{ids.max()} of {shape.num_experts} experts")
        ids = np.ascontiguousarray(ids.astype(expert_dtype(shape.num_experts), copy=False))
        row, layer, fault = first_illegal_row(ids, np.ones(rows, dtype=bool), shape.num_experts)
        if fault:
            if not ids.any():
                raise EngineError(
                    f"{self.url} sent only zeros as routes: it recorded none. vLLM records none in compiled graphs on "
                    "a CPU: install relibra beside it, whose plug-in repairs that, or start it with --enforce-eager"
                )
            raise EngineError(f"{self.url} sent the expert ids {ids[row, layer].tolist()} of a token: they must differ")
        return ids


def _next_step(failure: RequestFailed) -> str:
    """Return what to do about a request that failed."""
    if failure.status in (401, 403):
        return "set rollout.api_key_from to env:NAME or file:PATH of the key that it was started with (--api-key)"
    if failure.status == 200:
        return _WRONG_ANSWER
    return "increase rollout.timeout_seconds, or look at its log" if failure.timed_out else "look at its log"
