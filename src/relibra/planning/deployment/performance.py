"""Seconds of attention, experts and links by a roofline (MegaScale-Infer, arXiv 2504.02263, section 4.2 and table 2).

A matrix product takes the longer of its flops and its bytes, each at a share of the peak; fixed times cover launches.
Where the paper is not explicit: bytes are two per value, and a link's share of its peak depends on the bytes of one
sender-receiver pair, `x / (x + half_rate_bytes)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy import ndarray
from pydantic import Field

from relibra.errors import ConfigError
from relibra.field_checks import check_fields
from relibra.planning.deployment.accelerator import Accelerator
from relibra.planning.deployment.served_model import BYTES, ServedModel

Share = Annotated[int | float, Field(ge=1e-6, le=1)]
Latency = Annotated[int | float, Field(ge=0, le=10)]
Amount = int | float | ndarray
"""A number, or many of which each is computed for itself."""


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Shares of data-sheet figures that are reached, and fixed times; every default is an assumption.

    flops, memory        share of peak flops and of memory bandwidth
    usable_memory        share of the device memory for weights and cache
    half_rate_bytes      message between a pair at which a NIC reaches half its bandwidth
    launch_seconds       per layer, micro-batch and side, beside the roofline
    hop_seconds          latency of a hop beside its bytes
    hop_factor           a hop takes so many times as long: 1 for M2N, above for slower libraries
    raises               ConfigError for values out of range
    """

    flops: Share = 0.7
    memory: Share = 0.8
    usable_memory: Share = 0.9
    half_rate_bytes: Annotated[int | float, Field(ge=0, le=1e12)] = 65536.0
    launch_seconds: Latency = 20e-6
    hop_seconds: Latency = 10e-6
    hop_factor: Annotated[int | float, Field(ge=1e-3, le=1e3)] = 1.0

    def __post_init__(self) -> None:
        """Raise ConfigError for values out of range."""
        check_fields(Efficiency, vars(self), "efficiency", ConfigError)


def gemm_seconds(rows: Amount, depth: int | float, columns: Amount, gpu: Accelerator, efficiency: Efficiency) -> Amount:
    """Return the seconds of `rows x depth` by `depth x columns`: flops or bytes, whichever take longer."""
    flops = 2 * rows * depth * columns
    moved = BYTES * (depth * columns + rows * depth + rows * columns)
    return np.maximum(
        flops / (efficiency.flops * gpu.flops_per_second), moved / (efficiency.memory * gpu.memory_bytes_per_second)
    )


def attention_seconds(
    model: ServedModel, gpu: Accelerator, ways: int, rows: Amount, context: Amount, efficiency: Efficiency
) -> Amount:
    """Return the seconds of one layer of an attention node, shared experts included (`T_a`).

    ways       GPUs of the node, tensor-parallel
    rows       requests of the micro-batch, one token each (`b_a`)
    context    mean tokens of a request
    """
    projections = gemm_seconds(rows, model.hidden, model.qkv_width / ways, gpu, efficiency)
    projections += gemm_seconds(rows, model.output_rows / ways, model.hidden, gpu, efficiency)
    shared = gated_seconds(model, gpu, ways, rows, model.shared_width, efficiency) if model.shared_width else 0.0
    return (
        projections
        + _score_seconds(model, gpu, ways, rows, context, efficiency)
        + shared
        + all_reduce_seconds(model, gpu, ways, rows)
        + efficiency.launch_seconds
    )


def expert_seconds(
    model: ServedModel, gpu: Accelerator, ways: int, rows: Amount, experts: Amount, efficiency: Efficiency
) -> Amount:
    """Return the seconds of one layer of an expert node (`T_e`).

    rows       of one expert (`b_e`)
    experts    on the node, computed one after the other
    """
    each = gated_seconds(model, gpu, ways, rows, model.width, efficiency)
    return experts * (each + all_reduce_seconds(model, gpu, ways, rows)) + efficiency.launch_seconds


def rest_seconds(
    model: ServedModel, gpu: Accelerator, ways: int, rows: Amount, context: Amount, efficiency: Efficiency
) -> Amount:
    """Return the seconds of a decode step on an attention node outside of layers with experts."""
    dense: Amount = 0.0
    if model.dense_layers:
        dense = attention_seconds(model, gpu, ways, rows, context, efficiency)
        dense += gated_seconds(model, gpu, ways, rows, model.dense_width, efficiency)
    columns = model.output_values / model.hidden / ways
    head = gemm_seconds(rows, model.hidden, columns, gpu, efficiency) if columns else 0.0
    return model.dense_layers * dense + head


