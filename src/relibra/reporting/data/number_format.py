"""Numbers as text. Plain text: HTML is escaped where it is put on a page."""

from __future__ import annotations

_THIN_SPACE = "\u202f"


def times(value: float) -> str:
    """Write a ratio.

    >>> times(1.666)
    '1.67×'
    """
    return f"{value:.2f}×" if value < 10 else f"{value:.1f}×"


def percent(share: float) -> str:
    """Write a share of one; small ones keep a digit.

    >>> percent(0.404), percent(0.0123)
    ('40\u202f%', '1.2\u202f%')
    """
    return f"{100 * share:.0f}{_THIN_SPACE}%" if share >= 0.0995 else f"{100 * share:.1f}{_THIN_SPACE}%"


def exact_percent(share: float) -> str:
    """Write a share of one so that a small one does not read as 0.

    >>> exact_percent(0.0), exact_percent(0.00049), exact_percent(0.0005), exact_percent(0.22)
    ('0\u202f%', 'less than 0.1\u202f%', '0.1\u202f%', '22\u202f%')
    """
    if share <= 0:
        return f"0{_THIN_SPACE}%"
    return percent(share) if share >= 0.0005 else f"less than 0.1{_THIN_SPACE}%"


def count(value: int) -> str:
    """Write a whole number with its thousands apart.

    >>> count(90145)
    '90\u202f145'
    """
    return f"{value:,}".replace(",", _THIN_SPACE)


def gigabytes(size: int | float) -> str:
    """Write a number of bytes in GB, to three digits.

    >>> gigabytes(12_345_678_901), gigabytes(45_600_000), gigabytes(0)
    ('12.3', '0.0456', '0')
    """
    return f"{size / 1e9:.3g}" if size < 1e12 else f"{size / 1e9:,.0f}"
