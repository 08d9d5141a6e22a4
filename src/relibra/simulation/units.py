"""Durations and sizes as text: up to three digits and a unit that fits."""

from __future__ import annotations


def format_seconds(seconds: float) -> str:
    """Return a duration as text.

    >>> format_seconds(0.01234), format_seconds(2.5), format_seconds(0.0)
    ('12.3 ms', '2.5 s', '0 s')
    """
    if seconds >= 1 or seconds == 0:
        return f"{seconds:.3g} s"
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.3g} µs"


def format_bytes(size: int | float) -> str:
    """Return a size as text.

    >>> format_bytes(80e9), format_bytes(1_234_567), format_bytes(900)
    ('80.0 GB', '1.2 MB', '0.9 kB')
    """
    unit, scale = ("GB", 1e9) if size >= 1e9 else ("MB", 1e6) if size >= 1e6 else ("kB", 1e3)
    return f"{size / scale:.1f} {unit}"
