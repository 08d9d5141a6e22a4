"""`make_app`: the paths of the front."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError

from relibra.errors import RelibraError
from relibra.serving.server.access import AccessList
from relibra.serving.server.endpoints.chat import ChatBody
from relibra.serving.server.endpoints.completions import CompletionBody
from relibra.serving.server.endpoints.mistakes import first_mistake
from relibra.serving.server.endpoints.sampling_body import LAST_EVENT, event, usage
from relibra.serving.server.endpoints.tokens import TokenBody
from relibra.serving.server.generation import Choice, GenerationRequest, Generator
from relibra.serving.server.metrics import CONTENT_TYPE, CountAnswers, FrontMetrics
from relibra.serving.server.refusals import (
    BadRequest,
    NotJson,
    TooLarge,
    UnknownPath,
    error_body,
    refuse_with_sentences,
)
from relibra.serving.server.streams import EventStream, unless_left
from relibra.serving.server.weights import NewVersion, ServedWeights, WorkerCall

MOST_BODY_BYTES = 16 << 20
Body = TypeVar("Body", bound=BaseModel)
OpenAiBody = CompletionBody | ChatBody


@dataclass(frozen=True, kw_only=True, eq=False)
class Front:
    """What the paths work with, once workers are connected."""

    generator: Generator
    weights: ServedWeights


@dataclass(frozen=True, kw_only=True)
class ServedName:
    """What a front says about its model.

    name     as clients call it
    config   as vLLM's /server_info shows it
    """

    name: str
    max_length: int
    config: dict[str, Any]


Opening = Callable[[], Awaitable[tuple[Front, Callable[[], Awaitable[None]]]]]
"""Connects to the workers; returns the front, and what ends it."""


def make_app(open_front: Opening, about: ServedName, access: AccessList, counted: FrontMetrics) -> FastAPI:
    """Return the application of a model."""
    paths = _Paths(about=about, access=access, counted=counted)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        front, close = await open_front()
        paths.fronts.append(front)
        yield
        await close()

    app = FastAPI(lifespan=lifespan, openapi_url=None)
    app.add_middleware(CountAnswers, metrics=counted)
    refuse_with_sentences(app)
    for router in (paths.of_operators(), paths.of_openai(), paths.of_tokens(), paths.of_weights()):
        app.include_router(router)
    return app


@dataclass(frozen=True, kw_only=True, eq=False)
class _Paths:
    """Paths in groups; `fronts` is empty until workers are connected."""

    about: ServedName
    access: AccessList
    counted: FrontMetrics
    fronts: list[Front] = field(default_factory=list)
    started: int = field(default_factory=lambda: int(time.time()))

    def of_operators(self) -> APIRouter:
        """Return what asks for no key."""
        router = APIRouter()

        @router.get("/health")
        async def health() -> Response:
            clients = self.fronts[0].generator.admission.clients
            lost = clients.lost
            said: dict[str, Any] = {"running": clients.running, "rebalanced": clients.rebalanced}
            said["workers"] = [asdict(one) for one in clients.states]
            return JSONResponse(said | ({"error": "; ".join(lost)} if lost else {}), status_code=503 if lost else 200)

        @router.get("/metrics")
        async def read_metrics() -> Response:
            workers = await self.fronts[0].generator.admission.clients.counters()
            return Response(self.counted.text(workers), media_type=CONTENT_TYPE)

        return router

    def of_openai(self) -> APIRouter:
        """Return what OpenAI's clients use."""
        router = APIRouter(dependencies=[Depends(self.access.client_of)])

        @router.get("/v1/models")
        async def models() -> dict[str, Any]:
            return {"object": "list", "data": [self._model()]}

        @router.get("/v1/models/{name:path}")
        async def model(name: str) -> dict[str, Any]:
            _check_model(name, self.about.name)
            return self._model()

        @router.post("/v1/completions")
        async def completions(request: Request) -> Response:
            return await self._complete(request, CompletionBody)

        @router.post("/v1/chat/completions")
        async def chat(request: Request) -> Response:
            return await self._complete(request, ChatBody)

        return router

    def _model(self) -> dict[str, Any]:
        model = {"id": self.about.name, "object": "model", "created": self.started, "owned_by": "relibra"}
        return {**model, "max_model_len": self.about.max_length}

    async def _complete(self, request: Request, kind: type[OpenAiBody]) -> Response:
        client, generator = self.access.client_of(request), self.fronts[0].generator
        body = await _read(request, kind)
        _check_model(body.model, self.about.name)
        # Text is encoded in a thread: a long prompt stalls nobody's stream.
        asked = await asyncio.to_thread(body.request, generator.codec, client, self.about.max_length)
        choices = generator.begin(asked)
        self.counted.begun(sum(map(len, asked.prompts)))
        answer = _OpenAiAnswer(generator, body, asked, choices, self.about.name)
        if not body.stream:
            return JSONResponse(await unless_left(answer.whole(), request.receive))
        events = answer.events()
        first = await unless_left(anext(events), request.receive)
        return EventStream(first, events)

    def of_tokens(self) -> APIRouter:
        """Return what vLLM's clients of tokens use."""
        router = APIRouter(dependencies=[Depends(self.access.client_of)])

        @router.post("/inference/v1/generate")
        async def generate(request: Request) -> Response:
            client, front = self.access.client_of(request), self.fronts[0]
            body = await _read(request, TokenBody)
            _check_model(body.model, self.about.name)
            if body.stream:
                raise BadRequest("stream is not offered here: leave it out, or use /v1/completions")
            asked = body.request(front.generator.codec, client)
            choices = front.generator.begin(asked)
            self.counted.begun(len(body.token_ids))
            await unless_left(_run(front.generator, asked, choices), request.receive)
            return JSONResponse(body.answer([choice.take() for choice in choices], front.weights.version))

        @router.get("/server_info")
        async def server_info() -> dict[str, Any]:
            return {"vllm_config": self.about.config}

        @router.post("/reset_prefix_cache")
        async def reset_prefix_cache() -> dict[str, Any]:
            return {"success": True}  # keys and values live as long as their answer, and none spans two versions

        return router

    def of_weights(self) -> APIRouter:
        """Return what updates of weights use, named as vLLM names it."""
        router = APIRouter(dependencies=[Depends(self.access.client_of)])

        @router.get("/weight_info")
        async def weight_info() -> dict[str, Any]:
            return {"weight_version": self.fronts[0].weights.version}

        @router.post("/collective_rpc")
        async def load_weights(request: Request) -> dict[str, Any]:
            self.fronts[0].weights.check_offered()
            await self.fronts[0].weights.load(await _read(request, WorkerCall))
            return {"results": []}

        @router.post("/update_weight_version")
        async def set_version(request: Request) -> dict[str, Any]:
            self.fronts[0].weights.check_offered()
            self.fronts[0].weights.version = (await _read(request, NewVersion)).new_version
            return {"success": True}

        return router


