"""Load arrays of an `.npz` archive, or an `.npy` file, that somebody else wrote."""

from __future__ import annotations

import io
import lzma
import math
import tokenize
import zipfile
import zlib
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray

from relibra.errors import TraceError

MAX_ARRAY_BYTES = 32 << 30
FREE_BYTES = 256 << 20
"""An archive of any size may unpack to this."""
MAX_HEADER_BYTES = 1 << 16
"""Bytes that hold the header of an `.npy`; numpy reads none above 10,000."""
MAX_DIRECTORY_BYTES = 32 << 20
"""Most bytes of the list of an archive's members, 350,000 tensors; in memory it takes up to 17 times as many."""
MAX_RATIO = 64
"""Most unpacked bytes per byte of an archive above `FREE_BYTES`. zip allows about 1,000; routes have 2 to 10."""
DAMAGE = (
    zipfile.BadZipFile, zlib.error, lzma.LZMAError, tokenize.TokenError, SyntaxError, OSError, EOFError, ValueError,
    TypeError, LookupError, AttributeError, OverflowError, MemoryError,
    RuntimeError,  # encrypted; NotImplementedError: unknown compression
)  # fmt: skip
"""Errors that zipfile and numpy raise for damaged archives, found by damaging some."""


@contextmanager
def damage_errors(where: str, kind: str) -> Iterator[None]:
    """Turn errors of damaged data inside into a sentence: `where` cannot be read as `kind`."""
    try:
        yield
    except TraceError:
        raise
    except DAMAGE as error:
        raise TraceError(f"{where} cannot be read as {kind}: {error or type(error).__name__}") from error


def load_arrays(path: Path, names: Container[str] | None = None) -> dict[str, ndarray]:
    """Load the arrays of an archive after checking sizes: a small one may unpack to more than fits in memory.

    names     of the arrays to load, where they are there; None: all
    raises    TraceError for a damaged archive, or one that is too large
    """
    with damage_errors(str(path), "an .npz archive"):
        check_directory(path)
        with zipfile.ZipFile(path) as archive:
            size = sum(member.file_size for member in archive.infolist())
            allowed = min(MAX_ARRAY_BYTES, max(FREE_BYTES, MAX_RATIO * path.stat().st_size))
            if size > allowed:
                raise TraceError(
                    f"{path} would unpack to {size:,} bytes: at most {allowed:,} are read from {path.stat().st_size:,}"
                )
            arrays = {}
            for member in archive.infolist():
                name = member.filename.removesuffix(".npy")
                if names is None or name in names:
                    with archive.open(member) as file:
                        arrays[name] = _read_array(file, member.file_size)
            return arrays


def check_directory(path: Path) -> None:
    """Raise a TraceError for a zip archive with so many members that their list takes far more memory than the file."""
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - (1 << 17), 0))
        tail = file.read(1 << 17)
    at = -1
    while (at := tail.find(b"PK\5\6", at + 1)) >= 0:
        size = int.from_bytes(tail[at + 12 : at + 16], "little")
        if at >= 76 and tail[at - 20 : at - 16] == b"PK\6\7":  # zip64: its numbers stand before
            size = max(size if size < 0xFFFFFFFF else 0, int.from_bytes(tail[at - 36 : at - 28], "little"))
        if size > MAX_DIRECTORY_BYTES:
            raise TraceError(f"{path} lists members in {size:,} bytes: allowed are {MAX_DIRECTORY_BYTES:,}")


def load_array(path: Path) -> ndarray:
    """Load an `.npy` file; raises TraceError for a damaged one, a large one, and a header that claims more bytes."""
    with damage_errors(str(path), "an .npy array"):
        held = path.stat().st_size
        if held > MAX_ARRAY_BYTES:
            raise TraceError(f"{path} has {held:,} bytes: at most {MAX_ARRAY_BYTES:,} are read")
        with path.open("rb") as file:
            return _read_array(file, held)


def parse_npy(data: bytes | memoryview | ndarray) -> ndarray:
    """Return the array in the bytes of an `.npy` file, as a read-only view of them.

    raises    ValueError for damaged bytes, for arrays of objects, and where the header claims more bytes than there are
    """
    try:
        view = memoryview(data).cast("B")  # type: ignore[arg-type]
        header = io.BytesIO(view[:MAX_HEADER_BYTES])
        shape, dtype, fortran = _read_header(header, len(view))
        if 0 in shape:
            return np.zeros(shape, dtype=dtype)
        flat = np.frombuffer(view, dtype=dtype, count=math.prod(shape), offset=header.tell())
        parsed: ndarray = flat.reshape(shape[::-1]).T if fortran else flat.reshape(shape)
    except DAMAGE as error:
        raise ValueError(str(error)) from error
    parsed.setflags(write=False)
    return parsed


def _read_array(file: Any, held: int) -> ndarray:
    """Return the array of an `.npy` file of so many bytes."""
    _read_header(file, held)
    file.seek(0)
    return np.lib.format.read_array(file, allow_pickle=False)


def _read_header(file: Any, held: int) -> tuple[tuple[int, ...], np.dtype, bool]:
    """Return shape, type and order (Fortran's?) in the header of an `.npy` file.

    raises    ValueError for objects, and for a header that claims more than the `held` bytes of the file
    """
    major, _ = np.lib.format.read_magic(file)
    read_header = np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read_header(file)
    if not dtype.itemsize and all(shape):  # any number passes the next check, and takes memory once made
        raise ValueError(f"header of shape {shape} of {dtype}, whose entries have no bytes")
    if dtype.hasobject or math.prod(shape) * dtype.itemsize > held:
        raise ValueError(f"header of {shape} {dtype} does not fit {held} bytes")
    return shape, dtype, fortran
