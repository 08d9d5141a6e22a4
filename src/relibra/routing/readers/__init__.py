"""Readers of recorded routes: one file per format; `open_trace` selects by the path."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from relibra.errors import TraceError
from relibra.routing.array_sizes import memory_errors
from relibra.routing.readers.token_choices import read_token_choices
from relibra.routing.trace import RoutingTrace
from relibra.routing.trace_files import INDEX, iterate_trace, read_index, read_trace

TOKEN_CHOICES = (".npz", ".npy")
"""Endings of files of per-token expert choices."""


def open_trace(path: Path | str, num_experts: int | None = None) -> RoutingTrace:
    """Read a trace folder, or an `.npz` or `.npy` of per-token choices.

    num_experts   experts per layer, for formats without this number; None: see the reader
    raises        TraceError for any other path, and where a folder was recorded with another number of experts
    """
    path = Path(path)
    with memory_errors(str(path), TraceError):
        if path.is_dir():
            check_num_experts(path, num_experts)
            return read_trace(path)
        if path.suffix in TOKEN_CHOICES and path.is_file():
            return read_token_choices(path, num_experts)
    raise TraceError(
        f"{path} {'is not a trace' if path.exists() else 'does not exist'}: expected a trace folder (with {INDEX}) "
        "or an .npz or .npy of per-token expert choices"
    )


def iterate_routes(path: Path | str, num_experts: int | None = None) -> Iterator[RoutingTrace]:
    """Yield the trace of `open_trace` in pieces of whole samples; of a folder, one piece is in memory at a time."""
    if Path(path).is_dir():
        check_num_experts(Path(path), num_experts)
        yield from iterate_trace(path)
    else:
        yield open_trace(path, num_experts)


def check_num_experts(folder: Path, num_experts: int | None) -> None:
    """Raise a TraceError where a trace folder has another number of experts than the given one; None: none is given."""
    if num_experts is not None and (recorded := read_index(folder).num_experts) != num_experts:
        raise TraceError(f"{folder} was recorded with {recorded} experts: leave out --num-experts {num_experts}")
