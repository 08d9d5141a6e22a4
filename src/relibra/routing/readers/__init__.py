"""Readers of routes that somebody else recorded: one file per format, and `open_trace`, which tells them apart."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from relibra.errors import TraceError
from relibra.routing.readers.token_choices import read_token_choices
from relibra.routing.trace import RoutingTrace
from relibra.routing.trace_files import INDEX, iterate_trace, read_trace


def open_trace(path: Path | str, num_experts: int | None = None) -> RoutingTrace:
    """Read a trace folder of ours, or a recorded `.npz` of per-token choices.

    num_experts   experts per layer, for formats that do not say; None: see the reader
    raises        TraceError when the path is neither
    """
    path = Path(path)
    if path.is_dir():
        return read_trace(path)
    if path.suffix == ".npz" and path.is_file():
        return read_token_choices(path, num_experts)
    raise TraceError(
        f"{path} {'is not a trace' if path.exists() else 'does not exist'}: expected a trace folder (with {INDEX}) "
        "or an .npz of per-token expert choices"
    )


def iterate_routes(path: Path | str, num_experts: int | None = None) -> Iterator[RoutingTrace]:
    """Yield the same as `open_trace` in pieces of whole samples; a trace folder is never held as a whole.

    raises    TraceError as `open_trace`, when the damaged piece is reached
    """
    if Path(path).is_dir():
        yield from iterate_trace(path)
    else:
        yield open_trace(path, num_experts)
