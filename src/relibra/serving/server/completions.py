"""`/v1/completions`: what a request may hold, and the answer, whole or as a stream of events."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from relibra.errors import ConfigError, RelibraError
from relibra.serving.engine.request import SamplingParameters
from relibra.serving.server.clients import Step, WorkerClients
from relibra.serving.server.text import TextCodec, TextStream

MAX_STOPS = 16


class BadRequest(RelibraError, ValueError):
    """A request that cannot be answered: the client's to change."""


class CompletionRequest(BaseModel):
    """Body of a request, as OpenAI's and vLLM's clients send it; fields that are not known are ignored."""

    model_config = ConfigDict(extra="ignore")

    prompt: str | list[int] | list[str] | list[list[int]]
    model: str = ""
    max_tokens: int | None = Field(16, ge=1)
    temperature: float | None = Field(1.0, ge=0, le=100)
    top_p: float | None = Field(1.0, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    n: int | None = Field(1, ge=1, le=128)
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    return_token_ids: bool = False
    return_routed_experts: bool = False

    def prompts(self, codec: TextCodec) -> list[list[int]]:
        """Return the tokens of each prompt; raises BadRequest."""
        given: list[Any] = [self.prompt] if isinstance(self.prompt, str) else list(self.prompt)
        if given and all(isinstance(one, int) for one in given):
            given = [given]
        try:
            prompts = [codec.encode(one) if isinstance(one, str) else one for one in given]
        except ConfigError as error:
            raise BadRequest(str(error)) from error
        if not prompts or not all(prompts):
            raise BadRequest("prompt is empty: send at least one token")
        worst = max(max(tokens) for tokens in prompts)
        if worst >= codec.vocab_size or min(min(tokens) for tokens in prompts) < 0:
            raise BadRequest(f"prompt holds a token that is not 0 to {codec.vocab_size - 1}, which the model knows")
        return prompts

    def stops(self) -> list[str]:
        """Return the texts that end an answer; raises BadRequest."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > MAX_STOPS or not all(stops):
            raise BadRequest(f"stop holds {len(stops)} texts: at most {MAX_STOPS}, none of them empty")
        return stops

    def sampling(self, codec: TextCodec, seed: int, sample: int) -> SamplingParameters:
        """Return the parameters of one of the answers."""
        own = () if self.ignore_eos else codec.stop_ids
        return SamplingParameters(
            limit=self.max_tokens or 16,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=self.top_p or 1.0,
            top_k=max(self.top_k or 0, 0),
            seed=seed,
            sample=sample,
            stop_ids=tuple(dict.fromkeys((*own, *(self.stop_token_ids or ())))),
            top_log_probs=self.logprobs or 0,
            routes=self.return_routed_experts,
        )


@dataclass
class Choice:
    """One answer as it grows."""

    index: int
    prompt: list[int]
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    tops: list[list[list[float]]] = field(default_factory=list)
    finish: str | None = None
    routes: str | None = None

    def add(self, step: Step) -> None:
        """Append what a step brings."""
        if "token" in step:
            self.tokens.append(step["token"])
            self.log_probs.append(step["log_prob"])
            self.tops.append(step.get("top", []))
        self.routes = step.get("routes", self.routes)


@dataclass(frozen=True, eq=False)
class CompletionServer:
    """Answers completions with the attention workers.

    name         of the model, as clients call it
    max_length   most tokens of prompt and answer
    """

    clients: WorkerClients
    codec: TextCodec
    name: str
    max_length: int

    async def answer(self, request: CompletionRequest) -> dict[str, Any]:
        """Return the whole answer."""
        choices = self._choices(request)
        seed = secrets.randbits(48) if request.seed is None else request.seed
        await _all(self._run(request, choice, seed) for choice in choices)
        return {
            **self._head(),
            "choices": [self._body(request, choice, choice.text, whole=True) for choice in choices],
            "usage": _usage(request, choices),
        }

    async def stream(self, request: CompletionRequest) -> AsyncGenerator[str, None]:
        """Yield the events of an answer, as text."""
        choices = self._choices(request)
        seed, head = secrets.randbits(48) if request.seed is None else request.seed, self._head()
        queue: asyncio.Queue[dict[str, Any] | Exception | None] = asyncio.Queue(maxsize=64)

        async def run(choice: Choice) -> None:
            async with aclosing(self._pieces(request, choice, seed)) as pieces:
                async for piece in pieces:
                    await queue.put(self._body(request, choice, piece, whole=False))

        async def run_all() -> None:
            try:
                await _all(run(choice) for choice in choices)
                await queue.put(None)
            except Exception as error:  # noqa: BLE001 - raised again where the stream is read
                await queue.put(error)

        task = asyncio.create_task(run_all())
        try:
            while (item := await queue.get()) is not None:
                if isinstance(item, Exception):
                    yield _event({"error": {"message": str(item), "type": "server_error", "code": 500}})
                    return
                yield _event({**head, "choices": [item]})
            if (request.stream_options or {}).get("include_usage"):
                yield _event({**head, "choices": [], "usage": _usage(request, choices)})
            yield "data: [DONE]\n\n"
        finally:
            task.cancel()

    def _choices(self, request: CompletionRequest) -> list[Choice]:
        prompts, limit = request.prompts(self.codec), request.max_tokens or 16
        for tokens in prompts:
            if len(tokens) + limit > self.max_length:
                raise BadRequest(
                    f"the prompt has {len(tokens)} tokens and max_tokens is {limit}: together they may be at most "
                    f"{self.max_length} (--max-length)"
                )
        request.stops()
        return [
            Choice(index=p * (request.n or 1) + i, prompt=tokens)
            for p, tokens in enumerate(prompts)
            for i in range(request.n or 1)
        ]

    async def _run(self, request: CompletionRequest, choice: Choice, seed: int) -> None:
        async with aclosing(self._pieces(request, choice, seed)) as pieces:
            async for _ in pieces:
                pass

    async def _pieces(self, request: CompletionRequest, choice: Choice, seed: int) -> AsyncGenerator[str, None]:
        """Yield the new text of each step, with `choice` brought up to date."""
        stops, stream = request.stops(), TextStream(self.codec)
        sampling = request.sampling(self.codec, seed, choice.index % (request.n or 1))
        async with aclosing(self.clients.generate(choice.prompt, sampling)) as steps:
            async for step in steps:
                choice.add(step)
                finish = step.get("finish")
                ends = finish == "stop" and step.get("token") in self.codec.stop_ids
                piece = "" if ends or "token" not in step else stream.add(step["token"])
                if finish is not None:
                    piece += stream.rest()
                choice.text += piece
                cut = min((at for stop in stops if (at := choice.text.find(stop)) >= 0), default=None)
                if cut is not None:
                    piece = piece[: max(0, len(piece) - (len(choice.text) - cut))]
                    choice.text, finish = choice.text[:cut], "stop"
                choice.finish = finish
                yield piece
                if finish is not None:
                    return

    def _head(self) -> dict[str, Any]:
        number = secrets.token_hex(12)
        return {"id": f"cmpl-{number}", "object": "text_completion", "created": int(time.time()), "model": self.name}

    def _body(self, request: CompletionRequest, choice: Choice, text: str, *, whole: bool) -> dict[str, Any]:
        """Return a choice of the answer, or of one event: the latest token only."""
        first = 0 if whole else max(0, len(choice.tokens) - 1)
        tokens, body = choice.tokens[first:], {"index": choice.index, "text": text, "finish_reason": choice.finish}
        body["logprobs"] = None
        if request.logprobs is not None:
            names = [self.codec.decode([token]) for token in tokens]
            body["logprobs"] = {
                "tokens": names,
                "token_logprobs": choice.log_probs[first:],
                "top_logprobs": [
                    {self.codec.decode([int(token)]) or str(token): value for token, value in top}
                    for top in choice.tops[first:]
                ],
                "text_offset": [],
            }
        if request.return_token_ids:
            body |= {"token_ids": tokens, "prompt_token_ids": choice.prompt if whole else None}
        if choice.routes is not None:
            body["routed_experts"] = choice.routes
        return body


async def _all(works: Any) -> None:
    """Run all at once; the first error cancels the others."""
    async with asyncio.TaskGroup() as group:
        for work in works:
            group.create_task(work)


def _usage(request: CompletionRequest, choices: list[Choice]) -> dict[str, int]:
    prompts = sum(len(choice.prompt) for choice in choices[:: request.n or 1])
    answers = sum(len(choice.tokens) for choice in choices)
    return {"prompt_tokens": prompts, "completion_tokens": answers, "total_tokens": prompts + answers}


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
