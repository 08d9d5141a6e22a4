"""`make_app`: the endpoints of the API server."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from functools import partial
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse

from relibra.serving.server.admission import Admission
from relibra.serving.server.bodies import ChatBody, CompletionBody, TokenBody
from relibra.serving.server.choice import Choice
from relibra.serving.server.connections import EventStream, unless_left
from relibra.serving.server.errors import ERROR_HANDLERS, error_body
from relibra.serving.server.forked import run_forked
from relibra.serving.server.metrics import CONTENT_TYPE, CountAnswers, ServerMetrics
from relibra.serving.server.reading import BodyReader, check_model
from relibra.serving.server.text import TextCodec
from relibra.serving.server.weights import NewVersion, ServedWeights, WorkerCall

LAST_EVENT = "data: [DONE]\n\n"
MOST_ENTRIES = 2000
"""Most `Choice.entries` of an answer that this process writes itself, a hundred in milliseconds; else a fork does."""
OpenAiBody = CompletionBody | ChatBody


OpenWorkers = Callable[[], AbstractAsyncContextManager[tuple[Admission, ServedWeights]]]
"""Connects to the workers, yields their queue of requests and their weights, and ends the workers."""


def make_app(
    open_workers: OpenWorkers,
    name: str,
    config: dict[str, Any],
    codec: TextCodec,
    check_key: Callable[[Request], None],
    metrics: ServerMetrics,
) -> FastAPI:
    """Return the application of a model; `config` is what vLLM's /server_info shows, `check_key` rejects strangers."""
    max_length = config["model_config"]["max_model_len"]

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with open_workers() as (app.state.admission, app.state.weights):
            yield

    app = FastAPI(lifespan=lifespan, openapi_url=None, exception_handlers=ERROR_HANDLERS)
    bodies = BodyReader(name, codec, max_length)
    app.add_middleware(CountAnswers, metrics=metrics)
    public, with_key = APIRouter(), APIRouter(dependencies=[Depends(check_key)])
    started = int(time.time())

    @public.get("/health")
    async def health() -> Response:
        workers = app.state.admission.clients
        body = {"running": workers.running, "rebalanced": workers.rebalanced, "workers": workers.states}
        lost = {"error": "; ".join(workers.lost)} if workers.lost else {}
        return JSONResponse(body | lost, status_code=503 if lost else 200)

    @public.get("/metrics")
    async def read_metrics() -> Response:
        admission = app.state.admission
        counters, workers = await admission.clients.counters(), admission.clients
        gauges = {"waiting": len(admission.queue), "running": workers.running, "lost_workers": len(workers.lost)}
        return Response(metrics.text(counters, gauges), media_type=CONTENT_TYPE)

    @with_key.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [await show_model(name)]}

    @with_key.get("/v1/models/{asked:path}")
    async def show_model(asked: str) -> dict[str, Any]:
        check_model(asked, name)
        shown = {"id": name, "object": "model", "created": started, "owned_by": "relibra"}
        return {**shown, "max_model_len": max_length}

    @with_key.post("/v1/completions")
    async def complete(request: Request) -> Response:
        return await answer_openai(request, *await bodies.read(request, CompletionBody))

    @with_key.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await answer_openai(request, *await bodies.read(request, ChatBody))

    async def answer_openai(request: Request, body: OpenAiBody, prompts: list[list[int]]) -> Response:
        answer = _OpenAiAnswer(app.state.admission, codec, body, body.choices(codec, max_length, prompts), name)
        if not body.stream:
            return await unless_left(answer.whole(), request.receive)
        events = answer.events()
        return EventStream(await unless_left(anext(events), request.receive), events)

    @with_key.post("/inference/v1/generate")
    async def generate(request: Request) -> Response:
        body, prompts = await bodies.read(request, TokenBody)
        if body.stream:
            raise HTTPException(400, "stream is not offered here: leave it out, or use /v1/completions")
        choices = body.choices(codec, max_length, prompts)
        await unless_left(_run(app.state.admission, choices), request.receive)
        version = app.state.weights.version
        answer = _written(choices, lambda choice: body.part(choice, version), lambda: body.rest(choices[0]))
        return await unless_left(answer, request.receive)

    @with_key.get("/server_info")
    async def show_server() -> dict[str, Any]:
        return {"vllm_config": config}

    @with_key.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> dict[str, Any]:
        return {"success": True}  # keys and values live as long as their answer, and none spans two versions

    @with_key.post("/pause")
    async def pause(mode: str = "abort") -> dict[str, Any]:
        app.state.weights.check_offered()
        if mode != "abort":
            raise HTTPException(400, f"mode {mode[:80]!r} is not offered: only abort is")
        app.state.admission.pause()
        return {"status": "paused"}

    @with_key.post("/resume")
    async def resume() -> dict[str, Any]:
        app.state.weights.check_offered()
        app.state.admission.resume()
        return {"status": "resumed"}

    @with_key.get("/weight_info")
    async def show_weights() -> dict[str, Any]:
        return {"weight_version": app.state.weights.version}

    @with_key.post("/collective_rpc")
    async def load_weights(request: Request) -> dict[str, Any]:
        app.state.weights.check_offered()
        await app.state.weights.load(await bodies.read_call(request, WorkerCall))
        return {"results": []}

    @with_key.post("/update_weight_version")
    async def name_weights(request: Request) -> dict[str, Any]:
        app.state.weights.check_offered()
        app.state.weights.version = (await bodies.read_call(request, NewVersion)).new_version
        return {"success": True}

    app.include_router(public)
    app.include_router(with_key)
    return app


