"""Values of a payload in messages: short, and made in no time, whatever they are."""

from __future__ import annotations

LONGEST, MAX_BITS, MAX_SHOWN = 40, 128, 8
"""Most characters of a text, bits of a number (Python writes no thousands of digits), and entries of a list."""


def excerpt(value: object) -> str:
    """Return numbers, texts and short lists of them as they are, cut; of anything else the type and the length.

    A list that holds one list twice, which holds one list twice, and so on, is not walked through.

    >>> excerpt([1, "x" * 90, [2]])
    "[1, 'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx'..., list of 1]"
    """
    if isinstance(value, list | tuple) and len(value) <= MAX_SHOWN:
        return f"[{', '.join(map(_short, value))}]"
    return _short(value)


def _short(value: object) -> str:
    if isinstance(value, bool | float | None):
        return repr(value)
    if isinstance(value, int):
        return repr(value) if value.bit_length() <= MAX_BITS else f"a number of {value.bit_length():,} bits"
    if isinstance(value, str | bytes | bytearray):
        return repr(value[:LONGEST]) + "..." * (len(value) > LONGEST)
    if isinstance(value, list | tuple | dict | set | frozenset):
        return f"{type(value).__name__} of {len(value):,}"
    return type(value).__name__