class _OpenAiAnswer:
    """An answer of one of OpenAI's endpoints, whole or as events."""

    def __init__(
        self, generator: Generator, body: OpenAiBody, asked: GenerationRequest, choices: list[Choice], name: str
    ) -> None:
        self._generator, self._body, self._asked, self._choices = generator, body, asked, choices
        number, now = secrets.token_hex(12), int(time.time())
        self._head = {"id": f"{body.prefix}{number}", "object": body.kind, "created": now, "model": name}

    async def whole(self) -> dict[str, Any]:
        """Return the answer."""
        await _run(self._generator, self._asked, self._choices)
        return {**self._head, "choices": [self._part(one, whole=True) for one in self._choices], "usage": self._usage()}

    async def events(self) -> AsyncGenerator[str, None]:
        """Yield the events of a stream."""
        head = dict(self._head)
        if self._body.kind == "chat.completion":
            head["object"] = "chat.completion.chunk"
        told = False
        try:
            async with aclosing(self._generator.run(self._asked, self._choices)) as steps:
                async for grown in steps:
                    for choice in grown:
                        part = self._part(choice, whole=False)
                        told = True
                        yield event({**head, "choices": [part]})
            if self._body.include_usage:
                yield event({**head, "choices": [], "usage": self._usage()})
            yield LAST_EVENT
        except RelibraError as error:
            if not told:
                raise  # the status says it
            yield event(error_body(error))

    def _part(self, choice: Choice, *, whole: bool) -> dict[str, Any]:
        return self._body.choice(self._generator.codec, choice.take(), list(choice.prompt), whole)

    def _usage(self) -> dict[str, int]:
        answers = 0 if getattr(self._body, "max_tokens", None) == 0 else sum(one.num_tokens for one in self._choices)
        return usage(sum(map(len, self._asked.prompts)), answers)


async def _run(generator: Generator, asked: GenerationRequest, choices: list[Choice]) -> None:
    async with aclosing(generator.run(asked, choices)) as steps:
        async for _ in steps:
            pass


async def _read(request: Request, kind: type[Body]) -> Body:
    """Return the body of a request; raises NotJson, TooLarge, BadRequest."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise NotJson("send the header Content-Type: application/json")
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > MOST_BODY_BYTES:
            raise TooLarge(f"the body is longer than {MOST_BODY_BYTES:,} bytes: send less at once")
    try:
        return kind.model_validate_json(bytes(data))
    except ValidationError as error:
        raise BadRequest(first_mistake(error, bytes(data))) from error


def _check_model(asked: str, name: str) -> None:
    if asked not in ("", name):
        raise UnknownPath(f"the model {asked[:200]!r} is not served here: it is {name!r}")
