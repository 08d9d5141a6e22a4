"""Fit a `Cluster` to the seconds that `measurement.py` measures.

GEMM table    rows of one expert -> flops per second, forward and backward
links         seconds = alpha x messages + beta x bytes, fitted over sizes
peak          highest rate of any product
memory        bytes per second of a copy inside device memory
overlap       whether products and an exchange at once take less time than one after the other
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from relibra.cluster import Cluster, Link
from relibra.errors import EngineError
from relibra.planning.costs.expert_shape import ExpertShape

Samples = Mapping[int, Sequence[float]]
"""Seconds of each repetition, by size (rows of an expert, or bytes)."""

PASSES = 3.0
"""Products of a training pass in units of the forward pass: backward has two, for rows and for weights."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Median and quartiles over repetitions."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Spread:
        """Return the spread of one or more numbers."""
        low, median, high = np.quantile(np.asarray(numbers, dtype=np.float64), (0.25, 0.5, 0.75))
        return cls(median=float(median), low=float(low), high=float(high))


@dataclass(frozen=True, kw_only=True)
class LinkFit:
    """A link, and the error of the fitted line.

    bytes, seconds    measured, with spreads over repetitions
    error             root mean square over sizes of (line - measured) / measured
    worst             largest absolute relative difference
    """

    link: Link
    bytes: tuple[int, ...]
    seconds: tuple[Spread, ...]
    error: float
    worst: float


def fit_link(samples: Samples, what: str, messages: int = 1) -> LinkFit:
    """Return the line alpha x messages + beta x bytes through measured seconds; alpha is 0 or more.

    Least squares of relative errors: absolute ones would fit the largest message alone and leave alpha to noise.

    what       measured operation, for error messages, such as "copies in host memory"
    messages   sent by a rank in one operation
    raises     EngineError when seconds do not grow with bytes
    """
    sizes = sorted(samples)
    spreads = [Spread.of(samples[size]) for size in sizes]
    bytes_X, seconds_X = np.array(sizes, dtype=np.float64), np.array([spread.median for spread in spreads])
    scale = bytes_X.max()  # scale both unknowns to one order of magnitude: the solver's tolerance is absolute
    columns_X2 = np.stack([np.full_like(bytes_X, seconds_X.max()), bytes_X / scale * seconds_X.max()], axis=1)
    (alpha, beta), _ = nnls(columns_X2 / seconds_X[:, None], np.ones(len(sizes)))
    alpha, beta = alpha * seconds_X.max(), beta * seconds_X.max() / scale
    if len(sizes) < 2 or not beta > 0:
        listed = ", ".join(f"{size:,} bytes {spread.median:.2g} s" for size, spread in zip(sizes, spreads, strict=True))
        raise EngineError(
            f"{what}: seconds do not grow with bytes ({listed}), so no bandwidth can be fitted; another program may "
            "have kept the machine busy: try again"
        )
    off_X = (alpha + beta * bytes_X) / seconds_X - 1
    return LinkFit(
        link=Link(latency_seconds=float(alpha) / messages, bytes_per_second=float(1 / beta)),
        bytes=tuple(sizes),
        seconds=tuple(spreads),
        error=float(np.sqrt(np.mean(off_X**2))),
        worst=float(np.abs(off_X).max()),
    )


@dataclass(frozen=True, kw_only=True)
class GemmRow:
    """Rows per expert, and the flops per second at which they are computed."""

    rows: int
    flops_per_second: Spread
    repetitions: int


def gemm_rows(samples: Samples, experts: int, flops_per_row: float) -> list[GemmRow]:
    """Return the rates of several experts with the same number of rows each, by ascending rows.

    flops_per_row    of one expert, forward and backward
    """
    found = {rows: [experts * rows * flops_per_row / sample for sample in samples[rows]] for rows in sorted(samples)}
    return [GemmRow(rows=n, flops_per_second=Spread.of(rates), repetitions=len(rates)) for n, rates in found.items()]


