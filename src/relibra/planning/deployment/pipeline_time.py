"""Seconds of the ping-pong pipeline between attention and expert nodes (MegaScale-Infer, arXiv 2504.02263, Eq. 1-5).

Micro-batches take turns at four resources, each one after the other: attention, the link to the experts, experts, the
link back. The paper's Eq. 5 holds where a hop takes no longer than computing and the micro-batches fill the round trip;
the formula here holds everywhere (tests compare it with simulated events).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy import ndarray

Amount = int | float | ndarray
"""A number, or many of which each is computed for itself."""


class StageSeconds(NamedTuple):
    """Seconds of one micro-batch.

    attention, experts    computing one layer (`T_a`, `T_e`)
    hop                   one way between them (`T_c`)
    rest                  of a decode step outside of layers with experts: dense layers and output matrix
    """

    attention: Amount
    experts: Amount
    hop: Amount
    rest: Amount = 0.0

    @property
    def round_trip(self) -> Amount:
        """Return the seconds of one layer for one micro-batch alone."""
        return self.attention + self.experts + 2 * self.hop

    @property
    def slowest(self) -> Amount:
        """Return the seconds of the slowest resource."""
        return np.maximum(np.maximum(self.attention, self.experts), self.hop)


def layer_period(stage: StageSeconds, micro_batches: Amount) -> Amount:
    """Return the seconds in which all micro-batches pass one layer: max(m T_max, T_a + T_e + 2 T_c)."""
    return np.maximum(micro_batches * stage.slowest, stage.round_trip)


def iteration_seconds(stage: StageSeconds, micro_batches: Amount, layers: int) -> Amount:
    """Return the seconds of a decode step while micro-batches run on freely: what a request waits for a token."""
    return layers * layer_period(stage, micro_batches) + micro_batches * stage.rest


def drained_seconds(stage: StageSeconds, micro_batches: Amount, layers: int) -> Amount:
    """Return the seconds of one decode step that begins and ends with an empty pipeline: filling and draining count."""
    period = layer_period(stage, micro_batches)
    filling = (micro_batches - 1) * stage.slowest + stage.round_trip
    return (layers - 1) * period + filling + micro_batches * stage.rest
