"""Trace folders: `index.json` and safetensors shards, written atomically, read in pieces.

The index is written last. It holds the size and SHA-256 of every shard and its own digest, so an unfinished or changed
folder is refused. Shards hold whole samples. docs/trace-format.md describes the format for other programs.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from relibra.errors import TraceError
from relibra.files import atomic_path, read_bounded, write_text
from relibra.routing.tensor_files import TensorFormat, check_layout, layout_of, parse_facts
from relibra.routing.trace import MAX_EXPERTS, PER_SAMPLE, RoutingTrace, concatenate, expert_dtype

FORMAT = "relibra.routing-trace"
FORMAT_VERSION = 1
INDEX = "index.json"
SHARD_ROWS = 1 << 18
"""Default rows per shard: 100 MB at 48 layers x 8 choices."""
MAX_INDEX_BYTES = 64 << 20
_PER_ROW = {"routed_experts": "TLK", "valid_rows": "T", "token_hash": "T"}
_TENSORS = TensorFormat(
    name=FORMAT,
    version=FORMAT_VERSION,
    noun="a routing trace",
    axes={**_PER_ROW, "offsets": "O", **dict.fromkeys(PER_SAMPLE, "S")},
    dtypes={"valid_rows": np.uint8, "token_hash": np.uint16, **dict.fromkeys(("offsets", *PER_SAMPLE), np.int64)},
    optional=frozenset({"token_hash"}),
    may_be_0="ST",
    error=TraceError,
)
"""Arrays of a shard, but for the type of `routed_experts`; axis O has one entry more than axis S."""

_Count = Annotated[int, Field(ge=0)]
_LayerId = Annotated[int, Field(ge=0, lt=1 << 31)]
_SHARD_PREFIX = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class ShardEntry(BaseModel):
    """Index entry of one shard."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    file: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors$")
    samples: _Count
    rows: _Count
    size: _Count
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class TraceIndex(BaseModel):
    """Content of `index.json`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: str = FORMAT
    version: int = FORMAT_VERSION
    num_experts: int = Field(ge=1, le=MAX_EXPERTS)
    top_k: int = Field(ge=1)
    layer_ids: list[_LayerId] = Field(min_length=1)
    group_names: list[str] = []
    source: str = "unknown"
    shards: list[ShardEntry] = Field(min_length=1)

    @field_validator("shards")
    @classmethod
    def _each_shard_once(cls, shards: list[ShardEntry]) -> list[ShardEntry]:
        if len({shard.file for shard in shards}) < len(shards):
            raise ValueError("a shard is listed twice")
        return shards

    @property
    def rows(self) -> int:
        """Return the token rows of all shards."""
        return sum(shard.rows for shard in self.shards)

    @property
    def samples(self) -> int:
        """Return the samples of all shards."""
        return sum(shard.samples for shard in self.shards)


class TraceWriter:
    """Write a trace in pieces at bounded memory; leaving the `with` block writes the index.

    >>> with TraceWriter(folder) as writer:  # doctest: +SKIP
    ...     for piece in pieces:
    ...         writer.append(piece)
    """

    def __init__(self, folder: Path | str, *, shard_rows: int = SHARD_ROWS, shard_prefix: str = "shard") -> None:
        """Prepare to write into `folder`, which must not hold a trace yet.

        shard_rows     pieces with more rows are cut at sample borders
        shard_prefix   start of the shard names; differs between several writers of one trace (one per rank)
        raises         TraceError when the folder already holds a finished trace
        """
        self.folder = Path(folder)
        self.shard_rows = shard_rows
        self.shard_prefix = shard_prefix
        self.shards: list[ShardEntry] = []
        self._first: RoutingTrace | None = None
        if not _SHARD_PREFIX.fullmatch(shard_prefix):
            raise TraceError(f"shard_prefix {shard_prefix!r} may hold letters, digits, '.', '_' and '-' only")
        self._refuse_finished()

    def _refuse_finished(self) -> None:
        if (self.folder / INDEX).exists():
            raise TraceError(f"{self.folder} already holds a trace: choose another folder or delete it")

    def append(self, trace: RoutingTrace) -> None:
        """Write samples as one or more shards; raises TraceError when they are not valid, or of another model."""
        trace.validate()
        if self._first is None:
            self._first = trace.select([])
        else:
            concatenate([self._first, trace.select([])])  # raises unless both come from one model
        for piece in split_samples(trace, self.shard_rows):
            self.shards.append(_write_shard(self.folder, f"{self.shard_prefix}-{len(self.shards):05d}", piece))

    def index(self) -> TraceIndex:
        """Return the index of what has been written so far; raises TraceError when no samples were written."""
        if self._first is None or not self.shards:
            raise TraceError(f"no samples were written to {self.folder}: a trace needs at least one")
        return index_of(self._first, self.shards)

    def __enter__(self) -> TraceWriter:
        """Return the writer."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Write the index, unless the block raised: then the folder has none and readers refuse it."""
        if kind is None:
            self._refuse_finished()  # another writer may have finished first
            write_index(self.folder, self.index())