class _OpenAiAnswer:
    """An answer of one of OpenAI's endpoints, whole or as events."""

    def __init__(
        self, admission: Admission, codec: TextCodec, body: OpenAiBody, choices: list[Choice], name: str
    ) -> None:
        self._admission, self._codec, self._body, self._choices = admission, codec, body, choices
        number, now = secrets.token_hex(12), int(time.time())
        self._head = {"id": f"{body.prefix}{number}", "object": body.kind, "created": now, "model": name}

    async def whole(self) -> Response:
        """Return the answer."""
        await _run(self._admission, self._choices)
        rest = {**self._head, "usage": self._usage()}
        return await _written(self._choices, lambda choice: self._body.part(self._codec, choice, True), lambda: rest)

    async def events(self) -> AsyncGenerator[str, None]:
        """Yield the events of a stream."""
        head = dict(self._head)
        if self._body.kind == "chat.completion":
            head["object"] = "chat.completion.chunk"

        def event(choice: Choice) -> list[str]:
            return [_event({**head, "choices": [self._body.part(self._codec, choice, False)]})]

        begun = False
        try:
            async with aclosing(self._admission.run(self._choices)) as steps:
                async for grown in steps:
                    for choice in grown:
                        [text] = await _texts(partial(event, choice), choice.entries)
                        choice.clear()
                        begun = True
                        yield text
            if self._body.include_usage:
                yield _event({**head, "choices": [], "usage": self._usage()})
            yield LAST_EVENT
        except HTTPException as error:
            if not begun:
                raise  # the status shows it
            yield _event(error_body(error.detail, error.status_code))

    def _usage(self) -> dict[str, int]:
        asked = sum(len(choice.prompt) for choice in self._choices if choice.sampling.sample == 0)
        scored_only = getattr(self._body, "max_tokens", None) == 0
        answered = 0 if scored_only else sum(choice.num_tokens for choice in self._choices)
        return {"prompt_tokens": asked, "completion_tokens": answered, "total_tokens": asked + answered}


def _event(body: dict[str, Any]) -> str:
    """Return a body as an event of a stream."""
    return f"data: {_as_json(body)}\n\n"


def _as_json(body: dict[str, Any]) -> str:
    return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


async def _written(
    choices: list[Choice], part: Callable[[Choice], Any], rest: Callable[[], dict[str, Any]]
) -> Response:
    """Return an answer: `part` of each choice, and the fields of `rest`; a long answer is sent choice by choice."""

    def pieces() -> Iterator[str]:
        for number, choice in enumerate(choices):
            yield ("," if number else '{"choices":[') + _as_json(part(choice))
        yield f"],{_as_json(rest())[1:]}"

    entries = sum(choice.entries for choice in choices)
    first, *texts = await _texts(pieces, entries)
    if entries <= MOST_ENTRIES:
        return Response("".join((first, *texts)), media_type="application/json")
    return EventStream(first, _each(texts), "application/json")


async def _each(texts: list[str]) -> AsyncGenerator[str, None]:
    for text in texts:
        yield text


async def _texts(pieces: Callable[[], Iterable[str]], entries: int) -> list[str]:
    """Return the pieces of an answer; where there are many entries, a forked process writes them."""
    return list(pieces()) if entries <= MOST_ENTRIES else await run_forked(pieces)


async def _run(admission: Admission, choices: list[Choice]) -> None:
    async with aclosing(admission.run(choices)) as steps:
        async for _ in steps:
            pass
