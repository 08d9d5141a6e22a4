"""Read tensors from torch files, without torch and without running what they name."""

from __future__ import annotations

import math
import mmap
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray

from relibra.errors import TraceError
from relibra.routing.readers.encodings.excerpts import excerpt
from relibra.routing.readers.encodings.inert_pickle import InertObject, StorageName, read_pickle
from relibra.routing.readers.encodings.nested_lists import MAX_AXES, array_of_lists
from relibra.routing.readers.npz_arrays import DAMAGE, check_directory

FREE_BYTES = 1 << 30
"""Arrays taken from any file may have so many bytes in all; those of a large file also twice its size."""
_LOCAL_HEADER_BYTES = 30

_STORAGES = {
    "torch.ByteStorage": np.uint8, "torch.CharStorage": np.int8, "torch.ShortStorage": np.int16,
    "torch.IntStorage": np.int32, "torch.LongStorage": np.int64, "torch.BoolStorage": np.bool_,
}  # fmt: skip
"""Storages of integers and booleans. Wider unsigned types have untyped storages and rebuild with a named type."""
_UNTYPED = {"torch.storage.UntypedStorage", "torch.UntypedStorage"}
_NAMED_DTYPES = {
    "torch.uint16": np.uint16, "torch.uint32": np.uint32, "torch.uint64": np.uint64, "torch.uint8": np.uint8,
    "torch.int8": np.int8, "torch.int16": np.int16, "torch.int32": np.int32, "torch.int64": np.int64,
    "torch.bool": np.bool_,
}  # fmt: skip


