"""Seconds of attention, experts and links by a roofline (MegaScale-Infer, arXiv 2504.02263, section 4.2 and table 2).

A matrix product takes the longer of its flops and its bytes, each at a share of the peak; fixed times cover launches.
Where the paper is not explicit: bytes are two per value, and a link's share of its peak depends on the bytes of one
sender-receiver pair, `x / (x + half_rate_bytes)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

from relibra.errors import ConfigError
from relibra.field_checks import check_fields
from relibra.planning.deployment.accelerator import Accelerator
from relibra.planning.deployment.measured_seconds import MeasuredSeconds, fit_line, seconds_at
from relibra.planning.deployment.pipeline_time import Amount, StageSeconds
from relibra.planning.deployment.served_model import BYTES, ServedModel
from relibra.planning.deployment.service_level import ServiceLevel

Share = Annotated[int | float, Field(ge=1e-6, le=1)]
Latency = Annotated[int | float, Field(ge=0, le=10)]


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Shares of data-sheet figures that are reached, and fixed times; every default is an assumption.

    flops, memory        share of peak flops and of memory bandwidth
    usable_memory        share of the device memory for weights and cache
    half_rate_bytes      message between a pair at which a NIC reaches half its bandwidth
    launch_seconds       per layer, micro-batch and side, beside the roofline
    hop_seconds          latency of a hop beside its bytes
    hop_factor           a hop takes so many times as long: 1 for M2N, above for slower libraries
    measured             seconds of a node, which take the place of its formulas (`MeasuredNode`)
    raises               ConfigError for values out of range
    """

    flops: Share = 0.7
    memory: Share = 0.8
    usable_memory: Share = 0.9
    half_rate_bytes: Annotated[int | float, Field(ge=0, le=1e12)] = 65536.0
    launch_seconds: Latency = 20e-6
    hop_seconds: Latency = 10e-6
    hop_factor: Annotated[int | float, Field(ge=1e-3, le=1e3)] = 1.0
    measured: MeasuredSeconds | None = None

    def __post_init__(self) -> None:
        """Raise ConfigError for values out of range."""
        check_fields(Efficiency, vars(self), "efficiency", ConfigError)


@dataclass(frozen=True, kw_only=True)
class Node:
    """GPUs of one node that share each layer of a model by tensor parallelism; `ways` of them."""

    model: ServedModel
    gpu: Accelerator
    ways: int
    used: Efficiency

    def product(self, rows: Amount, depth: int | float, columns: Amount) -> Amount:
        """Return the seconds of `rows x depth` by `depth x columns`: flops or bytes, whichever take longer."""
        moved = BYTES * (depth * columns + rows * depth + rows * columns)
        return self._roofline(2 * rows * depth * columns, moved)

    def gated(self, rows: Amount, width: int | float) -> Amount:
        """Return the seconds of a feed-forward of some width, cut over the GPUs."""
        up = self.product(rows, self.model.hidden, self.model.up_matrices * width / self.ways)
        return up + self.product(rows, width / self.ways, self.model.hidden)

    def all_reduce(self, rows: Amount) -> Amount:
        """Return the seconds of summing rows over the GPUs."""
        return 2 * BYTES * rows * self.model.hidden * (self.ways - 1) / self.ways / self.gpu.peer_bytes_per_second

    def attention(self, rows: Amount, context: Amount) -> Amount:
        """Return the seconds of one layer of attention, shared experts included (`T_a`).

        rows       requests of the micro-batch, one token each (`b_a`)
        context    mean tokens of a request
        """
        model, ways = self.model, self.ways
        projections = self.product(rows, model.hidden, model.qkv_width / ways)
        projections += self.product(rows, model.output_rows / ways, model.hidden)
        attended = rows * model.attended(context)
        read = BYTES * model.cache_values * attended / min(ways, model.cache_ways)
        scores = self._roofline(model.score_flops * attended / ways, read)
        shared = self.gated(rows, model.shared_width) if model.shared_width else 0.0
        return projections + scores + shared + self.all_reduce(rows) + self.used.launch_seconds

    def experts(self, rows: Amount, experts: Amount) -> Amount:
        """Return the seconds of one layer of experts (`T_e`).

        rows       of one expert (`b_e`)
        experts    on the node, computed one after the other
        """
        each = self.gated(rows, self.model.width)
        return experts * (each + self.all_reduce(rows)) + self.used.launch_seconds

    def rest(self, rows: Amount, context: Amount) -> Amount:
        """Return the seconds of a decode step outside of layers with experts."""
        model = self.model
        dense: Amount = 0.0
        if model.dense_layers:
            dense = self.attention(rows, context) + self.gated(rows, model.dense_width)
        columns = model.output_values / model.hidden / self.ways
        return model.dense_layers * dense + (self.product(rows, model.hidden, columns) if columns else 0.0)

    def network(self, num_bytes: Amount, pair_bytes: Amount) -> Amount:
        """Return the seconds in which a NIC sends bytes to many nodes, or receives them from many.

        pair_bytes    of one message, on which the share of the bandwidth depends
        """
        slower = 1 + self.used.half_rate_bytes / np.maximum(pair_bytes, 1e-9)
        seconds = num_bytes / self.gpu.network_bytes_per_second * slower
        return self.used.hop_factor * (seconds + self.used.hop_seconds)

    def _roofline(self, flops: Amount, moved: Amount) -> Amount:
        computing = flops / (self.used.flops * self.gpu.flops_per_second)
        return np.maximum(computing, moved / (self.used.memory * self.gpu.memory_bytes_per_second))


