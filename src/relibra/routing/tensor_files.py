"""Values in one file: a safetensors file with arrays, JSON facts and a checksum over both.

Before allocation the header is checked against the file, and names, types and shapes against the format; after reading,
the checksum is. Any changed byte that matters is detected.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from relibra.errors import RelibraError
from relibra.files import atomic_path
from relibra.routing.array_sizes import memory_errors

MAX_HEADER_BYTES = 1 << 20
MAX_LENGTHS = {"S": 1 << 31, "T": 1 << 40, "X": 1 << 40, "L": 1 << 16, "M": 1 << 24, "R": 1 << 15, "E": 1 << 15,
               "B": 1 << 10, "K": 1 << 16, "O": 1 << 40}  # fmt: skip
"""Longest axes: with an axis of length 0, a file could declare any length for the others without holding data."""
MAX_ENTRIES = 1 << 26
"""Most entries of the other axes of an array with an axis of length 0, which holds no data."""
Layout = Mapping[str, tuple[str, list[int]]]
"""Type and shape of each array of a file."""
_KEY = "relibra"
"""One metadata entry for all facts: the order in which safetensors writes several differs between runs."""


@dataclass(frozen=True, kw_only=True)
class TensorFormat:
    """Arrays and name of one kind of file.

    noun       its name in messages, with article ("a step plan")
    axes       letters of each array's axes; the same letter is the same length in all of them
    dtypes     type of each array
    older      earlier versions that are read too; the caller translates their facts
    optional   arrays that may be absent
    may_be_0   axes that may have length 0
    error      raised for every invalid file
    """

    name: str
    version: int
    noun: str
    axes: Mapping[str, str]
    dtypes: Mapping[str, type[np.generic]]
    older: frozenset[int] = frozenset()
    optional: frozenset[str] = frozenset()
    may_be_0: str = ""
    error: type[RelibraError]


def write_tensors(path: Path, form: TensorFormat, arrays: Mapping[str, ndarray], facts: Mapping[str, Any]) -> None:
    """Write a file atomically; the same content gives the same bytes. Facts are JSON values.

    raises    the error of the format, when types or shapes of arrays differ from it
    """
    check_arrays(form, arrays)
    tensors = {name: np.ascontiguousarray(arrays[name]) for name in sorted(arrays)}
    text = json.dumps(
        {"format": form.name, "version": form.version, "checksum": _checksum(tensors, facts), "facts": facts},
        sort_keys=True,
        allow_nan=False,
    )
    with atomic_path(path) as temporary:
        save_file(tensors, temporary, metadata={_KEY: text})


def check_arrays(form: TensorFormat, arrays: Mapping[str, ndarray]) -> None:
    """Check names, types and shapes of arrays against their format; raises the error of the format."""
    check_layout(form.noun, form, {name: (str(array.dtype), list(array.shape)) for name, array in arrays.items()})


def read_tensors(path: Path, form: TensorFormat) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arrays and the facts of a file; the caller checks the facts.

    raises    the error of the format, when the file is missing, damaged, or of another format or version
    """
    _check_header_size(path, form)
    try:
        with memory_errors(str(path), form.error), safe_open(path, framework="numpy") as file:
            body = parse_facts(path, (file.metadata() or {}).get(_KEY, "{}"), form)
            if set(body) != {"format", "version", "checksum", "facts"} or not isinstance(body["facts"], dict):
                raise form.error(f"{path} is damaged: its metadata holds {sorted(body)}")
            layout = layout_of(file)
            check_layout(str(path), form, layout)
            tensors = {name: file.get_tensor(name) for name in layout}
            damaged = body["checksum"] != _checksum(tensors, body["facts"])
    except (SafetensorError, OSError) as error:
        raise form.error(f"{path} cannot be read as safetensors: {error}") from error
    if damaged:
        raise form.error(f"{path} is damaged: its checksum does not match its content; write it again")
    return tensors, body["facts"]


def _check_header_size(path: Path, form: TensorFormat) -> None:
    if not path.is_file():
        found = "is a folder" if path.is_dir() else "does not exist"
        raise form.error(f"{path} {found}: expected {form.noun}")
    try:
        with path.open("rb") as file:
            length, size = int.from_bytes(file.read(8), "little"), path.stat().st_size
    except OSError as error:
        raise form.error(f"{path} cannot be read: {error.strerror}") from error
    if length > min(MAX_HEADER_BYTES, size - 8):
        raise form.error(
            f"{path} is not {form.noun}, or is truncated: a header of {length} bytes does not fit its {size} bytes "
            f"(at most {MAX_HEADER_BYTES})"
        )


def parse_facts(path: Path, text: str | bytes, form: TensorFormat) -> dict[str, Any]:
    """Return the JSON object of a file; raises the error of the format unless it says that it is of this format."""
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:  # bad UTF-8, bad JSON, nested too deeply
        raise form.error(f"{path} is damaged: it holds no JSON ({error})") from error
    if not isinstance(body, dict) or body.get("format") != form.name:
        raise form.error(f"{path} is not {form.noun}: its format must be {form.name!r}")
    if body.get("version") not in (form.version, *form.older):
        raise form.error(
            f"{path} has format version {body.get('version')!r}: this relibra reads version {form.version}; "
            "use the relibra that wrote it, or write it again"
        )
    return body


def layout_of(file: Any) -> Layout:
    """Return types and shapes of the arrays of an open safetensors file; opening it checked that they fill it."""
    slices = {name: file.get_slice(name) for name in sorted(file.keys())}
    return {name: (_dtype(piece.get_dtype()), piece.get_shape()) for name, piece in slices.items()}


def check_layout(where: str, form: TensorFormat, layout: Layout, known: Mapping[str, int] | None = None) -> None:
    """Compare names, types and shapes with the format; raises the error of the format.

    known    lengths of axes that are stated elsewhere
    """
    missing, unknown = set(form.axes) - form.optional - set(layout), set(layout) - set(form.axes)
    if missing or unknown:
        raise form.error(f"{where} holds arrays {sorted(layout)}: expected {sorted(form.axes)}")
    lengths = dict(known or {})
    for name, (dtype, shape) in layout.items():
        letters, expected = form.axes[name], str(np.dtype(form.dtypes[name]))
        if dtype != expected or len(shape) != len(letters):
            raise form.error(f"{where}: {name} is {dtype} {shape}, expected {expected} [{', '.join(letters)}]")
        for letter, length in zip(letters, shape, strict=True):
            if length > MAX_LENGTHS[letter]:
                raise form.error(f"{where}: axis {letter} of {name} has length {length}, at most {MAX_LENGTHS[letter]}")
            if lengths.setdefault(letter, length) != length or (length == 0 and letter not in form.may_be_0):
                raise form.error(
                    f"{where}: axis {letter} of {name} has length {length}, elsewhere {lengths[letter]}"
                    f"{'' if length else '; it must not be empty'}"
                )
        if 0 in shape and math.prod(length or 1 for length in shape) > MAX_ENTRIES:
            raise form.error(f"{where}: {name} is {shape} and holds nothing: its other axes have at most {MAX_ENTRIES}")


def _dtype(code: str) -> str:
    """Return numpy's name of a safetensors type ("I16", "F32"); other names are returned unchanged."""
    return {"I": "int", "U": "uint", "F": "float"}.get(code[0], code[0]) + code[1:]


def _checksum(tensors: Mapping[str, ndarray], facts: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for name, array in sorted(tensors.items()):
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
