"""Read tensors from torch files, without torch and without running what they name."""

from __future__ import annotations

import math
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
from relibra.routing.readers.encodings.mapped_file import map_file
from relibra.routing.readers.encodings.nested_lists import MAX_AXES, array_of_lists
from relibra.routing.readers.npz_arrays import check_directory, damage_errors

FREE_BYTES = 1 << 30
"""Arrays taken from a file may have so many bytes in all, plus twice the size of the file."""
_LOCAL_HEADER_BYTES = 30

_STORAGES = {
    "torch.ByteStorage": np.uint8, "torch.CharStorage": np.int8, "torch.ShortStorage": np.int16,
    "torch.IntStorage": np.int32, "torch.LongStorage": np.int64, "torch.BoolStorage": np.bool_,
}  # fmt: skip
"""Storages of integers and booleans. Wider unsigned types have untyped storages and rebuild with a named type."""
_UNTYPED = {"torch.storage.UntypedStorage", "torch.UntypedStorage"}
_NAMED_DTYPES = {
    f"torch.{name}": np.dtype(name)
    for name in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "bool")
}


class TorchArchive:
    """A torch file: `value` has inert objects for tensors; `array` makes arrays of them, views of the mapped file."""

    def __init__(self, path: Path) -> None:
        """Read all of a file but the tensors; raises TraceError for a damaged file, or one from before torch 1.6."""
        self.path, self.taken = path, 0
        self.checked: set[str] = set()
        self.data = memoryview(map_file(path, "a torch file"))
        with damage_errors(str(path), "a torch file"):
            if not zipfile.is_zipfile(path):
                raise TraceError(f"{path} is no torch file: expected a zip archive, as since torch 1.6")
            check_directory(path)
            with zipfile.ZipFile(path) as archive:
                self.members = {one.filename.partition("/")[2]: one for one in archive.infolist()}
                if "byteorder" in self.members and bytes(self._stored("byteorder")) != b"little":
                    raise TraceError(
                        f"{path} was written on a big-endian machine: save it again on a little-endian one"
                    )
                self._stored("data.pkl")
                with archive.open(self.members["data.pkl"]) as pickled:
                    self.value: Any = read_pickle(str(path), pickled, len(self.data))

    def array(self, what: str, value: Any) -> ndarray:
        """Return the array of a tensor, or of a numpy array, of integers or booleans.

        raises    TraceError for anything else, where size, stride and storage do not fit, and where the arrays taken so
                  far are far larger than the file: views of the same data
        """
        where = f"{self.path}: {what}"
        if isinstance(value, InertObject) and value.name.startswith("torch._utils._rebuild_tensor"):
            with damage_errors(where, "a tensor"):
                found = self._tensor(where, value)
        else:
            found = as_array(where, value, len(self.data))
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
        key, held, dtype = _storage_of(where, storage, named)
        layout = f"size {excerpt(size)} and stride {excerpt(stride)}"
        if len(size) != len(stride) or len(size) > MAX_AXES:
            raise TraceError(f"{where} has {layout}: expected at most {MAX_AXES} axes")
        if not all(type(number) is int and 0 <= number < 1 << 48 for number in (offset, *size, *stride)):
            raise TraceError(f"{where} has {layout}: expected whole numbers")
        entries = math.prod(size)
        last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
        if entries and (last >= held or entries > held):
            raise TraceError(f"{where} has {layout} in a storage of {held:,} entries")
        if not entries:
            return np.zeros(size, dtype=dtype)
        data = self._stored(f"data/{key}")
        if len(data) != held * dtype.itemsize:
            raise TraceError(f"{where} has a storage of {len(data):,} bytes: {held:,} of {dtype} are expected")
        strides = [step * dtype.itemsize for step in stride]
        return np.lib.stride_tricks.as_strided(np.frombuffer(data, dtype)[offset:], size, strides, writeable=False)

    def _stored(self, name: str) -> memoryview:
        """Return the bytes of a member, which are compared with their checksum once."""
        member = self.members.get(name)
        if member is None:
            raise TraceError(f"{self.path} lacks its member {name}: it is no torch file, or was cut")
        if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
            raise TraceError(f"{self.path}: member {name} is compressed or encrypted: torch stores them as they are")
        head = self.data[member.header_offset :][:_LOCAL_HEADER_BYTES]
        lengths = int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
        found = self.data[member.header_offset + _LOCAL_HEADER_BYTES + lengths :][: member.file_size]
        if len(found) != member.file_size or (name not in self.checked and zlib.crc32(found) != member.CRC):
            raise TraceError(f"{self.path}: member {name} is cut, or other bytes than were written")
        self.checked.add(name)
        return found


def _storage_of(where: str, storage: Any, named: tuple[Any, ...]) -> tuple[str, int, np.dtype]:
    """Return key, entries and type of a storage; named: the type where the storage has none."""
    found = storage.id if isinstance(storage, StorageName) else None
    if not isinstance(found, tuple) or len(found) != 5 or found[0] != "storage":
        raise TraceError(f"{where} has no storage in the file")
    _, kind, key, _, numel = found
    name = kind.name if isinstance(kind, InertObject) else excerpt(kind)
    if not isinstance(key, str) or type(numel) is not int or not 0 <= numel < 1 << 48:
        raise TraceError(f"{where} has {excerpt(numel)} entries under {excerpt(key)}: expected a number and a text")
    if name in _STORAGES and not named:
        return key, numel, np.dtype(_STORAGES[name])
    dtype = _NAMED_DTYPES.get(named[0].name) if named and isinstance(named[0], InertObject) else None
    if name not in _UNTYPED or dtype is None:
        raise TraceError(f"{where} holds {name}: expected a tensor of integers or booleans")
    return key, numel // dtype.itemsize, dtype


def as_array(where: str, value: Any, payload_bytes: int) -> ndarray:
    """Return a numpy array from a pickle, or from nested lists of whole numbers.

    payload_bytes   of the file
    raises          TraceError for anything else
    """
    if isinstance(value, list):
        return array_of_lists(where, value, payload_bytes)
    name = value.name if isinstance(value, InertObject) else type(value).__name__
    if not isinstance(value, InertObject) or not name.endswith("multiarray._reconstruct"):
        raise TraceError(f"{where} is {name}: expected a tensor, an array, or nested lists of whole numbers")
    with damage_errors(where, "an array"):
        _, shape, dtype, fortran, data = value.state
        kind = named_dtype(dtype.args[0])
        if kind.kind not in "biu" or (dtype.state and dtype.state[1] == ">"):
            raise TraceError(f"{where} holds {kind}: expected integers or booleans")
        return np.frombuffer(as_bytes(data), kind).reshape(checked_shape(shape), order="F" if fortran else "C")


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


def checked_shape(shape: Any) -> tuple[int, ...]:
    """Return a shape; raises TypeError for other values than a few whole numbers."""
    numbers = isinstance(shape, list | tuple) and len(shape) <= MAX_AXES and all(type(one) is int for one in shape)
    if not numbers or any(not 0 <= one < 1 << 48 for one in shape):
        raise TypeError(f"shape {excerpt(shape)}, expected at most {MAX_AXES} whole numbers")
    return tuple(shape)