def index_of(trace: RoutingTrace, shards: list[ShardEntry]) -> TraceIndex:
    """Return the index of these shards; `trace` is of the same model."""
    return TraceIndex(
        num_experts=trace.num_experts,
        top_k=trace.top_k,
        layer_ids=trace.layer_ids.tolist(),
        group_names=list(trace.group_names),
        source=trace.source,
        shards=shards,
    )


def write_index(folder: Path, index: TraceIndex) -> None:
    """Write the index, which completes the trace: readers refuse a folder without one."""
    body = index.model_dump(mode="json")
    write_text(folder / INDEX, json.dumps({"digest": _digest(body), **body}, indent=1) + "\n")


def write_trace(trace: RoutingTrace, folder: Path | str, *, shard_rows: int = SHARD_ROWS) -> None:
    """Write one trace to a new folder; raises TraceError when it is not valid or the folder already holds one."""
    with TraceWriter(folder, shard_rows=shard_rows) as writer:
        writer.append(trace)


def read_index(folder: Path | str) -> TraceIndex:
    """Read the index of a trace folder; raises TraceError when there is none, or for damage or another version."""
    path = Path(folder) / INDEX
    if not path.is_file():
        run = any(Path(folder).glob("traces/step-*")) or any(Path(folder).glob("step-*"))
        hint = (
            "looks like a run: pass one of its traces/step-... folders" if run else "was not finished: record it again"
        )
        raise TraceError(f"{folder} is not a finished trace: it has no {INDEX}, and {hint}")
    most = min(MAX_INDEX_BYTES, path.stat().st_size)  # a read allocates as much at once
    body = parse_facts(path, read_bounded(path, most, TraceError, "an index"), _TENSORS)
    digest = body.pop("digest", None)
    if digest != _digest(body):
        raise TraceError(f"{path} is damaged: its digest does not match its content; record the trace again")
    try:
        return TraceIndex.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        raise TraceError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def iterate_trace(folder: Path | str, *, max_rows: int = SHARD_ROWS) -> Iterator[RoutingTrace]:
    """Yield a trace in pieces of whole samples, in order, holding one piece at a time.

    The SHA-256 of a shard is checked before its first piece, and all rows of a piece before it is yielded.

    max_rows   most rows per piece; a longer sample is a piece of its own
    raises     TraceError for missing, truncated or changed shards and illegal ids
    """
    folder = Path(folder)
    index = read_index(folder)
    for entry in index.shards:
        yield from _iterate_shard(folder / entry.file, entry, index, max_rows)


def read_trace(folder: Path | str) -> RoutingTrace:
    """Read a whole trace into memory (`iterate_trace` reads it in pieces); raises TraceError as `iterate_trace`."""
    pieces = list(iterate_trace(folder, max_rows=1 << 62))
    return pieces[0] if len(pieces) == 1 else concatenate(pieces)


def split_samples(trace: RoutingTrace, max_rows: int) -> Iterator[RoutingTrace]:
    """Yield views of consecutive samples with at most `max_rows` rows (or one longer sample) each."""
    for start, stop in _sample_runs(trace.offsets, max_rows):
        yield trace.select(range(start, stop))


