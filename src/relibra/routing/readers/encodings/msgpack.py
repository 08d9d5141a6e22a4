"""Read MessagePack: values, and values that are passed over without making them."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from relibra.errors import TraceError

MAX_DEPTH = 32
_FIXED = {0xCA: 5, 0xCB: 9, 0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9, 0xD0: 2, 0xD1: 3, 0xD2: 5, 0xD3: 9, 0xD4: 3, 0xD5: 4,
          0xD6: 6, 0xD7: 10, 0xD8: 18, 0xC0: 1, 0xC2: 1, 0xC3: 1}  # fmt: skip
"""Bytes of values whose first byte says their size."""
_SIZED = {0xC4: (1, 0), 0xC5: (2, 0), 0xC6: (4, 0), 0xC7: (1, 1), 0xC8: (2, 1), 0xC9: (4, 1),
          0xD9: (1, 0), 0xDA: (2, 0), 0xDB: (4, 0)}  # fmt: skip
"""Bytes of the length of binary values, extensions and texts, and bytes of their type."""
_COUNTED = {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}
"""Bytes of the number of entries of arrays and maps."""


class MessagePack:
    """A place in MessagePack bytes, which moves on as values are read."""

    def __init__(self, data: memoryview) -> None:
        """Begin at the first byte."""
        self.data, self.at = data, 0

    def array_length(self) -> int:
        """Read the head of an array; return the number of its entries."""
        first = self._byte()
        if 0x90 <= first <= 0x9F:
            return first & 0x0F
        if first in (0xDC, 0xDD):
            return self._number(_COUNTED[first])
        raise TraceError(f"byte {self.at - 1:,} begins no array")

    def value(self, depth: int = 0) -> Any:
        """Read a value: whole numbers, floats, texts, None, booleans, lists; binary ones are views of the bytes."""
        first = self.data[self.at] if self.at < len(self.data) else self._byte()
        if first <= 0x7F or first >= 0xE0:
            self.at += 1
            return first if first <= 0x7F else first - 256
        if 0x90 <= first <= 0x9F or first in (0xDC, 0xDD):
            length = self.array_length()
            if depth > MAX_DEPTH or length > len(self.data) - self.at:
                raise TraceError(f"array of {length:,} entries at byte {self.at:,} goes beyond the end, or is too deep")
            return [self.value(depth + 1) for _ in range(length)]
        if 0xA0 <= first <= 0xBF or first in _SIZED:
            return self._sized(first)
        if first in (0xC0, 0xC2, 0xC3):
            self.at += 1
            return {0xC0: None, 0xC2: False, 0xC3: True}[first]
        if 0xCA <= first <= 0xD3:
            size = _FIXED[first] - 1
            code = {0xCA: ">f", 0xCB: ">d"}.get(first) or ">" + ("BHIQ" if first <= 0xCF else "bhiq")[
                size.bit_length() - 1
            ]
            self.at += 1
            return struct.unpack(code, self._take(size))[0]
        raise TraceError(f"byte {self.at:,} begins a map or an extension: expected none here")

    def skip(self, values: int = 1) -> None:
        """Pass over values of any kind."""
        left = values
        while left:
            left -= 1
            first = self._byte()
            if first in _FIXED:
                self._move(_FIXED[first] - 1)
            elif 0xA0 <= first <= 0xBF:
                self._move(first & 0x1F)
            elif first in _SIZED:
                length, kind = _SIZED[first]
                self._move(self._number(length) + kind)
            elif 0x80 <= first <= 0x9F or first in _COUNTED:
                count = self._number(_COUNTED[first]) if first in _COUNTED else first & 0x0F
                is_map = first <= 0x8F or first >= 0xDE
                left += count * (1 + is_map) - self._skip_alike(count if not is_map else 0)
                if left > len(self.data) - self.at:
                    raise TraceError(f"array at byte {self.at:,} goes beyond the end")
            elif first == 0xC1:
                raise TraceError(f"byte {self.at - 1:,} is 0xC1, which nothing begins with")

    def _skip_alike(self, count: int) -> int:
        """Pass over so many values if all have the size and the first byte of the first; return how many."""
        if count < 16 or self.at >= len(self.data):
            return 0
        first = self.data[self.at]
        size = _FIXED.get(first, 1 + (first & 0x1F) if 0xA0 <= first <= 0xBF else 1 if first <= 0x7F else 0)
        if not size or size * count > len(self.data) - self.at:
            return 0
        heads = np.frombuffer(self.data, np.uint8, size * count, self.at)[::size]
        alike = heads <= 0x7F if first <= 0x7F else (heads & 0xFE) == 0xC2 if first in (0xC2, 0xC3) else heads == first
        if not alike.all():
            return 0
        self.at += size * count
        return count

    def _sized(self, first: int) -> Any:
        self.at += 1
        length, kind = _SIZED.get(first, (0, 0))
        size = self._number(length) if length else first & 0x1F
        if kind:
            raise TraceError(f"byte {self.at:,} begins an extension: expected none here")
        data = self._take(size)
        if 0xC4 <= first <= 0xC6:
            return data
        try:
            return str(data, "utf-8")
        except UnicodeDecodeError as error:
            raise TraceError(f"text before byte {self.at:,} is no UTF-8") from error

    def _byte(self) -> int:
        return int(self._take(1)[0])

    def _number(self, size: int) -> int:
        return int.from_bytes(self._take(size), "big")

    def _take(self, size: int) -> memoryview:
        begin = self.at
        self._move(size)
        return self.data[begin : self.at]

    def _move(self, size: int) -> None:
        if size > len(self.data) - self.at:
            raise TraceError(f"value at byte {self.at:,} goes beyond the end")
        self.at += size
