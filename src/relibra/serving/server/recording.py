"""`RouteRecorder`: the routes of served answers, written as a trace while the server answers."""

from __future__ import annotations

import io
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy import ndarray
from safetensors import SafetensorError

from relibra.errors import TraceError
from relibra.routing.trace import RoutingTrace, concatenate
from relibra.routing.trace_files import TraceWriter, write_index

FLUSH_ROWS = 1 << 14
"""Rows that wait in memory before they are written as a shard."""
_log = logging.getLogger(__name__)


class RouteRecorder:
    """Writes the routes of answers, without their tokens, as shards in a thread; the index after each shard."""

    def __init__(self, writer: TraceWriter, num_experts: int, layer_ids: Sequence[int]) -> None:
        """Take over the writer of a trace."""
        self._writer, self._thread = writer, ThreadPoolExecutor(1, "recorder")
        self._model: dict[str, Any] = {"num_experts": num_experts, "layer_ids": layer_ids, "source": "relibra serve"}
        self._waiting: list[tuple[int, ndarray]] = []

    def add(self, prompt_length: int, npy_file: bytes) -> None:
        """Take the routes `[n, L, K]` of the tokens that were fed for an answer."""
        self._waiting.append((prompt_length, np.load(io.BytesIO(npy_file), allow_pickle=False)))
        if sum(len(routes_nLK) for _, routes_nLK in self._waiting) >= FLUSH_ROWS:
            self._flush()

    def close(self) -> None:
        """Write what waits."""
        self._flush()
        self._thread.shutdown()

    def _flush(self) -> None:
        answers, self._waiting = self._waiting, []
        if answers:
            self._thread.submit(self._write, answers)

    def _write(self, answers: list[tuple[int, ndarray]]) -> None:
        samples: list[RoutingTrace] = []
        for length, routes_nLK in answers:
            try:
                samples.append(self._sample(len(samples), length, routes_nLK))
            except TraceError as error:
                _log.warning("the routes of an answer are left out (%s)", error)
        try:
            if samples:
                self._writer.append(concatenate(samples))
                write_index(self._writer.folder, self._writer.index())
        except (OSError, SafetensorError, TraceError) as error:
            _log.warning("cannot write routes to %s (%s): these are left out", self._writer.folder, error)

    def _sample(self, number: int, prompt_length: int, routes_nLK: ndarray) -> RoutingTrace:
        if routes_nLK.shape[1:2] != (layers := len(self._model["layer_ids"]),):
            raise TraceError(f"routes of shape {routes_nLK.shape} are not of the {layers} layers")
        # The last token of an answer is not fed: its row is there, and invalid.
        routes_nLK = np.concatenate([routes_nLK, routes_nLK[-1:]])
        valid_n = np.arange(len(routes_nLK)) < len(routes_nLK) - 1
        return RoutingTrace.from_samples(
            [routes_nLK], valid=[valid_n], sample_ids=[number], prompt_lengths=[prompt_length], **self._model
        )