def monotone_table(found: Sequence[GemmRow]) -> tuple[tuple[int, float], ...]:
    """Return (rows, flops per second) with rates that never fall.

    Each rate is the highest so far, as `Cluster.gemm_seconds` reads a table anyway.
    """
    rates = np.maximum.accumulate([row.flops_per_second.median for row in found])
    return tuple((row.rows, float(rate)) for row, rate in zip(found, rates, strict=True))


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine to calibrate.

    memory_bytes    of one rank
    description     processor, dtype and threads, for `Cluster.source`
    """

    name: str
    ranks: int
    memory_bytes: int
    description: str


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A cluster and the measurements behind it; `exchange` is None for one rank."""

    cluster: Cluster
    gemm: list[GemmRow]
    dense_flops_per_second: Spread
    memory_bytes_per_second: Spread
    host: LinkFit
    exchange: LinkFit | None


@dataclass(frozen=True, kw_only=True)
class Timings:
    """Seconds of each repetition on the slowest rank.

    experts             by rows of each expert: forward and backward of `num_experts` experts
    dense               of one large product of `dense_flops`
    copies, exchange    by bytes; for an exchange, those that each rank sends to others
    memory_bytes        read plus written by a copy inside device memory
    memory              of that copy
    product_alone, exchange_alone, together
                        of products and an exchange of like duration, and of both at once; empty for one rank
    """

    num_experts: int
    experts: Samples
    dense_flops: float
    dense: Sequence[float]
    copies: Samples
    exchange: Samples
    memory_bytes: float
    memory: Sequence[float]
    product_alone: Sequence[float]
    exchange_alone: Sequence[float]
    together: Sequence[float]


LEAST_HIDDEN_SHARE = 0.5
"""A machine `hides_copies` from this `hidden_share` on."""


def hidden_share(timings: Timings) -> float:
    """Return how much of the shorter one, products or exchange, is hidden when both run at once: from 0 to 1."""
    product, exchange, together = (
        Spread.of(seconds).median for seconds in (timings.product_alone, timings.exchange_alone, timings.together)
    )
    return float(np.clip((product + exchange - together) / min(product, exchange), 0.0, 1.0))


def fit_cluster(
    timings: Timings, machine: Machine, expert: ExpertShape, links_of: Cluster | None = None
) -> Calibration:
    """Return a cluster of one node that fits the measurements.

    Links between nodes cannot be measured on one machine: the links inside it are used, and `source` says so.

    links_of    cluster whose links are used if no exchange was measured; the label is then `model`
    raises      EngineError when a line cannot be fitted
    """
    gemm = gemm_rows(timings.experts, timings.num_experts, PASSES * expert.flops_per_token_slot)
    table = monotone_table(gemm)
    dense = Spread.of([timings.dense_flops / seconds for seconds in timings.dense])
    memory = Spread.of([timings.memory_bytes / seconds for seconds in timings.memory])
    peak = max(dense.median, table[-1][1])
    host = fit_link(timings.copies, "copies in host memory")
    exchange = None
    if links_of is None:
        exchange = fit_link(timings.exchange, "the exchange between ranks", max(1, machine.ranks - 1))
        intra = send = receive = exchange.link
        links = "links between nodes were not measured, those inside the node are used"
    else:  # one rank measures no exchange
        intra, send, receive = links_of.intra, links_of.inter_send, links_of.inter_receive
        links = f"links between ranks were not measured, they are those of {links_of.name} ({links_of.label})"
    cluster = Cluster(
        name=machine.name,
        num_nodes=1,
        ranks_per_node=machine.ranks,
        intra=intra,
        inter_send=send,
        inter_receive=receive,
        host=host.link,
        memory_bytes=machine.memory_bytes,
        peak_flops_per_second=peak,
        efficiency=min(1.0, table[-1][1] / peak),
        gemm_table=table,
        memory_bytes_per_second=memory.median,
        hides_copies=hidden_share(timings) >= LEAST_HIDDEN_SHARE if links_of is None else links_of.hides_copies,
        source=f"relibra calibrate: {machine.description}; experts of {expert.hidden} x {expert.width}; {links}",
        label="measured" if exchange is not None else "model",
    )
    return Calibration(
        cluster=cluster,
        gemm=gemm,
        dense_flops_per_second=dense,
        memory_bytes_per_second=memory,
        host=host,
        exchange=exchange,
    )
