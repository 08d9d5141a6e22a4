"""`BodyReader`: request bodies, read within limits of bytes, time and work."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import HTTPException, Request
from pydantic import BaseModel, ValidationError

from relibra.serving.server.admission import SOON
from relibra.serving.server.bodies import ChatBody, CompletionBody, TokenBody
from relibra.serving.server.connections import unless_left
from relibra.serving.server.errors import validation_message
from relibra.serving.server.forked import SMALL_BYTES, run_forked
from relibra.serving.server.text import TextCodec

MOST_BODY_BYTES = 8 << 20
"""Of a body: 256 prompts of 4,096 tokens fit."""
MOST_BYTES_UNDER_WAY = 64 << 20
"""Of all bodies under way, each without its first SMALL_BYTES."""
BODY_SECONDS = 60.0
"""In which a body has to arrive."""
Body = TypeVar("Body", bound=BaseModel)
Asked = TypeVar("Asked", CompletionBody, ChatBody, TokenBody)


class BodyReader:
    """Reads bodies: small ones at once, others in a process of their own."""

    def __init__(self, name: str, codec: TextCodec, max_length: int) -> None:
        """Begin with no body under way, for a model of this name, and this many tokens of prompt and answer."""
        self._name, self._codec, self._max_length = name, codec, max_length
        self._under_way = 0
        _ = codec.longest_token, codec.special_tokens([""])  # computed now: the first call takes a while

    async def read_call(self, request: Request, kind: type[Body]) -> Body:
        """Return a small body without prompts; raises HTTPException as `read` does."""
        async with self._received(request, SMALL_BYTES) as data:
            return _parse(kind, data)

    async def read(self, request: Request, kind: type[Asked]) -> tuple[Asked, list[list[int]]]:
        """Return a body and the tokens of its prompts; a large one comes without its prompt fields.

        raises   HTTPException: 400 and 404 for a wrong one, 408 and 413 where it comes slowly or is long, 415 for other
                 types, 429 where too many are under way
        """
        async with self._received(request, MOST_BODY_BYTES) as data:
            if len(data) <= SMALL_BYTES:
                return self._parsed(kind, data)
            work = run_forked(lambda: self._parts(kind, data), len(data))
            rest, *prompts = await unless_left(work, request.receive)
            return kind.model_validate(rest), [array("i", prompt).tolist() for prompt in prompts]

    @asynccontextmanager
    async def _received(self, request: Request, most: int) -> AsyncIterator[bytes]:
        """Yield the bytes of a body; inside, they count as under way."""
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise HTTPException(415, "send the header Content-Type: application/json")
        data, counted = bytearray(), 0
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for piece in request.stream():
                    data += piece
                    more = max(0, len(data) - SMALL_BYTES) - counted
                    self._under_way, counted = self._under_way + more, counted + more
                    if len(data) > most:
                        raise HTTPException(413, f"the body is longer than {most:,} bytes: send less at once")
                    if counted and self._under_way > MOST_BYTES_UNDER_WAY:
                        raise HTTPException(429, "too many long bodies are under way: send it later", SOON)
            yield bytes(data)
        except TimeoutError as error:
            raise HTTPException(408, f"the body did not come within {BODY_SECONDS:g} s: send it again") from error
        finally:
            self._under_way -= counted

    def _parsed(self, kind: type[Asked], data: bytes) -> tuple[Asked, list[list[int]]]:
        body = _parse(kind, data)
        check_model(body.model, self._name)
        prompts = body.prompts(self._codec, self._max_length)
        for prompt in prompts:  # a text may be more tokens than its length says
            self._codec.check_length(prompt, self._max_length)
        return body, prompts

    def _parts(self, kind: type[Asked], data: bytes) -> Iterator[Any]:
        """Yield a body without its prompt and unknown fields, then the tokens of each prompt as int32."""
        body, prompts = self._parsed(kind, data)
        for part in (body, getattr(body, "sampling_params", None), getattr(body, "stream_options", None)):
            (getattr(part, "model_extra", None) or {}).clear()
        yield body.model_copy(update=body.no_prompt).model_dump(mode="json", exclude_unset=True, warnings=False)
        yield from (array("i", prompt).tobytes() for prompt in prompts)


def _parse(kind: type[Body], data: bytes) -> Body:
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise HTTPException(400, validation_message(error, data)) from error


def check_model(asked: str, name: str) -> None:
    """Raise HTTPException (404) where a client asks for another model."""
    if asked not in ("", name):
        raise HTTPException(404, f"the model {asked[:200]!r} is not served here: it is {name!r}")
