"""Numbers as ranges, for messages and options."""

from __future__ import annotations

from collections.abc import Sequence


def ranges_in_words(numbers: Sequence[int], separator: str = ", ") -> str:
    """Write ascending numbers as ranges.

    >>> ranges_in_words([1, 2, 3, 5])
    '1-3, 5'
    """
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1].append(number)
        else:
            ranges.append([number])
    return separator.join(str(one[0]) if len(one) == 1 else f"{one[0]}-{one[-1]}" for one in ranges)
