"""Popularity of experts that routes are drawn from."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64
from numpy import ndarray


def zipf_popularity(experts: int, exponent: float) -> Float64[ndarray, " E"]:
    """Return weights 1 / rank^exponent; 0: all equal."""
    return np.arange(1, experts + 1, dtype=np.float64) ** -exponent
