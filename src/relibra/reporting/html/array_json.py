"""Numbers for scripts of the page: arrays as base64 of their bytes, which is a fifth of their JSON.

A cell that is only painted takes one byte, since a picture has few colours; one that is also read out takes two.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float, Shaped, UInt
from numpy import ndarray


def pack(array: Shaped[ndarray, "*X"]) -> dict[str, Any]:
    """Return an array for the page: little-endian bytes, C order, with the name that JavaScript's typed arrays have.

    >>> pack(np.array([[1, 2]], dtype=np.uint8))
    {'type': 'Uint8Array', 'shape': [1, 2], 'data': 'AQI='}
    """
    kind = {"u": "Uint", "i": "Int", "f": "Float"}[array.dtype.kind]
    data = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False)
    return {
        "type": f"{kind}{8 * array.dtype.itemsize}Array",
        "shape": list(array.shape),
        "data": base64.b64encode(data.tobytes()).decode(),
    }


def quantise(value: Float[ndarray, "*X"], end: float, dtype: type = np.uint8) -> UInt[ndarray, "*X"]:
    """Return values from 0 to `end` as 0 to the last but one number of an unsigned type, and larger ones as the last.

    >>> quantise(np.array([0.0, 1.0, 2.0, 2.1]), 2.0).tolist()
    [0, 127, 254, 255]
    """
    above = int(np.iinfo(dtype).max)
    steps = np.rint(value * ((above - 1) / end))
    return np.where(value > end, above, np.clip(steps, 0, above - 1)).astype(dtype)


def data_element(identifier: str, facts: Mapping[str, Any]) -> str:
    """Return the script element that holds facts as JSON; no text in it can end the element."""
    text = json.dumps(facts, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="{identifier}">{text}</script>'
