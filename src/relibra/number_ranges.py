"""Numbers as ranges, for messages and options."""

from __future__ import annotations

from collections.abc import Sequence


def format_ranges(numbers: Sequence[int], separator: str = ", ") -> str:
    """Write ascending numbers as ranges.

    >>> format_ranges([1, 2, 3, 5])
    '1-3, 5'
    """
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1].append(number)
        else:
            ranges.append([number])
    return separator.join(str(item[0]) if len(item) == 1 else f"{item[0]}-{item[-1]}" for item in ranges)
