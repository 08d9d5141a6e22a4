"""Read JSON, and JSON lines, into types of msgspec: what a type does not name is passed over without being made.

Fields of type `Raw` are views of the mapped file: routes of an answer are one text of megabytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw

from relibra.errors import TraceError
from relibra.routing.readers.encodings.mapped_file import map_file

Count = Annotated[int, Meta(ge=0, lt=1 << 40)]
"""A field that counts tokens, rows or choices."""
MAX_CONTAINERS = 1 << 22
"""Most lists or objects that are made from a document: an empty list takes 35 times its bytes in memory."""
MAX_LIST_BYTES = 1 << 27
"""Most bytes of nested lists: their values take up to 13 times as much memory."""
_CAUSE = "the file was damaged, or is of another format than the one named"
_CHUNK = 1 << 16
_PYTHON_ONLY = re.compile(rb"(?<=[\[,:\s])-?(?:NaN|Infinity)(?=[\],}\s])|\\u[dD][89a-fA-F][\da-fA-F]{2}")
"""Numbers and halves of surrogate pairs that Python's json writes, and msgspec does not read."""


def iterate_json(path: Path, kind: Any) -> Iterator[tuple[str, Any]]:
    """Yield place ("file, line 2") and value of each line of a file, or of the one document that it is.

    kind      type of a line, or of the document
    raises    TraceError for a file that is empty or no JSON, and for other values
    """
    data = map_file(path, "JSON")
    start, number, first = 0, 0, True
    while start < len(data):
        stop, number = data.find(b"\n", start) + 1 or len(data), number + 1
        line, start = memoryview(data)[start:stop], stop
        if len(line) <= _CHUNK and not bytes(line).strip():
            continue
        where = f"{path}, line {number}"
        try:
            value = _decode(where, line, kind)
        except msgspec.DecodeError as error:
            if not first:
                raise TraceError(f"{where} is no JSON: {error}; {_CAUSE}") from error
            where, start = str(path), len(data)  # a document over several lines
            value = decode_json(f"{path}, read as one document,", memoryview(data), kind)
        first = False
        yield where, value


def decode_json(where: str, text: bytes | memoryview, kind: Any) -> Any:
    """Return the value of a text; raises TraceError for what is no JSON, another type, and too many objects."""
    try:
        return _decode(where, text, kind)
    except msgspec.DecodeError as error:
        raise TraceError(f"{where} is no JSON: {error}; {_CAUSE}") from error


def decode_lists(where: str, text: Raw) -> Any:
    """Return nested lists, or another value; raises TraceError for lists that take far more memory than routes do."""
    size = len(memoryview(text))
    held = bytes(text) if size <= MAX_LIST_BYTES else b""
    lists = held.count(b"[") + held.count(b"{")
    if size > MAX_LIST_BYTES or lists > MAX_CONTAINERS:
        raise TraceError(
            f"{where} has {size:,} bytes and {lists:,} lists: allowed are {MAX_LIST_BYTES:,} bytes and "
            f"{MAX_CONTAINERS:,} lists; write one answer per line (JSON lines)"
        )
    return decode_json(where, held, Any)


def _decode(where: str, text: bytes | memoryview, kind: Any) -> Any:
    """Return the value of a text; raises DecodeError for what is no JSON, TraceError for wrong types and depths."""
    if len(text) > 3 * MAX_CONTAINERS and _count(text, b"{") > MAX_CONTAINERS:
        objects = _count(text, b"{") - 2 * _count(text, b'"logprob"')  # those of log-probs are passed over
        if objects > MAX_CONTAINERS:
            raise TraceError(
                f"{where} has {objects:,} objects, at most {MAX_CONTAINERS:,} are read: write one answer per line "
                "(JSON lines)"
            )
    try:
        try:
            return msgspec.json.decode(text, type=kind)
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:
            replaced = _PYTHON_ONLY.sub(lambda found: b"\\u003f" if found[0][:1] == b"\\" else b"null", text)
            return msgspec.json.decode(replaced, type=kind)
    except msgspec.ValidationError as error:
        raise TraceError(f"{where}: {error}; {_CAUSE}") from error
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(str(error)) from error
    except RecursionError as error:
        raise TraceError(f"{where} is nested too deeply; {_CAUSE}") from error


def _count(text: bytes | memoryview, token: bytes) -> int:
    return sum(bytes(text[at : at + _CHUNK]).count(token) for at in range(0, len(text), _CHUNK))


def list_length(text: Raw) -> int | None:
    """Return how many numbers a list has, without decoding it; None: it is no list of numbers."""
    held = bytes(text).strip()
    if held[:1] != b"[" or any(held.find(one, 1) > 0 for one in (b"[", b"{", b'"')):
        return None
    return held.count(b",") + bool(held[1:-1].strip())