def _sample_runs(offsets: np.ndarray, max_rows: int) -> Iterator[tuple[int, int]]:
    start, num_samples = 0, len(offsets) - 1
    while start < num_samples:
        limit = int(offsets[start]) + max_rows
        stop = max(start + 1, int(np.searchsorted(offsets, limit, side="right")) - 1)
        yield start, stop
        start = stop


def _write_shard(folder: Path, name: str, trace: RoutingTrace) -> ShardEntry:
    tensors = {
        "routed_experts": np.ascontiguousarray(trace.experts_TLK),
        "valid_rows": trace.valid_T.astype(np.uint8),
        "offsets": np.ascontiguousarray(trace.offsets),
        **{column: getattr(trace, column).astype(np.int64) for column in PER_SAMPLE},
    }
    if trace.token_hash_T is not None:
        tensors["token_hash"] = np.ascontiguousarray(trace.token_hash_T)
    path = folder / f"{name}.safetensors"
    with atomic_path(path) as temporary:
        save_file(tensors, temporary)
        size, sha256 = temporary.stat().st_size, _sha256(temporary)
    return ShardEntry(file=path.name, samples=trace.num_samples, rows=trace.num_rows, size=size, sha256=sha256)


def _check_shard(path: Path, entry: ShardEntry) -> None:
    if not path.is_file():
        raise TraceError(f"shard {path} is missing but is listed in the index: copy the whole folder, or record again")
    size = path.stat().st_size
    if size != entry.size:
        raise TraceError(f"shard {path} has {size} bytes, the index says {entry.size}: it was cut or overwritten")
    if _sha256(path) != entry.sha256:
        raise TraceError(f"shard {path} does not match its SHA-256 in the index: bytes changed; record the trace again")


def _iterate_shard(path: Path, entry: ShardEntry, index: TraceIndex, max_rows: int) -> Iterator[RoutingTrace]:
    S, T, L, K = entry.samples, entry.rows, len(index.layer_ids), index.top_k
    dtypes = {**_TENSORS.dtypes, "routed_experts": expert_dtype(index.num_experts)}
    try:
        _check_shard(path, entry)
        with safe_open(path, framework="numpy") as file:
            layout = layout_of(file)
            check_layout(
                f"shard {path}", replace(_TENSORS, dtypes=dtypes), layout, {"S": S, "O": S + 1, "T": T, "L": L, "K": K}
            )
            offsets = file.get_tensor("offsets")
            if offsets[0] != 0 or offsets[-1] != T or (offsets[1:] < offsets[:-1]).any():
                raise TraceError(f"shard {path}: sample offsets must rise from 0 to {T} rows")
            columns = {column: file.get_tensor(column) for column in PER_SAMPLE}
            for start, stop in _sample_runs(offsets, max_rows):
                rows = slice(int(offsets[start]), int(offsets[stop]))
                of_rows = {name: _read_rows(file, name, rows, dtypes[name]) for name in _PER_ROW if name in layout}
                piece = RoutingTrace(
                    experts_TLK=of_rows["routed_experts"],
                    valid_T=of_rows["valid_rows"].astype(bool),
                    token_hash_T=of_rows.get("token_hash"),
                    offsets=offsets[start : stop + 1] - offsets[start],
                    layer_ids=np.array(index.layer_ids, dtype=np.int32),
                    num_experts=index.num_experts,
                    group_names=tuple(index.group_names),
                    source=index.source,
                    **{name: column[start:stop] for name, column in columns.items()},
                )
                piece.validate()
                yield piece
    except (SafetensorError, OSError) as error:
        raise TraceError(f"shard {path} cannot be read as safetensors: {error}") from error


def _read_rows(file: Any, name: str, rows: slice, dtype: type[np.generic]) -> np.ndarray:
    """Read a range of rows; safetensors refuses an empty slice."""
    piece = file.get_slice(name)
    return piece[rows] if rows.start < rows.stop else np.zeros((0, *piece.get_shape()[1:]), dtype=dtype)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
