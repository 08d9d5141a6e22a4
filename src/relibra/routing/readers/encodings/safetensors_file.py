"""Map the arrays of a safetensors file that somebody else wrote, without reading them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import numpy as np
from msgspec import Meta, Raw, Struct
from numpy import ndarray

from relibra.errors import TraceError
from relibra.routing.readers.encodings.excerpts import excerpt
from relibra.routing.readers.encodings.json_text import decode_json
from relibra.routing.readers.encodings.mapped_file import map_file

MAX_HEADER_BYTES = 16 << 20
"""A header takes up to 30 times as much memory once it is decoded."""
MAX_ARRAYS = 1 << 16
MAX_EMPTY = 1 << 56
"""Largest product of an array's axes, each 0 counted as 1: numpy refuses far larger ones even for empty arrays."""
_DTYPES = {
    "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "U16": np.uint16, "I16": np.int16, "U32": np.uint32,
    "I32": np.int32, "U64": np.uint64, "I64": np.int64,
}  # fmt: skip
_Length = Annotated[int, Meta(ge=0, lt=1 << 48)]


class _Entry(Struct):
    dtype: str
    shape: list[_Length]
    data_offsets: tuple[_Length, _Length]


def map_safetensors(path: Path) -> dict[str, ndarray]:
    """Return the arrays of integers and booleans in a file, as read-only views of it; other arrays are left out.

    raises    TraceError for a damaged file, or a shape that does not fit its bytes
    """
    data = memoryview(map_file(path, "safetensors"))
    first = 8 + int.from_bytes(data[:8], "little")
    if first > min(len(data), MAX_HEADER_BYTES):
        raise TraceError(f"{path} is no safetensors file: header of {first:,} bytes in a file of {len(data):,}")
    header: dict[str, Raw] = decode_json(f"{path}: header", data[8:first], dict[str, Raw])
    header.pop("__metadata__", None)
    if len(header) > MAX_ARRAYS:
        raise TraceError(f"{path} names {len(header):,} arrays: allowed are {MAX_ARRAYS:,}")
    entries = {name: decode_json(f"{path}: {name}", memoryview(one), _Entry) for name, one in header.items()}
    return {name: _view(f"{path}: {name}", data[first:], one) for name, one in entries.items() if one.dtype in _DTYPES}


def _view(where: str, data: memoryview, entry: _Entry) -> ndarray:
    """Return one array; raises TraceError if shape, type and place do not fit the file."""
    shape, (begin, end), dtype = entry.shape, entry.data_offsets, np.dtype(_DTYPES[entry.dtype])
    fits = begin <= end <= len(data) and math.prod(shape) * dtype.itemsize == end - begin
    if not fits or len(shape) > 14 or math.prod(max(length, 1) for length in shape) > MAX_EMPTY:
        empty = " and no entries" if begin == end else ""
        raise TraceError(
            f"{where} has shape {excerpt(shape)}{empty}: {dtype} do not fit bytes {begin} to {end} of the data"
        )
    return np.frombuffer(data[begin:end], dtype).reshape(shape)
