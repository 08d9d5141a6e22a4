"""Limits of arrays whose size follows from numbers in a file: checked before they are allocated.

A few bytes can name 65,536 experts, 65,536 layers or a million samples; their product is what takes memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from relibra.errors import RelibraError, TraceError

FREE_BYTES = 1 << 30
"""An array of at most this size may follow from any file."""
BYTES_PER_BYTE = 256
"""Most bytes of a larger array per byte of what it is derived from. Counts of 512 experts from samples of one token
with 10 choices take 102."""
MAX_SAMPLES = 1 << 24
MAX_LAYERS = 1 << 16
MAX_TOP_K = 256
MAX_LOADS = 1 << 22
"""Layers x experts: one load per expert and layer takes 32 MB. The largest published models have 2^15."""


def check_array_size(
    what: str, item_bytes: int, payload_bytes: int, error: type[RelibraError] = TraceError, **axes: int
) -> None:
    """Raise an error if an array of these axes would be far larger than what it is derived from.

    item_bytes      of an entry
    payload_bytes   of the array that it is derived from

    >>> check_array_size("counts", 4, 465, S=1, L=48, E=128)
    """
    size = math.prod(axes.values()) * item_bytes
    if size > max(FREE_BYTES, BYTES_PER_BYTE * payload_bytes):
        shape = " x ".join(f"{length:,} {name}" for name, length in axes.items())
        raise error(
            f"{what} ({shape}) would take {size / (1 << 30):,.1f} GiB and follow from {payload_bytes:,} bytes: allowed "
            f"is the larger of {FREE_BYTES >> 30} GiB and {BYTES_PER_BYTE} x these bytes; check the sizes in the file"
        )


def check_model_size(where: str, layers: int, experts: int, error: type[RelibraError] = TraceError) -> None:
    """Raise an error for more layers, or more experts over all layers, than any array of loads may have."""
    if layers > MAX_LAYERS or layers * experts > MAX_LOADS:
        raise error(
            f"{where} has {layers:,} layers of {experts:,} experts: allowed are {MAX_LAYERS:,} layers, and "
            f"{MAX_LOADS:,} experts over all layers"
        )


@contextmanager
def memory_errors(what: str, error: type[RelibraError]) -> Iterator[None]:
    """Turn a MemoryError inside into a sentence; `what` begins it."""
    try:
        yield
    except MemoryError as problem:
        raise error(f"{what} needs more memory than there is ({str(problem) or 'no size known'})") from problem
