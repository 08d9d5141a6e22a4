"""Numbers as text."""

from __future__ import annotations

import pytest

from relibra.reporting.data.number_format import exact_percent


@pytest.mark.parametrize(
    ("share", "words"),
    [
        (0.0, "0\u202f%"),
        (1e-9, "less than 0.1\u202f%"),
        (0.00049, "less than 0.1\u202f%"),
        (0.0005, "0.1\u202f%"),
        (0.22, "22\u202f%"),
    ],
)
def test_a_small_share_does_not_read_as_none(share: float, words: str) -> None:
    assert exact_percent(share) == words