def hop_seconds(
    model: ServedModel,
    sender: tuple[Accelerator, int],
    receiver: tuple[Accelerator, int],
    rows: tuple[Amount, Amount],
    receivers: Amount,
    efficiency: Efficiency,
) -> Amount:
    """Return the seconds of one way between attention and expert nodes, the slower side (Eq. 6, `T_c`).

    sender, receiver    accelerator of attention and expert nodes, and GPUs of one node
    rows                that an attention node sends in all (`b_a K`), and that an expert node gets
    receivers           expert nodes
    """
    sent = BYTES * rows[0] * model.hidden / sender[1]
    received = BYTES * rows[1] * model.hidden / receiver[1]
    pair = sent / receivers
    return np.maximum(
        network_seconds(sent, pair, sender[0], efficiency), network_seconds(received, pair, receiver[0], efficiency)
    )


def network_seconds(num_bytes: Amount, pair_bytes: Amount, gpu: Accelerator, efficiency: Efficiency) -> Amount:
    """Return the seconds in which a NIC sends or receives bytes that go to or come from many.

    pair_bytes    of one message, on which the share of the bandwidth depends
    """
    slower = 1 + efficiency.half_rate_bytes / np.maximum(pair_bytes, 1e-9)
    seconds = num_bytes / gpu.network_bytes_per_second * slower
    return efficiency.hop_factor * (seconds + efficiency.hop_seconds)


def stage_seconds(
    model: ServedModel,
    attention: tuple[Accelerator, int, Amount],
    experts: tuple[Accelerator, int, int],
    rows: Amount,
    load: tuple[Amount, Amount],
    efficiency: Efficiency,
) -> tuple[Amount, Amount, Amount, Amount]:
    """Return the seconds of one micro-batch under a split of GPUs, in the order of `StageSeconds`.

    attention    accelerator, GPUs of a node, nodes
    experts      accelerator, GPUs of a node, experts of a node
    rows         requests of a micro-batch on one attention node (`b_a`)
    load         mean tokens of a request; rows of the busiest expert node / mean
    """
    gpu, ways, nodes = attention
    expert_gpu, expert_ways, per_node = experts
    context, skew = load
    expert_rows = skew * rows * nodes * model.top_k / model.experts
    sent, received = rows * model.top_k, expert_rows * per_node
    return (
        attention_seconds(model, gpu, ways, rows, context, efficiency),
        expert_seconds(model, expert_gpu, expert_ways, expert_rows, per_node, efficiency),
        hop_seconds(
            model, (gpu, ways), (expert_gpu, expert_ways), (sent, received), model.experts / per_node, efficiency
        ),
        rest_seconds(model, gpu, ways, rows, context, efficiency),
    )


def gated_seconds(
    model: ServedModel, gpu: Accelerator, ways: int, rows: Amount, width: int | float, efficiency: Efficiency
) -> Amount:
    """Return the seconds of a feed-forward of some width, cut over the GPUs of a node."""
    up = gemm_seconds(rows, model.hidden, model.up_matrices * width / ways, gpu, efficiency)
    return up + gemm_seconds(rows, width / ways, model.hidden, gpu, efficiency)


def _score_seconds(
    model: ServedModel, gpu: Accelerator, ways: int, rows: Amount, context: Amount, efficiency: Efficiency
) -> Amount:
    """Return the seconds of reading keys and values, or of computing with them where that takes longer."""
    attended = rows * model.attended(context)
    read = BYTES * model.cache_values * attended / min(ways, model.cache_ways)
    flops = model.score_flops * attended / ways
    return np.maximum(
        read / (efficiency.memory * gpu.memory_bytes_per_second), flops / (efficiency.flops * gpu.flops_per_second)
    )


def all_reduce_seconds(model: ServedModel, gpu: Accelerator, ways: int, rows: Amount) -> Amount:
    """Return the seconds of summing rows over the GPUs of a node."""
    return 2 * BYTES * rows * model.hidden * (ways - 1) / ways / gpu.peer_bytes_per_second
