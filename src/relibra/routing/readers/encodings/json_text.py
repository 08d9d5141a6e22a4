"""Read JSON, and JSON lines, in which a few texts are far longer than the rest.

Routes of an answer are one text of megabytes. Such texts are cut out before the rest is parsed, and handed on as views
of the file: they are neither copied nor scanned character by character. Log-probabilities are passed over.
"""

from __future__ import annotations

import json
import mmap
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, no_type_check

import numpy as np
from numpy import ndarray

from relibra.errors import TraceError
from relibra.routing.compiled import compiled

LONG_KEYS = ("routed_experts", "prompt_routed_experts", "data")
"""Keys whose texts are cut out: routes of an answer, and of the form {data, shape, dtype}."""
SKIPPED_KEYS = ("logprobs", "prompt_logprobs")
"""Keys whose lists and objects are read as null: they have as many values as there are tokens."""
LONG = 64
"""Characters from which a text is cut out."""
MAX_REST_BYTES = 1 << 27
"""Most bytes of a document besides its long texts: its values take up to 13 times as much memory."""
MAX_CONTAINERS = 1 << 22
"""Most lists and objects of a document besides what is passed over: an empty one takes 25 times its bytes in memory."""
MAX_TEXTS = 1 << 19
"""Most long texts of a document."""
_KEY = re.compile(
    rb'"(?:(?:%b)"[ \t\r\n]*:[ \t\r\n]*"|(?:%b)"[ \t\r\n]*:[ \t\r\n]*(?=[\[{]))'
    % ("|".join(LONG_KEYS).encode(), "|".join(SKIPPED_KEYS).encode())
)
"""In valid JSON this is a key and the beginning of its text: inside a text, quotes have a backslash before them."""
_LONG_KEY = re.compile(rb'"(?:%b)"[ \t\r\n]*:[ \t\r\n]*"' % "|".join(LONG_KEYS).encode())


@dataclass(frozen=True, kw_only=True, eq=False)
class JsonDocument:
    """One parsed document, or line.

    where     file and line, begins messages
    size      bytes of the document
    value     the parsed value; long texts in it are replaced by names
    texts     the long texts, by these names
    """

    where: str
    size: int
    value: Any
    texts: dict[str, memoryview]

    def text(self, value: object) -> memoryview | str | None:
        """Return the text of a value: the long text that it names, or itself; None where it is no text."""
        return self.texts.get(value, value) if isinstance(value, str) else None


def iterate_documents(path: Path) -> Iterator[JsonDocument]:
    """Yield the documents of a file: one per line, or the whole file as one.

    raises    TraceError for a file that is empty or no JSON
    """
    try:
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                raise TraceError(f"{path} is empty: expected JSON")
            # Not closed here: long texts are views of it, and their last user frees it.
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}") from error
    yield from parse_documents(str(path), data)


def parse_documents(where: str, data: bytes | mmap.mmap) -> Iterator[JsonDocument]:
    """Yield the documents in bytes; see `iterate_documents`."""
    first = _line_end(data, 0)
    if data[first : first + 4096].strip() or _line_end(data, min(first + 4096, len(data))) < len(data):
        try:
            yield _parse(f"{where}, line 1", data, 0, first)
        except ValueError:  # a document over several lines
            first = 0
        if first:
            yield from _lines(where, data, first)
            return
    try:
        yield _parse(where, data, 0, len(data))
    except ValueError as error:
        raise TraceError(f"{where} is no JSON: {error}; expected a document, or one per line") from error


def parse_in_place(data: bytes | bytearray) -> Any:
    """Return the value of a JSON text, with its long texts of `LONG_KEYS` as views of the data.

    Of an object with a "logprob" only that is kept.

    raises    ValueError for what is no JSON, TraceError for more lists, objects and bytes than are read
    """
    return _parse("the answer", data, 0, len(data), in_place=True).value