@dataclass(frozen=True, kw_only=True)
class MeasuredNode(Node):
    """A node whose seconds are looked up in tables; links keep their formula."""

    measured: MeasuredSeconds

    def gated(self, rows: Amount, width: int | float) -> Amount:  # noqa: ARG002
        """Return the seconds of one expert, at the width that was measured."""
        return seconds_at(self.measured.expert, rows)

    def attention(self, rows: Amount, context: Amount) -> Amount:  # noqa: ARG002
        """Return the seconds of one layer of attention, at the context that was measured."""
        return seconds_at(self.measured.attention, rows)

    def rest(self, rows: Amount, context: Amount) -> Amount:  # noqa: ARG002
        """Return 0: it is spread over the attention of layers."""
        return 0.0


def measured_worker(measured: MeasuredSeconds, name: str, memory_bytes: float) -> tuple[Accelerator, Efficiency]:
    """Return a process of a machine as a GPU of price and power 1; its link is the line fitted to messages, if any.

    Its speeds are 1: nothing reads them where seconds are measured.
    """
    start, slope, _ = fit_line(measured.message) if measured.message else (0.0, 0.0, 1.0)
    accelerator = Accelerator(
        name=name, price=1.0, watts=1.0, node_size=1, memory_bytes=memory_bytes, memory_bytes_per_second=1.0,
        flops_per_second=1.0, peer_bytes_per_second=1.0, network_bytes_per_second=1 / max(slope, 1e-15),
    )  # fmt: skip
    return accelerator, Efficiency(measured=measured, launch_seconds=0, half_rate_bytes=0, hop_seconds=max(0.0, start))


def hop_seconds(attention: Node, experts: Node, sent: Amount, received: Amount, receivers: Amount) -> Amount:
    """Return the seconds of one way between attention and expert nodes, the slower side (Eq. 6, `T_c`).

    sent, received    rows that an attention node sends in all (`b_a K`), and that an expert node gets
    receivers         expert nodes
    """
    sent = BYTES * sent * attention.model.hidden / attention.ways
    received = BYTES * received * attention.model.hidden / experts.ways
    pair = sent / receivers
    return np.maximum(attention.network(sent, pair), experts.network(received, pair))


def stage_seconds(
    attention: Node, experts: Node, nodes: Amount, per_node: int, rows: Amount, level: ServiceLevel
) -> StageSeconds:
    """Return the seconds of one micro-batch.

    nodes       of attention
    per_node    experts of an expert node
    rows        requests of a micro-batch on one attention node (`b_a`)
    """
    model = attention.model
    expert_rows = level.expert_skew * rows * nodes * model.top_k / model.experts
    return StageSeconds(
        attention=attention.attention(rows, level.context),
        experts=experts.experts(expert_rows, per_node),
        hop=hop_seconds(attention, experts, rows * model.top_k, expert_rows * per_node, model.experts / per_node),
        rest=attention.rest(rows, level.context),
    )