class TorchArchive:
    """A torch file: `value` has inert objects for tensors, which `array` turns into arrays: views of the mapped file.

    >>> with TorchArchive(path) as archive:  # doctest: +SKIP
    ...     ids = archive.array("samples[0]", archive.value["samples"][0]["routed_experts"])
    """

    def __init__(self, path: Path) -> None:
        """Open the file and read all of it but the tensors.

        raises    TraceError for a damaged file, or one of the format before torch 1.6
        """
        self.path = path
        self.taken = 0
        self.checked: set[str] = set()
        try:
            if not zipfile.is_zipfile(path):
                raise TraceError(f"{path} is no torch file: expected a zip archive, as since torch 1.6")
            check_directory(path)
            self.zip = zipfile.ZipFile(path)
            self.members = {one.filename.partition("/")[2]: one for one in self.zip.infolist()}
            with path.open("rb") as file:
                # Not closed here: arrays are views of it, and the last of them frees it.
                self.data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            if "data.pkl" not in self.members:
                raise TraceError(f"{path} is no torch file: it has no data.pkl")
            if "byteorder" in self.members and bytes(self._stored("byteorder")) != b"little":
                raise TraceError(f"{path} was written on a big-endian machine: save it again on a little-endian one")
            self._stored("data.pkl")
            with self.zip.open(self.members["data.pkl"]) as pickled:
                self.value: Any = read_pickle(str(path), pickled, len(self.data))
        except TraceError:
            raise
        except DAMAGE as error:
            raise TraceError(f"{path} cannot be read as a torch file: {error}") from error

    def __enter__(self) -> TorchArchive:
        """Return the archive."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        self.zip.close()

    def array(self, what: str, value: Any) -> ndarray:
        """Return the array of a tensor, or of a numpy array, of integers or booleans.

        raises    TraceError for anything else, where size, stride and storage do not fit, and where the arrays taken so
                  far are far larger than the file: views of the same data
        """
        where = f"{self.path}: {what}"
        if not isinstance(value, InertObject) or not value.name.startswith("torch._utils._rebuild_tensor"):
            found = as_array(where, value, len(self.data))
        else:
            try:
                found = self._tensor(where, value)
            except TraceError:
                raise
            except DAMAGE as error:
                raise TraceError(f"{where} cannot be read as a tensor: {error}") from error
        self.taken += found.nbytes
        if self.taken > FREE_BYTES + 2 * len(self.data):
            raise TraceError(
                f"{where}: arrays up to this one have {self.taken:,} bytes, and the file {len(self.data):,}: many are "
                "the same data; save copies (tensor.clone())"
            )
        return found

    def _tensor(self, where: str, value: InertObject) -> ndarray:
        storage, offset, size, stride = value.args[:4]
        named = value.args[6:7] if value.name.endswith("_rebuild_tensor_v3") else ()
        kind, key, numel, dtype = _storage_of(where, storage, named)
        said = f"size {excerpt(size)} and stride {excerpt(stride)}"
        if len(size) != len(stride) or len(size) > MAX_AXES:
            raise TraceError(f"{where} has {said}: expected at most {MAX_AXES} axes")
        if not all(type(number) is int and 0 <= number < 1 << 48 for number in (offset, numel, *size, *stride)):
            raise TraceError(f"{where} has {said}: expected whole numbers")
        entries = math.prod(size)
        last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
        held = numel if kind != "untyped" else numel // dtype.itemsize
        if entries and (last >= held or entries > held):
            raise TraceError(f"{where} has {said} in a storage of {held:,} entries")
        if not entries:
            return np.zeros(size, dtype=dtype)
        data = self._stored(f"data/{key}")
        if len(data) != held * dtype.itemsize:
            raise TraceError(f"{where} has a storage of {len(data):,} bytes: {held:,} of {dtype} are expected")
        flat = np.frombuffer(data, dtype=dtype)
        strides = [step * dtype.itemsize for step in stride]
        return np.lib.stride_tricks.as_strided(flat[offset:], size, strides, writeable=False)

    def _stored(self, name: str) -> memoryview:
        """Return the bytes of a member, which are compared with their checksum once."""
        member = self.members.get(name)
        if member is None:
            raise TraceError(f"{self.path} lacks its member {name}: the file was cut")
        if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
            raise TraceError(f"{self.path}: member {name} is compressed or encrypted: torch stores them as they are")
        head = self.data[member.header_offset :][:_LOCAL_HEADER_BYTES]
        lengths = int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
        found = self.data[member.header_offset + _LOCAL_HEADER_BYTES + lengths :][: member.file_size]
        if len(found) != member.file_size or (name not in self.checked and zlib.crc32(found) != member.CRC):
            raise TraceError(f"{self.path}: member {name} is cut, or other bytes than were written")
        self.checked.add(name)
        return found


def _storage_of(where: str, storage: Any, named: tuple[Any, ...]) -> tuple[str, str, int, np.dtype]:
    """Return kind, key, length and type of a storage; named: the type where the storage has none."""
    found = storage.id if isinstance(storage, StorageName) else None
    if not isinstance(found, tuple) or len(found) != 5 or found[0] != "storage":
        raise TraceError(f"{where} has no storage in the file")
    _, kind, key, _, numel = found
    name = kind.name if isinstance(kind, InertObject) else excerpt(kind)
    if not isinstance(key, str):
        raise TraceError(f"{where} has its data under {excerpt(key)}: expected a text")
    if name in _STORAGES and not named:
        return "typed", key, numel, np.dtype(_STORAGES[name])
    dtype = _NAMED_DTYPES.get(named[0].name) if named and isinstance(named[0], InertObject) else None
    if name not in _UNTYPED or dtype is None:
        raise TraceError(f"{where} holds {name}: expected a tensor of integers or booleans")
    return "untyped", key, numel, np.dtype(dtype)


def as_array(where: str, value: Any, payload_bytes: int) -> ndarray:
    """Return a numpy array from a pickle, or from nested lists of whole numbers.

    payload_bytes   of the file
    raises          TraceError for anything else
    """
    try:
        if isinstance(value, InertObject) and value.name.endswith("multiarray._reconstruct"):
            _, shape, dtype, fortran, data = value.state
            kind = named_dtype(dtype.args[0])
            if kind.kind not in "biu" or (dtype.state and dtype.state[1] == ">"):
                raise TraceError(f"{where} holds {kind}: expected integers or booleans")
            flat = np.frombuffer(as_bytes(data), dtype=kind)
            return flat.reshape(_checked_shape(where, shape, len(flat)), order="F" if fortran else "C")
        if isinstance(value, list):
            return array_of_lists(where, value, payload_bytes)
    except TraceError:
        raise
    except DAMAGE as error:
        raise TraceError(f"{where} cannot be read as an array: {error}") from error
    except (AttributeError, IndexError) as error:
        raise TraceError(f"{where} cannot be read as an array: {type(error).__name__}") from error
    name = value.name if isinstance(value, InertObject) else type(value).__name__
    raise TraceError(f"{where} is {name}: expected a tensor, an array, or nested lists of whole numbers")


def as_bytes(value: Any) -> bytes:
    """Return bytes of a pickle; those of protocol 2 are a text with one character for each."""
    if isinstance(value, InertObject) and value.name == "_codecs.encode" and isinstance(value.args[0], str):
        return value.args[0].encode("latin-1")
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    raise TypeError(f"{type(value).__name__} where bytes are expected")


def named_dtype(name: Any) -> np.dtype:
    """Return the type with a short name, "int32" or "<i4"; raises TypeError for other values."""
    if not isinstance(name, str) or len(name) > 16:
        raise TypeError(f"{excerpt(name)} where the name of a type is expected")
    return np.dtype(name)


def as_mapping(value: Any) -> Mapping[Any, Any]:
    """Return a dictionary: itself, or the entries of an object that behaves as one; empty for anything else."""
    if isinstance(value, InertObject):
        return value.items
    return value if isinstance(value, Mapping) else {}


def _checked_shape(where: str, shape: Any, entries: int) -> tuple[int, ...]:
    if not isinstance(shape, tuple) or not all(type(length) is int and length >= 0 for length in shape):
        raise TraceError(f"{where} has shape {excerpt(shape)}: expected whole numbers")
    if len(shape) > MAX_AXES or math.prod(shape) != entries:
        raise TraceError(f"{where} has shape {excerpt(shape)} and {entries:,} entries")
    return shape
