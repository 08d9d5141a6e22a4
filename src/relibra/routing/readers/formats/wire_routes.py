"""Decode routes as they travel: base64 `.npy` (vLLM), base64 of raw int32 (SGLang), `{data, shape, dtype}` (SkyRL,
prime-rl), `nrlre1:` strings (NeMo-RL), nested lists (Megatron).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy import ndarray

from relibra.errors import TraceError
from relibra.routing.array_sizes import MAX_LAYERS, MAX_TOP_K
from relibra.routing.readers.encodings.base64_text import decode_base64
from relibra.routing.readers.encodings.excerpts import excerpt
from relibra.routing.readers.encodings.json_text import JsonDocument
from relibra.routing.readers.encodings.nested_lists import array_of_lists
from relibra.routing.readers.npz_arrays import parse_npy

DTYPES = ("uint8", "int8", "uint16", "int16", "int32", "int64")
"""Types that routes may have in forms that name one."""
_NRLRE = re.compile(r"nrlre1:(int8|int16|int32):(\d{1,12})x(\d{1,6})x(\d{1,4}):")


def decode_routes(where: str, value: Any, document: JsonDocument) -> ndarray:
    """Return the array `[rows, layers, choices]` of routes in any of the forms that say their own shape.

    raises    TraceError for anything else
    """
    if isinstance(value, Mapping):
        ids = decode_packed(where, value, document)
    elif isinstance(value, list):
        ids = array_of_lists(where, value, document.size)
    else:
        ids = _decode_text(where, value, document)
    if ids.ndim != 3 or ids.dtype.kind not in "iu":
        raise TraceError(f"{where} is {ids.dtype} {ids.shape}: expected whole numbers [rows, layers, choices]")
    return ids


def _decode_text(where: str, value: Any, document: JsonDocument) -> ndarray:
    text = document.text(value)
    if text is None:
        raise TraceError(f"{where} has no routes: it is {type(value).__name__}")
    data = _bytes(where, text)
    if bytes(data[:7]) == b"nrlre1:":
        return decode_nrlre(where, data)
    try:
        return parse_npy(decode_base64(where, data))
    except ValueError as error:
        if isinstance(error, TraceError):
            raise
        raise TraceError(f"{where} is no .npy array in base64: {error}") from error


def decode_raw_int32(where: str, value: Any, document: JsonDocument, layers: int, top_k: int) -> ndarray:
    """Return `[rows, layers, top_k]` from base64 of int32 without a header."""
    text = document.text(value)
    if text is None:
        raise TraceError(f"{where} has no routes: it is {type(value).__name__}, expected base64 text")
    flat = decode_base64(where, _bytes(where, text))
    if len(flat) % (4 * layers * top_k):
        raise TraceError(
            f"{where} has {len(flat):,} bytes: no multiple of 4 bytes x {layers} layers x {top_k} choices; check "
            "--recorded-layers (all decoder layers of the model) and --top-k"
        )
    return flat.view("<i4").reshape(-1, layers, top_k)


def decode_packed(where: str, value: Mapping[str, Any], document: JsonDocument) -> ndarray:
    """Return the array of `{data, shape, dtype}`, data in base64."""
    text = document.text(value.get("data"))
    if text is None:
        raise TraceError(f"{where} is an object without base64 text in 'data'")
    return shaped(where, decode_base64(where, _bytes(where, text)), value.get("shape"), value.get("dtype"))


def decode_nrlre(where: str, data: bytes | memoryview) -> ndarray:
    """Return the array of `nrlre1:<dtype>:<rows>x<layers>x<choices>:<base64>`."""
    head = _NRLRE.match(bytes(data[:64]).decode("latin-1"))
    if head is None:
        raise TraceError(f"{where} is no nrlre1:<int8|int16|int32>:<rows>x<layers>x<choices>:<base64> string")
    body = decode_base64(where, data[head.end() :])
    return shaped(where, body, [int(number) for number in head.groups()[1:]], head[1])


def shaped(where: str, flat: ndarray | bytes | memoryview, shape: Any, dtype: Any) -> ndarray:
    """Return bytes as an array `[rows, layers, choices]`, after comparing shape and type with their number."""
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise TraceError(f"{where} has type {excerpt(dtype)}: allowed are {', '.join(DTYPES)}")
    most = (1 << 40, MAX_LAYERS, MAX_TOP_K)
    if not isinstance(shape, list) or len(shape) != 3 or not all(map(_is_length, shape, most)):
        raise TraceError(f"{where} has shape {excerpt(shape)}: expected [rows, layers, choices]")
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size != len(flat):
        raise TraceError(f"{where} has {len(flat):,} bytes: shape {shape} of {dtype} has {size:,}")
    return np.frombuffer(flat, dtype=np.dtype(dtype).newbyteorder("<")).reshape(shape)


def _is_length(number: object, most: int) -> bool:
    return type(number) is int and 0 <= number <= most


def _bytes(where: str, text: str | memoryview) -> bytes | memoryview:
    if isinstance(text, memoryview):
        return text
    try:
        return text.encode("ascii")
    except UnicodeEncodeError as error:
        raise TraceError(f"{where} is no base64: it holds characters outside of ASCII") from error
