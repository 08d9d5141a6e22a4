"""Values of a payload in messages: short, and made in no time, whatever they are."""

from __future__ import annotations

import reprlib

MAX_BITS = 128
"""Most bits of a number that is shown in full: Python refuses to write thousands of digits."""


class _Excerpt(reprlib.Repr):
    """Shows numbers, texts and the first entries of containers, and of anything else its type.

    A list that holds one list twice, which holds one list twice, and so on, is not walked through.
    """

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxlist, self.maxtuple = 1, 40, 8, 8

    def repr_int(self, x: int, level: int) -> str:  # noqa: ARG002 - as every method of `Repr`
        return repr(x) if x.bit_length() <= MAX_BITS else f"a number of {x.bit_length():,} bits"

    def repr_instance(self, x: object, level: int) -> str:  # noqa: ARG002
        return repr(x) if isinstance(x, bool | float | None) else type(x).__name__


excerpt = _Excerpt().repr
