"""The machine named by --cluster, --dispatch, --ranks and --ranks-per-node."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from relibra.errors import ConfigError
from relibra.printable import plural

if TYPE_CHECKING:
    from relibra.cluster import Cluster, Dispatch


def open_cluster(name: str, dispatch: Dispatch | None = None) -> Cluster:
    """Return a preset, or the machine of a TOML file, with its own number of ranks.

    dispatch   None: that of the machine
    raises     ClusterError when it is unknown or damaged
    """
    from relibra.cluster import cluster_preset, read_cluster

    cluster = read_cluster(Path(name)) if name.endswith(".toml") else cluster_preset(name)
    return cluster if dispatch is None else replace(cluster, dispatch=dispatch)


def fit_cluster(cluster: Cluster, num_experts: int, ranks: int, ranks_per_node: int | None) -> Cluster:
    """Return the same machine with the given number of ranks.

    ranks_per_node   as given; None: those of the machine, and fewer ranks are one smaller node
    raises           ConfigError when the ranks do not divide the experts, or do not fill nodes
    """
    per_node = ranks_per_node or cluster.ranks_per_node
    least = 1 if ranks_per_node is None else per_node
    allowed = [r for r in range(least, num_experts + 1) if num_experts % r == 0 and r % min(r, per_node) == 0]
    listed = ", ".join(map(str, allowed)) or "none"
    if num_experts % ranks:
        fewer = "at most" if ranks_per_node is None else "as many as"
        raise ConfigError(
            f"--ranks {ranks} does not divide {num_experts} experts: allowed are {listed} (they "
            f"divide {num_experts}, and are {fewer} {per_node}, the ranks of a node, or a multiple of it)"
        )
    nodes = ", ".join(str(g) for g in range(1, ranks + 1) if ranks % g == 0)
    if ranks_per_node is not None and ranks % ranks_per_node:
        raise ConfigError(
            f"--ranks-per-node {ranks_per_node} does not divide the {plural(ranks, 'rank')}: choose it from {nodes}"
        )
    if ranks % min(ranks, per_node):
        raise ConfigError(
            f"--ranks {ranks} does not fill nodes of {plural(per_node, 'rank')}: choose --ranks from {listed}, or "
            f"--ranks-per-node from {nodes}"
        )
    return cluster.with_ranks(ranks, ranks_per_node)
