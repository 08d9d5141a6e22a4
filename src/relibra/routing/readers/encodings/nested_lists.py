"""Turn nested lists into arrays. One list may hold another a million times: the array is far larger than the file."""

from __future__ import annotations

import math
from itertools import chain
from typing import Any

import numpy as np
from numpy import ndarray

from relibra.errors import TraceError
from relibra.routing.readers.encodings.excerpts import excerpt

MAX_AXES = 4
FREE_ENTRIES = 1 << 24
"""Entries that any payload may have."""
_DTYPES = (np.uint8, np.int8, np.uint16, np.int16, np.int32, np.int64)


def array_of_lists(where: str, value: list[Any], payload_bytes: int) -> ndarray:
    """Return nested lists of whole numbers as an array of the narrowest type.

    payload_bytes   of the file or text: each entry takes at least one, unless lists are shared
    raises          TraceError for other entries (fractions, texts, true and false too), lists of different lengths,
                    and more entries than `FREE_ENTRIES` or bytes of the payload
    """
    shape = _shape_of_first(value)
    most = max(FREE_ENTRIES, payload_bytes)
    if math.prod(max(length, 1) for length in shape) > most:
        raise TraceError(f"{where} has shape {excerpt(shape)}, at most {most:,} entries are read: it repeats its lists")
    lists = [value]
    for axis, length in enumerate(shape):
        if any(type(one) is not list or len(one) != length for one in lists):
            raise TraceError(f"{where}: its lists have different lengths; the first ones have {excerpt(shape)}")
        if axis < len(shape) - 1:
            lists = list(chain.from_iterable(lists))
    if not math.prod(shape):
        return np.zeros(shape, dtype=np.int64)
    others = set(map(type, chain.from_iterable(lists))) - {int}
    if others:
        raise TraceError(f"{where} holds {sorted(kind.__name__ for kind in others)}: expected whole numbers")
    low, high = min(map(min, lists)), max(map(max, lists))
    dtype = next((one for one in _DTYPES if np.iinfo(one).min <= low and high <= np.iinfo(one).max), None)
    if dtype is None:
        raise TraceError(f"{where} holds {excerpt(low)} to {excerpt(high)}: expected whole numbers of 64 bits")
    return np.fromiter(chain.from_iterable(lists), dtype=dtype, count=math.prod(shape)).reshape(shape)


def _shape_of_first(value: Any) -> list[int]:
    """Return the lengths along the first entries."""
    shape: list[int] = []
    while isinstance(value, list) and len(shape) < MAX_AXES:
        shape.append(len(value))
        value = value[0] if value else None
    return shape
