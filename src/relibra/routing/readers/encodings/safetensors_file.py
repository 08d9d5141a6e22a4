"""Map the arrays of a safetensors file that somebody else wrote, without reading them."""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray

from relibra.errors import TraceError
from relibra.routing.readers.encodings.excerpts import excerpt

MAX_HEADER_BYTES = 16 << 20
"""Values of a header take up to 30 times as much memory."""
MAX_ARRAYS = 1 << 16
MAX_EMPTY = 1 << 56
"""Product of the other axes of an array without entries: numpy takes no more bytes than an address has."""
_DTYPES = {
    "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "U16": np.uint16, "I16": np.int16, "U32": np.uint32,
    "I32": np.int32, "U64": np.uint64, "I64": np.int64,
}  # fmt: skip


def map_safetensors(path: Path) -> Mapping[str, ndarray]:
    """Return the arrays of integers and booleans in a file, as read-only views of it; other arrays are left out.

    raises    TraceError for a damaged file, or a shape that does not fit its bytes
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
            if length > min(size - 8, MAX_HEADER_BYTES):
                raise TraceError(f"{path} is no safetensors file: header of {length:,} bytes in a file of {size:,}")
            header = json.loads(file.read(length))
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path} is no safetensors file: {error}") from error
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}") from error
    if not isinstance(header, dict) or len(header) > MAX_ARRAYS:
        raise TraceError(
            f"{path} is no safetensors file: its header is no object, or names more than {MAX_ARRAYS:,} arrays"
        )
    first = 8 + length
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    found = {}
    for name, entry in entries.items():
        if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
            raise TraceError(f"{path}: {excerpt(name)} has no type in the header")
        if entry["dtype"] in _DTYPES:
            found[name] = _view(f"{path}: {name}", data, first, entry)
    return found


def _view(where: str, data: mmap.mmap, first: int, entry: Mapping[str, Any]) -> ndarray:
    """Return one array; raises TraceError if shape, type and place do not fit the file."""
    shape, place, dtype = entry.get("shape"), entry.get("data_offsets"), np.dtype(_DTYPES[entry["dtype"]])
    if not isinstance(shape, list) or not isinstance(place, list) or len(place) != 2:
        raise TraceError(f"{where}: shape and place in the header are no lists")
    numbers = [*shape, *place]
    if not all(type(number) is int and 0 <= number < 1 << 48 for number in numbers) or len(numbers) > 16:
        raise TraceError(
            f"{where}: shape {excerpt(shape)} and place {excerpt(place)} in the header are no lists of whole numbers"
        )
    begin, end = place
    if not begin <= end <= len(data) - first or math.prod(shape) * dtype.itemsize != end - begin:
        raise TraceError(f"{where}: shape {excerpt(shape)} of {dtype} does not fit bytes {begin} to {end} of the file")
    if begin == end:
        if math.prod(max(length, 1) for length in shape) > MAX_EMPTY:
            raise TraceError(f"{where} has no entries and shape {excerpt(shape)}")
        return np.zeros(shape, dtype=dtype)
    return np.frombuffer(data, dtype=dtype, count=math.prod(shape), offset=first + begin).reshape(shape)
