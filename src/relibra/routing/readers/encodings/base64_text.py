"""Decode base64 text several times as fast as the standard library does."""

from __future__ import annotations

from typing import no_type_check

import numpy as np
from jaxtyping import UInt8
from numpy import ndarray

from relibra.errors import TraceError
from relibra.routing.compiled import compiled

_ALPHABET = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
_NO_DIGIT = 1 << 24
"""Set in the table for bytes outside of the alphabet."""


def _digits() -> ndarray:
    """Return `[4, 256]`: bits of each character at each of the four places of a group."""
    table = np.full((4, 256), _NO_DIGIT, dtype=np.uint32)
    for digit, character in enumerate(_ALPHABET):
        table[:, character] = [digit << 18, digit << 12, digit << 6, digit]
    return table


_DIGITS = _digits()


def decode_base64(where: str, text: bytes | memoryview) -> UInt8[ndarray, " X"]:
    """Return the bytes of a text in base64, padded with `=`, without spaces.

    raises    TraceError for any other text; `where` begins the message
    """
    source = np.frombuffer(text, dtype=np.uint8)
    if len(source) % 4:
        raise TraceError(f"{where} is no base64: {len(source):,} characters are no multiple of 4; the text was cut")
    padding = int((source[-2:] == ord("=")).sum()) if len(source) else 0
    if (padding == 2 and source[-2] != ord("=")) or (padding == 1 and source[-1] != ord("=")):
        raise TraceError(f"{where} is no base64: '=' stands before the end")
    last = bytes(source[len(source) - 4 :]).replace(b"=", b"A") if padding else b""
    whole = len(source) - len(last)
    decoded = np.empty(len(source) // 4 * 3, dtype=np.uint8)
    bad = _decode_groups(source[:whole], _DIGITS, decoded)
    if last:
        bad |= _decode_groups(np.frombuffer(last, dtype=np.uint8), _DIGITS, decoded[whole // 4 * 3 :])
    if bad:
        raise TraceError(f"{where} is no base64: it holds characters outside of A-Z, a-z, 0-9, + and /")
    return decoded[: len(decoded) - padding]


@compiled
@no_type_check
def _decode_groups(source: ndarray, digits: ndarray, decoded: ndarray) -> bool:
    """Write three bytes for each four characters; return whether one of them is no digit."""
    seen = np.uint32(0)
    for group in range(len(source) // 4):
        bits = (
            digits[0, source[4 * group]]
            | digits[1, source[4 * group + 1]]
            | digits[2, source[4 * group + 2]]
            | digits[3, source[4 * group + 3]]
        )
        seen |= bits
        decoded[3 * group] = bits >> 16
        decoded[3 * group + 1] = (bits >> 8) & 255
        decoded[3 * group + 2] = bits & 255
    return seen >= np.uint32(16777216)
