"""Messages between the API server and its workers, which receive and send them through a `Channel`.

A frame is a dictionary with one key, which says what is asked or answered. Requests travel as `Generate`, what a step
adds to them as `Progress`.
"""

from __future__ import annotations

import asyncio
import io
import struct
from typing import Any

import msgspec
import numpy as np
from msgspec import msgpack
from numpy import ndarray

from relibra.engine.sequence import FinishReason, SamplingParameters, Sequence
from relibra.errors import EngineError
from relibra.serving.channel import MOST_BYTES

_LENGTH = struct.Struct("!i")  # as connections of `multiprocessing` send it before each message


class Generate(msgspec.Struct, frozen=True):
    """A request; `number` is unique within a worker."""

    number: int
    tokens: tuple[int, ...]
    sampling: SamplingParameters

    def sequence(self) -> Sequence:
        """Return it as the engine takes it."""
        return Sequence(number=self.number, prompt=self.tokens, sampling=self.sampling)


class Progress(msgspec.Struct, frozen=True, omit_defaults=True):
    """A token of a sequence, or its end.

    token              None: an end without a token
    top                most likely tokens with their log-probs
    routes             with the last token, if asked for: a .npy file of the experts `[m, L, K]` of every token fed
    prompt_log_probs   with the first token, if asked for: of all tokens of the prompt but the first
    error              sentence, where `finish` is "error" or "lost"
    """

    number: int
    token: int | None = None
    log_prob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()
    finish: FinishReason | None = None
    error: str = ""
    routes: bytes | None = None
    prompt_log_probs: tuple[float, ...] | None = None


def progress_of(sequence: Sequence) -> Progress:
    """Return what the latest step has added to a sequence."""
    if sequence.finish in ("cancelled", "lost", "error"):
        return Progress(number=sequence.number, finish=sequence.finish, error=sequence.error)
    routes = sequence.routes if sequence.finish else None
    scores = sequence.scores if len(sequence.tokens) == 1 else ()
    return Progress(
        number=sequence.number,
        token=sequence.tokens[-1],
        log_prob=sequence.log_probs[-1],
        top=tuple(sequence.top),
        finish=sequence.finish,
        routes=None if routes is None else _npy_file(routes),
        prompt_log_probs=tuple(score for piece in scores for score in piece.tolist()) if scores else None,
    )


def _npy_file(array: ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


async def read_frame(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """Wait for a frame; None: the worker is gone. Raises EngineError for one above MOST_BYTES."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if not 0 <= length <= MOST_BYTES:
            raise EngineError(f"a control frame of {length} bytes is larger than {MOST_BYTES}")
        return msgpack.decode(await reader.readexactly(length), type=dict[str, Any])
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def write_frame(writer: asyncio.StreamWriter, frame: dict[str, Any]) -> None:
    """Queue a frame to a worker."""
    data = msgpack.encode(frame)
    writer.write(_LENGTH.pack(len(data)) + data)
