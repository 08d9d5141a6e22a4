"""Decode routes as they travel in JSON: base64 `.npy` (vLLM), base64 of raw int32 (SGLang), `{data, shape, dtype}`
(SkyRL, prime-rl), `nrlre1:` strings (NeMo-RL), nested lists (Megatron).
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pybase64
from jaxtyping import UInt8
from msgspec import Raw, Struct
from numpy import ndarray

from relibra.errors import TraceError
from relibra.routing.array_sizes import MAX_LAYERS, MAX_TOP_K
from relibra.routing.readers.encodings.excerpts import excerpt
from relibra.routing.readers.encodings.json_text import Count, decode_json, decode_lists
from relibra.routing.readers.encodings.nested_lists import array_of_lists
from relibra.routing.readers.npz_arrays import damage_errors, parse_npy

DTYPES = ("uint8", "int8", "uint16", "int16", "int32", "int64")
"""Types that routes may have in forms that name one."""
_NRLRE = re.compile(rb"nrlre1:(int8|int16|int32):(\d{1,12})x(\d{1,6})x(\d{1,4}):")


class PackedRoutes(Struct):
    """Routes as `{data, shape, dtype, start}`, data in base64; start: token of the first row."""

    data: Raw
    shape: tuple[int, int, int]
    dtype: str
    start: Count = 0


def decode_routes(where: str, value: Raw) -> tuple[ndarray, int]:
    """Return routes `[rows, layers, choices]` in a form that says its shape, and the token of their first row.

    raises    TraceError for anything else
    """
    text, first, start = memoryview(value), bytes(memoryview(value)[:1]), 0
    if first == b"{":
        packed = decode_json(where, text, PackedRoutes)
        ids, start = shaped(where, decode_text(where, packed.data), packed.shape, packed.dtype), packed.start
    elif first == b"[":
        ids = array_of_lists(where, decode_lists(where, value), len(text))
    elif is_nrlre(value):
        head = _NRLRE.match(text, 1)
        if head is None:
            raise TraceError(f"{where} is no nrlre1:<int8|int16|int32>:<rows>x<layers>x<choices>:<base64> string")
        dtype, *shape = (part.decode() for part in head.groups())
        ids = shaped(where, decode_base64(where, text[head.end() : -1]), tuple(map(int, shape)), dtype)
    else:
        with damage_errors(where, "an .npy array in base64"):
            ids = parse_npy(decode_text(where, value))
    if ids.ndim != 3 or ids.dtype.kind not in "iu":
        raise TraceError(f"{where} is {ids.dtype} {ids.shape}: expected whole numbers [rows, layers, choices]")
    return ids, start


def is_nrlre(value: Raw) -> bool:
    """Return whether routes are a string of NeMo-RL, whose last row is a filler."""
    return bytes(memoryview(value)[:8]) == b'"nrlre1:'


def shaped(where: str, flat: ndarray | memoryview, shape: Any, dtype: str) -> ndarray:
    """Return bytes as an array `[rows, layers, choices]`, after checking that shape and type take as many bytes."""
    if dtype not in DTYPES:
        raise TraceError(f"{where} has type {excerpt(dtype)}: allowed are {', '.join(DTYPES)}")
    most = (1 << 40, MAX_LAYERS, MAX_TOP_K)
    if len(shape) != 3 or not all(0 <= length <= high for length, high in zip(shape, most, strict=True)):
        raise TraceError(f"{where} has shape {excerpt(shape)}: expected [rows, layers, choices]")
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size != len(flat):
        raise TraceError(f"{where} has {len(flat):,} bytes: shape {list(shape)} of {dtype} has {size:,}")
    return np.frombuffer(flat, dtype=np.dtype(dtype).newbyteorder("<")).reshape(shape)


def decode_text(where: str, value: Raw) -> ndarray:
    """Return the bytes of a JSON text in base64."""
    text = memoryview(value)
    if bytes(text[:1]) != b'"':
        raise TraceError(f"{where} has no routes: it is {bytes(text[:20])!r}, expected text in base64")
    return decode_base64(where, text[1:-1])


def decode_base64(where: str, text: bytes | memoryview) -> UInt8[ndarray, " X"]:
    r"""Return the bytes of a text in base64, padded with `=`, without spaces; `\/` of JSON is read as `/`.

    raises    TraceError for any other text; `where` begins the message
    """
    try:  # several times as fast as the standard library
        return np.frombuffer(pybase64.b64decode(text, validate=True), dtype=np.uint8)
    except ValueError as error:
        plain = bytes(text)
        if b"\\/" in plain:
            return decode_base64(where, plain.replace(b"\\/", b"/"))
        cut = f"{len(plain):,} characters are no multiple of 4; the text was cut" * bool(len(plain) % 4)
        other = "it holds characters outside of A-Z, a-z, 0-9, + and /, or '=' before the end"
        raise TraceError(f"{where} is no base64: {cut or other}") from error
