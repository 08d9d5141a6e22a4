"""`Cluster`: nodes, ranks and links of the machine that a step is planned for; presets and a TOML file format.

A link costs `alpha * messages + beta * bytes` per direction and rank; both directions run at once. Presets hold
data-sheet bandwidths, and assumptions where no data sheet says anything, so their label is `model`; `relibra calibrate`
measures a machine.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from jaxtyping import Float64, Shaped
from numpy import ndarray
from pydantic import Field

from relibra.errors import ClusterError
from relibra.field_checks import build, check_fields
from relibra.files import read_toml, toml_value, write_text

Label = Literal["cited", "measured", "model"]
Dispatch = Literal["flat", "hierarchical"]
"""How a token reaches ranks of another node: one copy for each rank, or one copy that is forwarded inside the node."""
Amount = TypeVar("Amount", float, ndarray)

MAX_RANKS = 1 << 16
_LARGEST = 10**24
"""Upper limit of byte counts, rates and times; keeps sums finite."""
Whole = Annotated[int, Field(ge=1, le=_LARGEST)]
Amount0 = Annotated[float, Field(ge=0, le=_LARGEST)]
Rate = Annotated[float, Field(ge=1e-3, le=_LARGEST)]
"""Lower rates would make times infinite."""
Text = Annotated[str, Field(min_length=1)]


@dataclass(frozen=True, kw_only=True)
class Link:
    """One direction of a rank's link.

    latency_seconds    alpha: seconds per message, 0 or more; an exchange sends one to each peer
    bytes_per_second   1 / beta, above 0
    raises             ClusterError for values out of range
    """

    latency_seconds: Amount0
    bytes_per_second: Rate

    def __post_init__(self) -> None:
        check_fields(Link, vars(self), "link", ClusterError)

    def seconds(self, num_bytes: Amount, messages: int | ndarray = 1) -> Amount:
        """Return alpha * messages + beta * bytes, elementwise; 0 bytes take no time."""
        seconds: Any = num_bytes / self.bytes_per_second + (num_bytes > 0) * (messages * self.latency_seconds)
        return seconds


@dataclass(frozen=True, kw_only=True)
class Transport:
    """How rows are put into the memory of ranks of other nodes (Perseus, arXiv 2605.00686).

    puts            "peer": one put per rank; "expert": one per expert of that rank. Each costs the link's latency
    fence_seconds   wait of a source in a fence, which orders a signal behind the rows that it announces; 0 or more
    fence_scope     what one fence covers: one "put", or all puts to a "peer"
    raises          ClusterError for values out of range
    """

    puts: Literal["peer", "expert"] = "peer"
    fence_seconds: Amount0 = 0.0
    fence_scope: Literal["put", "peer"] = "put"

    def __post_init__(self) -> None:
        check_fields(Transport, vars(self), "transport", ClusterError)


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Shape of a machine: `num_nodes` nodes of `ranks_per_node` ranks; rank r is on node r // ranks_per_node."""

    num_nodes: int
    ranks_per_node: int

    @property
    def num_ranks(self) -> int:
        """Return the ranks of the expert-parallel group, `R`."""
        return self.num_nodes * self.ranks_per_node


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Machine of `num_nodes` equal nodes with `ranks_per_node` ranks; rank r is on node r // ranks_per_node.

    intra                        rank to rank inside a node, the same in each direction
    inter_send, inter_receive    a rank's share of its node's network, out and in
    host                         host memory to rank and back, the same in each direction
    memory_bytes                 device memory per rank
    memory_bytes_per_second      of the device memory: the limit of decoding, optimizer and small GEMMs; 0: not known
    layer_seconds                launches and host work of a layer's forward pass that nothing hides; the backward pass
                                 takes twice as long. 0: not known
    solve_seconds                of a live balancer, which plans each layer on the device after its router; 0: not known
    hides_copies                 weights and gradients travel while the device computes; false: ranks wait for them, as
                                 where the cores that compute also copy (processes on a CPU)
    dispatch                     "flat": a token goes to each rank that computes it; "hierarchical": it crosses to
                                 another node once and is forwarded there, and results come back the same way
    transport                    puts and fences of rows between nodes
    peak_flops_per_second        dense bf16 per rank; `efficiency` is the share that grouped GEMMs sustain
    gemm_table                   measured (rows of one expert, flops per second), rows rising; empty: an expert reads
                                 its weights from memory, then computes at the sustained rate
    source, label                origin of the figures; its kind: cited, measured or model
    raises                       ClusterError for values out of range
    """

    name: Text
    num_nodes: Whole
    ranks_per_node: Whole
    intra: Link
    inter_send: Link
    inter_receive: Link
    host: Link
    memory_bytes: Whole
    peak_flops_per_second: Rate
    efficiency: Annotated[float, Field(gt=0, le=1)]
    gemm_table: tuple[tuple[Whole, Rate], ...] = ()
    memory_bytes_per_second: Amount0 = 0.0
    layer_seconds: Amount0 = 0.0
    solve_seconds: Amount0 = 0.0
    hides_copies: bool = True
    dispatch: Dispatch = "flat"
    transport: Transport = Transport()
    source: Text
    label: Label

    def __post_init__(self) -> None:
        check_fields(Cluster, vars(self), "cluster", ClusterError)
        if self.num_ranks > MAX_RANKS:
            raise ClusterError(f"cluster of {self.num_nodes} x {self.ranks_per_node} ranks: at most {MAX_RANKS} ranks")
        for key in ("name", "source"):
            if not getattr(self, key).isprintable():
                raise ClusterError(f"cluster {key} is {getattr(self, key)!r}: it must be one line of printable text")
        all_rows = [rows for rows, _ in self.gemm_table]
        if all_rows != sorted(set(all_rows)):
            raise ClusterError(f"gemm_table has rows {all_rows}: they must rise, each row count once")

    @property
    def num_ranks(self) -> int:
        """Return the ranks of the expert-parallel group, `R`."""
        return self.num_nodes * self.ranks_per_node

    @property
    def topology(self) -> Topology:
        """Return nodes and ranks per node, without links and speeds."""
        return Topology(num_nodes=self.num_nodes, ranks_per_node=self.ranks_per_node)

    @property
    def flops_per_second(self) -> float:
        """Return the dense bf16 flops per second that grouped GEMMs of many rows sustain: peak x efficiency."""
        return self.peak_flops_per_second * self.efficiency

    @property
    def slowest_bytes_per_second(self) -> float:
        """Return the lower of the two rates between nodes; of a single node, the rate inside it."""
        if self.num_nodes == 1:
            return self.intra.bytes_per_second
        return min(self.inter_send.bytes_per_second, self.inter_receive.bytes_per_second)

    def gemm_seconds(self, rows: Shaped[ndarray, "*X"], flops_per_row: float) -> Float64[ndarray, "*X"]:
        """Return the seconds that one expert needs for `rows` rows, elementwise; 0 rows take no time.

        With a table the rate is interpolated and never falls with more rows (otherwise noise in the table would make an
        expert cheaper when split). Fewer rows than the first entry take as long as the first: reading weights limits.

        Without a table an expert reads its weights (two bytes each: bytes = flops of a row), then computes its rows at
        the sustained rate. Kernels overlap the two (less time), but compute whole tiles of 64 or 128 rows (more time).
        Reading takes no time where the memory's bandwidth is not known.
        """
        if not self.gemm_table:
            reading = flops_per_row / self.memory_bytes_per_second if self.memory_bytes_per_second else 0.0
            return rows * (flops_per_row / self.flops_per_second) + (rows > 0) * reading
        table_rows, rates = (np.array(column, dtype=np.float64) for column in zip(*self.gemm_table, strict=True))
        timed_rows = np.maximum(rows, table_rows[0])
        rate = np.interp(timed_rows, table_rows, np.maximum.accumulate(rates))
        return (rows > 0) * (timed_rows * flops_per_row / rate)

    def with_ranks(self, num_ranks: int, ranks_per_node: int | None = None) -> Cluster:
        """Return this machine with another number of ranks; fewer ranks than a node has: one smaller node.

        raises    ClusterError when the ranks do not fill nodes evenly
        """
        for key, ranks in (("num_ranks", num_ranks), ("ranks_per_node", ranks_per_node or 1)):
            if isinstance(ranks, bool) or not isinstance(ranks, int | np.integer) or ranks < 1:
                raise ClusterError(f"{key} is {ranks!r}: it must be a whole number above 0")
        per_node = min(num_ranks, ranks_per_node or self.ranks_per_node)
        if num_ranks % per_node:
            raise ClusterError(
                f"{num_ranks} ranks do not fill nodes of {per_node} evenly: use a multiple of {per_node}, or give "
                f"ranks_per_node a divisor of {num_ranks}"
            )
        return replace(self, num_nodes=num_ranks // per_node, ranks_per_node=per_node)


def cluster_preset(name: str, num_ranks: int | None = None, ranks_per_node: int | None = None) -> Cluster:
    """Return a machine of `PRESETS`, resized to `num_ranks` if given.

    raises    ClusterError for an unknown name, or ranks that do not fill nodes evenly

    >>> cluster_preset("h100x8", 32).num_nodes
    4
    """
    if name not in PRESETS:
        raise ClusterError(
            f"cluster {name!r} is unknown: allowed are {', '.join(PRESETS)}, or the path of a .toml file"
        )
    cluster = PRESETS[name]
    return cluster.with_ranks(cluster.num_ranks if num_ranks is None else num_ranks, ranks_per_node)


def write_cluster(path: Path | str, cluster: Cluster) -> None:
    """Write a cluster as TOML; `read_cluster` returns an equal value."""
    values = asdict(cluster)
    if cluster.transport == Transport():
        del values["transport"]
    links = {key: value for key, value in values.items() if isinstance(value, dict)}
    lines = [f"{key} = {toml_value(value)}" for key, value in values.items() if key not in links]
    for key, link in links.items():
        lines += ["", f"[{key}]", *(f"{name} = {toml_value(value)}" for name, value in link.items())]
    write_text(Path(path), "\n".join(lines) + "\n")


def read_cluster(path: Path | str) -> Cluster:
    """Read a cluster from a TOML file of `write_cluster`.

    raises    ClusterError when the file is missing, not TOML, or has unknown, missing or invalid entries
    """
    body = read_toml(Path(path), ClusterError, "a cluster file")
    return build(Cluster, body, f"cluster file {path}", ClusterError)


def _node(
    name: str, ranks: int, gb: int, tflops: float, efficiency: float, rates_gb: tuple[float, ...], source: str
) -> Cluster:
    """Build a cluster of one node; `rates_gb`: GB/s per rank: intra, inter, host (per direction), device memory."""
    intra, inter, host, memory = (rate * 1e9 for rate in rates_gb)
    return Cluster(
        name=name,
        num_nodes=1,
        ranks_per_node=ranks,
        intra=Link(latency_seconds=2e-6, bytes_per_second=intra),
        inter_send=Link(latency_seconds=4e-6, bytes_per_second=inter),
        inter_receive=Link(latency_seconds=4e-6, bytes_per_second=inter),
        host=Link(latency_seconds=10e-6, bytes_per_second=host),
        memory_bytes=gb * 10**9,
        memory_bytes_per_second=memory,
        peak_flops_per_second=tflops * 1e12,
        efficiency=efficiency,
        layer_seconds=50e-6,
        solve_seconds=75e-6,
        source=f"{source}; efficiency, latencies and host time are assumptions, seconds of live planners are UltraEP's",
        label="model",
    )


_IB8 = "InfiniBand 8 x 400 Gb/s per node"
PRESETS: dict[str, Cluster] = {
    cluster.name: cluster
    for cluster in (
        _node("h100x8", 8, 80, 989.4, 0.5, (450, 50, 64, 3350), f"H100 SXM data sheet, NVLink 900 GB/s, {_IB8}"),
        _node("h800x8", 8, 80, 989.4, 0.5, (200, 50, 64, 3350), f"H800: H100 SXM figures, NVLink 400 GB/s, {_IB8}"),
        _node("h200x8", 8, 141, 989.4, 0.5, (450, 50, 64, 4800), f"H200 SXM data sheet, NVLink 900 GB/s, {_IB8}"),
        _node("h20x8", 8, 96, 148, 0.7, (450, 25, 64, 4000), "H20: NVLink 900 GB/s, 4 x 400 Gb/s per node"),
        _node("nvl72", 72, 186, 2500, 0.5, (900, 50, 225, 8000), "GB200 NVL72 data sheet, NVLink 1.8 TB/s per GPU"),
        _node("rtx4090x8", 8, 24, 165.2, 0.6, (32, 1.5625, 32, 1008), "RTX 4090 data sheet, PCIe 4.0 x16, 100 Gb/s"),
        replace(
            _node("laptop", 4, 4, 0.2, 0.5, (2, 0.1, 10, 20), "a 4-process gloo job on one CPU, order of magnitude"),
            intra=Link(latency_seconds=3e-4, bytes_per_second=2e9),
            hides_copies=False,
        ),
    )
}
"""Machines by name; one node each, `Cluster.with_ranks` adds more."""
