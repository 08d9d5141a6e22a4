"""`make_app`: the paths of the front."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse

from relibra.errors import RelibraError
from relibra.serving.launch import RunningWorkers
from relibra.serving.server.clients import WorkerClients
from relibra.serving.server.completions import BadRequest, CompletionRequest, CompletionServer
from relibra.serving.server.text import load_codec


def make_app(
    model: RunningWorkers, folder: Path, name: str, on_start: Callable[[], None], rebalance_seconds: float = 0.0
) -> FastAPI:
    """Return the application of a model that is running.

    name       of the model, as clients call it
    on_start   called when requests are taken
    """
    codec, servers = load_codec(folder), []

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        clients = await WorkerClients.open(model, rebalance_seconds)
        servers.append(CompletionServer(clients, codec, name, model.layout.max_length))
        on_start()
        yield
        await clients.close()
        model.stop()  # a worker that is just being started again ends too, and with it who waits for it

    app = FastAPI(lifespan=lifespan, openapi_url=None)
    app.add_exception_handler(RequestValidationError, _refuse_body)
    app.add_exception_handler(ExceptionGroup, _answer_group)
    app.add_exception_handler(RelibraError, _answer_error)

    @app.get("/health")
    async def health() -> Response:
        clients = servers[0].clients
        lost = [clients.failure] if clients.failure else list(clients.lost_experts.values())
        about = {"running": clients.running, "rebalanced": clients.rebalanced}
        return JSONResponse(about | ({"error": "; ".join(lost)} if lost else {}), status_code=503 if lost else 200)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        about = {"id": name, "object": "model", "created": started, "owned_by": "relibra"}
        return {"object": "list", "data": [{**about, "max_model_len": model.layout.max_length}]}

    @app.post("/v1/completions")
    async def complete(body: CompletionRequest) -> Response:
        server = servers[0]
        if body.stream:
            events = server.stream(body)
            first = await anext(events)  # what is wrong with the request is told before the stream begins
            return StreamingResponse(_chain(first, events), media_type="text/event-stream")
        return JSONResponse(await server.answer(body))

    started = int(time.time())
    return app


async def _chain(first: str, rest: AsyncIterator[str]) -> AsyncIterator[str]:
    yield first
    async for one in rest:
        yield one


async def _refuse_body(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first.get("loc", ()) if part != "body")
    return _error(400, f"{where or 'body'}: {first.get('msg', 'is not valid')}")


async def _answer_group(request: Request, error: Exception) -> Response:
    assert isinstance(error, ExceptionGroup)
    first = error.exceptions[0]
    if not isinstance(first, RelibraError):
        raise error
    return await _answer_error(request, first)


async def _answer_error(_request: Request, error: Exception) -> Response:
    return _error(400 if isinstance(error, BadRequest) else 500, str(error))


def _error(status: int, message: str) -> Response:
    kind = "invalid_request_error" if status == 400 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "code": status}}, status_code=status)
