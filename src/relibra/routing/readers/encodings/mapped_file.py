"""Map a file that somebody else wrote into memory."""

from __future__ import annotations

import mmap
from pathlib import Path

from relibra.errors import TraceError


def map_file(path: Path, expected: str) -> mmap.mmap:
    """Return the bytes of a file; views of them keep it open, and the last one closes it.

    expected    what it should hold, for the message
    raises      TraceError for a file that is empty or cannot be read
    """
    try:
        with path.open("rb") as file:
            if not path.stat().st_size:
                raise TraceError(f"{path} is empty: expected {expected}")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}") from error
