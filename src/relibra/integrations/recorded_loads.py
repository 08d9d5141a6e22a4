"""Loads of samples, counted from routes as a trainer holds them; numpy arrays and CPU tensors alike, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Int64, Integer
from numpy import ndarray

from relibra.errors import TraceError
from relibra.parallel_map import parallel_map
from relibra.routing.demand import count_token_slots


def count_samples(
    routes: Sequence[Any], length_S: Int64[ndarray, " S"], *, num_experts: int, num_ranks: int
) -> tuple[Int64[ndarray, "S L R"], Bool[ndarray, " L"]]:
    """Return token-slots of each sample at the experts of each rank, and which layers have experts.

    Rows that are -1, and with more than one choice also rows that are zero in all layers, hold no route. A layer whose
    every choice is expert 0 is dense, or was not captured.

    routes      of each sample: integers [rows, layers, choices], one row per token or one less. Taken once each, by
                several threads, and not kept
    length_S    tokens of each sample
    num_ranks   divides `num_experts`; rank r holds experts r E / R ... (r + 1) E / R - 1
    raises      TraceError for a missing sample, another shape, and ids out of range
    """
    if len(routes) != len(length_S):
        raise TraceError(f"{len(length_S)} samples are scheduled, and {len(routes)} have routes")
    if not len(routes):
        raise TraceError("no samples are scheduled")

    def count(s: int) -> tuple[tuple[int, ...], Int64[ndarray, "L E"]]:
        ids_TLK = _checked(f"sample {s}", routes[s], int(length_S[s]))
        return ids_TLK.shape[1:], _count(f"sample {s}", ids_TLK, num_experts)

    counted = parallel_map(count, len(routes))
    shapes = {shape for shape, _ in counted}
    if len(shapes) > 1:
        raise TraceError(f"samples have routes of different layers and choices: {sorted(shapes)[:3]}")
    counts, L = [counts_LE for _, counts_LE in counted], shapes.pop()[0]
    share_SLR = np.stack([item.reshape(L, num_ranks, num_experts // num_ranks).sum(axis=2) for item in counts])
    used_L = np.logical_or.reduce([item[:, 1:].any(axis=1) for item in counts])
    return share_SLR, used_L


def of_used_layers(share_SLR: Int64[ndarray, "S L R"], used_L: Bool[ndarray, " L"]) -> Float32[ndarray, "S l R"]:
    """Return the token-slots in layers that have experts.

    raises    TraceError where no layer has
    """
    if not used_L.any():
        raise TraceError("all recorded choices are expert 0: the engine captured nothing")
    return share_SLR[:, used_L].astype(np.float32)


def _checked(where: str, routes: Any, tokens: int) -> Integer[ndarray, "T L K"]:
    """Return the routes of a sample as an array; raises TraceError where they are missing or of another shape."""
    if routes is None:
        raise TraceError(f"{where} has no routes")
    try:
        array = np.asarray(routes)
    except (TypeError, ValueError, RuntimeError) as error:  # bfloat16, ragged lists, a tensor that is not on the CPU
        raise TraceError(f"{where} has routes that are no array of numpy ({error}): expected integers") from error
    if array.ndim != 3 or array.dtype.kind not in "iu" or 0 in array.shape[1:]:
        raise TraceError(
            f"{where} has routes of type {array.dtype} and shape {array.shape}: expected integers [rows, layers, "
            "choices]"
        )
    if not tokens - 1 <= len(array) <= tokens:
        raise TraceError(f"{where} has {len(array):,} rows for {tokens:,} tokens: expected one for each, or one less")
    return array


def _count(where: str, ids_TLK: Integer[ndarray, "T L K"], num_experts: int) -> Int64[ndarray, "L E"]:
    """Return the token-slots of each layer and expert; raises TraceError where an id is none of an expert."""
    recorded_T = _recorded(ids_TLK)
    try:
        [counts_LE] = count_token_slots(ids_TLK, recorded_T, np.array([0, len(ids_TLK)]), num_experts)
    except TraceError as error:
        illegal_TL = recorded_T[:, None] & ((ids_TLK < 0) | (ids_TLK >= num_experts)).any(axis=2)
        position, layer = np.argwhere(illegal_TL)[0].tolist()
        raise TraceError(
            f"{where} has the expert ids {ids_TLK[position, layer].tolist()} at position {position} in layer {layer} "
            f"of those recorded, beyond the {num_experts} experts of the model; a row without a route is -1 in all "
            "layers"
        ) from error
    return counts_LE


def _recorded(ids_TLK: Integer[ndarray, "T L K"]) -> Bool[ndarray, " T"]:
    """Return which rows hold a route."""
    valid_T = np.ones(len(ids_TLK), dtype=bool)
    suspects = np.flatnonzero(ids_TLK[:, -1, 0] <= 0)  # the last layer has experts, where any has
    rows_TLK = ids_TLK[suspects]
    absent_T = (rows_TLK == -1).all(axis=(1, 2))
    if ids_TLK.shape[2] > 1:
        absent_T |= ~rows_TLK.any(axis=(1, 2))
    valid_T[suspects[absent_T]] = False
    return valid_T
