"""`ServedWeights`: the version of the weights that a server computes with, and how it gets others."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import HTTPException
from pydantic import BaseModel, Field

from relibra.serving.server.admission import Admission

FIRST_VERSION = "start"
"""Of the weights that a server was started with; and of new ones until they are given a name."""
_POLL_SECONDS = 0.005


class ReloadArguments(BaseModel):
    """Where the weights are."""

    weights_path: str = Field(min_length=1, max_length=4096)


class WorkerCall(BaseModel):  # type: ignore[no-redef]  # pydantic's mypy plugin adds **kwargs beside this field
    """Body of `/collective_rpc`: only `reload_weights` is offered."""

    method: str = Field(max_length=256)
    arguments: ReloadArguments = Field(validation_alias="kwargs")


class NewVersion(BaseModel):
    """Body of `/update_weight_version`."""

    new_version: str = Field(min_length=1, max_length=256)


class ServedWeights:
    """Weights of all workers."""

    def __init__(self, admission: Admission, updates: Path | None) -> None:
        """Begin with the weights of the start.

        updates   folder below which clients may name other weights, and so decide the answers; None: nowhere
        """
        self.version = FIRST_VERSION
        self._updates = None if updates is None else updates.resolve()
        self._admission, self._one_at_a_time = admission, asyncio.Lock()

    def check_offered(self) -> None:
        """Raise HTTPException (404) where clients may not load weights."""
        if self._updates is None:
            raise HTTPException(
                404, "this server keeps its weights: start it with --updates FOLDER to let clients load others"
            )

    async def load(self, call: WorkerCall) -> None:
        """Load a folder into all workers, between answers: those under way end before, those that wait begin after.

        All workers read it before the first one uses it, so that an error leaves all of them as they were.

        raises   HTTPException: 400 where a worker cannot load it, 503 where one is gone
        """
        if call.method != "reload_weights":
            raise HTTPException(400, f"method {call.method[:80]!r} is not offered: it is reload_weights")
        folder = self._folder(call.arguments.weights_path)
        clients = self._admission.clients
        async with self._one_at_a_time, self._no_answers(), clients.changing:
            if failed := await clients.change_weights(folder):
                raise HTTPException(400, f"the weights stay as they were: {failed[0]}")
            self.version = FIRST_VERSION

    def _folder(self, path: str) -> Path:
        """Return the folder that a client names; raises the same HTTPException (400) for none and for one elsewhere."""
        assert self._updates is not None, "check_offered was called before"
        with contextlib.suppress(OSError, ValueError):
            folder = Path(path).resolve()
            inside = folder.is_relative_to(self._updates)  # else nothing of it is looked at
            if inside and all(one.resolve().is_relative_to(self._updates) for one in folder.iterdir()):
                return folder
        raise HTTPException(400, f"{path[:300]} is no folder below {self._updates}, which --updates names")

    @asynccontextmanager
    async def _no_answers(self) -> AsyncIterator[None]:
        """Hold the queue, and wait until the workers run nothing."""
        self._admission.hold(True)
        try:
            while self._admission.clients.running > 0:
                await asyncio.sleep(_POLL_SECONDS)
            yield
        finally:
            self._admission.hold(False)
