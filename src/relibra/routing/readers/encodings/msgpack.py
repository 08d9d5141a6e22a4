"""Read MessagePack: values of the types that are expected, and values that are passed over without making them.

No lists of anything are made: one of empty lists would take 75 times its bytes in memory.
"""

from __future__ import annotations

import numpy as np

from relibra.errors import TraceError

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

    def is_none(self) -> bool:
        """Return whether a nil is next, and pass over it."""
        found = self.at < len(self.data) and self.data[self.at] == 0xC0
        self.at += found
        return found

    def any_true(self) -> bool:
        """Read an array of booleans, or of 0 and 1; return whether one of them is true."""
        values = bytes(self._take(self.array_length()))
        if values.translate(None, b"\xc2\xc3\0\1"):
            raise TraceError(f"array before byte {self.at:,} holds other values than booleans")
        return b"\xc3" in values or b"\1" in values

    def whole_numbers(self, most: int) -> list[int]:
        """Read an array of at most so many whole numbers from 0 on."""
        length = self.array_length()
        if length > most:
            raise TraceError(f"array before byte {self.at:,} has {length:,} entries: allowed are {most:,}")
        return [self._whole_number() for _ in range(length)]

    def texts(self) -> tuple[int, int]:
        """Pass over an array of texts; return how many there are, and how many empty ones at the end."""
        length, empty = self.array_length(), 0
        for _ in range(length):
            empty = 0 if self._text_length() else empty + 1
        return length, empty

    def text(self) -> str:
        """Read a text of at most 255 bytes."""
        begin, size = self.at, self._text_length()
        if size > 255:
            raise TraceError(f"text at byte {begin:,} has {size:,} bytes: allowed are 255")
        try:
            return str(self.data[self.at - size : self.at], "utf-8")
        except UnicodeDecodeError as error:
            raise TraceError(f"text at byte {begin:,} is no UTF-8") from error

    def binary(self) -> memoryview:
        """Read binary data, as a view of the bytes."""
        first = self._byte()
        if not 0xC4 <= first <= 0xC6:
            raise TraceError(f"byte {self.at - 1:,} begins no binary data")
        return self._take(self._number(_SIZED[first][0]))

    def _whole_number(self) -> int:
        first = self._byte()
        if first <= 0x7F:
            return first
        if not 0xCC <= first <= 0xCF:
            raise TraceError(f"byte {self.at - 1:,} begins no whole number from 0 on")
        return self._number(_FIXED[first] - 1)

    def _text_length(self) -> int:
        """Pass over a text; return its bytes."""
        first = self._byte()
        if 0xA0 <= first <= 0xBF:
            size = first & 0x1F
        elif 0xD9 <= first <= 0xDB:
            size = self._number(_SIZED[first][0])
        else:
            raise TraceError(f"byte {self.at - 1:,} begins no text")
        self._move(size)
        return size

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
