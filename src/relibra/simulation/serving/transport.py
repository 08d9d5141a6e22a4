"""`Transport`: how long messages between attention and expert nodes take beside their bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from jaxtyping import Float64
from numpy import ndarray
from numpy.random import Generator
from pydantic import Field

from relibra.errors import ConfigError
from relibra.field_checks import check_fields


@dataclass(frozen=True, kw_only=True)
class Transport:
    """A library that moves rows.

    factor            every message takes so many times the NIC's time and latency
    tail, tail_factor share of messages that take so many times as long
    raises            ConfigError for values out of range
    """

    name: str
    factor: Annotated[int | float, Field(gt=0)] = 1.0
    tail: Annotated[int | float, Field(ge=0, le=1)] = 0.0
    tail_factor: Annotated[int | float, Field(ge=1)] = 1.0

    def __post_init__(self) -> None:
        check_fields(Transport, vars(self), f"transport {self.name!r}", ConfigError)

    def delays(self, seconds: Float64[ndarray, "*X"], rng: Generator) -> Float64[ndarray, "*X"]:
        """Return what is added to the times of messages by the slow ones among them."""
        if not self.tail:
            return np.zeros_like(seconds)
        return np.where(rng.random(seconds.shape) < self.tail, seconds * (self.tail_factor - 1), 0.0)


M2N = Transport(name="m2n")
"""Messages that take what their bytes and the latency of a NIC take."""
NCCL_LIKE = Transport(name="nccl-like", factor=3.14)
"""Point-to-point groups of NCCL: 3.14 times the median latency, which is what a reduction by 68.2 % means
(MegaScale-Infer, arXiv 2504.02263, 8 senders and 8 receivers, 256 KB for each pair)."""