def _lines(where: str, data: bytes | mmap.mmap, start: int) -> Iterator[JsonDocument]:
    """Yield the documents of the lines from the second on; blank ones are passed over."""
    number = 1
    while start < len(data):
        number, stop = number + 1, _line_end(data, start + 1)
        if stop - start > LONG or data[start:stop].strip():
            try:
                yield _parse(f"{where}, line {number}", data, start, stop)
            except ValueError as error:
                raise TraceError(f"{where}, line {number} is no JSON: {error}") from error
        start = stop


def _line_end(data: bytes | mmap.mmap, start: int) -> int:
    found = data.find(b"\n", start)
    return len(data) if found < 0 else found


def _parse(
    where: str, data: bytes | bytearray | mmap.mmap, start: int, stop: int, *, in_place: bool = False
) -> JsonDocument:
    """Parse one document; raises ValueError for what is no JSON, TraceError for one that is too large.

    in_place   long texts are put into the value, and log-probabilities are read
    """
    nonce, rest = secrets.token_hex(16), bytearray()
    texts: dict[str, memoryview] = {}
    view = memoryview(data)
    at = start
    while found := (_LONG_KEY if in_place else _KEY).search(data, at, stop):
        begin = found.end()
        if data[begin - 1] != ord('"'):
            length = int(_value_length(np.frombuffer(view[begin:stop], dtype=np.uint8)))
            if length == 0:  # looking on from here could take the square of the time
                raise ValueError(f"the list or object at byte {begin:,} does not end")
            rest += data[at:begin] + b"null"
            at = begin + length
            continue
        end = data.find(b'"', begin, stop)
        if end < 0:
            break
        short = end - begin < LONG or data.find(b"\\", begin, end) >= 0
        rest += data[at:end] if short else data[at:begin]
        if not short:
            name = f"{nonce}:{len(texts)}"
            texts[name] = view[begin:end]
            rest += name.encode()
        at = end
        if len(rest) > MAX_REST_BYTES or len(texts) > MAX_TEXTS:
            break
    _check_rest(where, rest, stop - at, len(texts))
    rest += data[at:stop]
    containers = rest.count(b"[") + rest.count(b"{")
    if containers > MAX_CONTAINERS:
        raise TraceError(
            f"{where} has {containers:,} lists and objects, at most {MAX_CONTAINERS:,} are read: write one answer per "
            "line (JSON lines)"
        )
    try:
        value = json.loads(rest, object_hook=partial(_with_texts, texts) if in_place else None)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return JsonDocument(where=where, size=stop - start, value=value, texts=texts)


def _with_texts(texts: dict[str, memoryview], one: dict[str, Any]) -> dict[str, Any]:
    """Return an object of a document with its long texts in place of their names; of a log-prob the number alone."""
    if "logprob" in one:  # there are as many as tokens, and the rest takes more memory than the answer
        return {"logprob": one["logprob"]}
    for key in LONG_KEYS:
        if isinstance(found := one.get(key), str) and found in texts:
            one[key] = texts[found]
    return one


def _check_rest(where: str, rest: bytearray, left: int, texts: int) -> None:
    """Raise TraceError for a document whose values would take far more memory than the file."""
    if len(rest) + left > MAX_REST_BYTES:
        raise TraceError(
            f"{where} has more than {MAX_REST_BYTES:,} bytes besides its routes: write one answer per line (JSON lines)"
        )
    if texts > MAX_TEXTS:
        raise TraceError(f"{where} has more than {MAX_TEXTS:,} texts of routes: write one answer per line (JSON lines)")


@compiled
@no_type_check
def _value_length(text: ndarray) -> int:
    """Return the bytes of the list or object that a text begins with; 0: it does not end."""
    depth, in_text, escaped = 0, False, False
    for place in range(len(text)):
        byte = text[place]
        if in_text:
            if escaped:
                escaped = False
            elif byte == 92:  # a backslash
                escaped = True
            elif byte == 34:
                in_text = False
        elif byte == 34:  # a quote
            in_text = True
        elif byte in (91, 123):  # [ {
            depth += 1
        elif byte in (93, 125):  # ] }
            depth -= 1
            if depth == 0:
                return place + 1
    return 0
