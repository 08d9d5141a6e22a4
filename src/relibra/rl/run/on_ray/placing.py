"""Reserve room for the ranks of a run, and for its rollout servers, in placement groups."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relibra.errors import EngineError
from relibra.rl.config.run_config import RunConfig
from relibra.rl.rollout.started.commands import resources_of_server
from relibra.rl.run.on_ray.connection import alive_nodes
from relibra.rl.run.on_ray.layout import (
    Layout,
    describe_need,
    describe_servers,
    has_room,
    possible_layouts,
    resources_of_ranks,
    room_for_ranks,
)
from relibra.rl.run.run_failure import resume_hint
from relibra.rl.run.run_folder import has_checkpoint

PLACE_SECONDS = 60.0
"""Seconds to wait for room on nodes: those of a lost run become free a moment later, a node may be replaced."""
TRY_SECONDS = 5.0
"""Seconds after which the layout is chosen anew from the nodes that are there."""


@dataclass(frozen=True)
class Reserved:
    """Placement groups of a run.

    ranks     a bundle for the ranks of each node of `layout`
    servers   a bundle for each rollout server that the run starts; None: it starts none
    gpus      ranks have one each
    """

    layout: Layout
    ranks: Any
    servers: Any | None
    gpus: bool


def reserve_room(config: RunConfig, run: Path, is_interrupted: Callable[[], bool]) -> Reserved:
    """Reserve what ranks and servers need, at most PLACE_SECONDS long.

    The two groups are independent: the ranks of each node need a node of their own, servers may be beside them. Either
    may take the place that the other one needs, so they take turns to be the first.

    raises   EngineError if there is no room; KeyboardInterrupt
    """
    parallel, rollout = config.parallel, config.rollout
    gpus = parallel.device == "auto" and any(node["Resources"].get("GPU") for node in alive_nodes())
    server = resources_of_server(rollout, gpus=gpus)
    num_servers = rollout.servers if rollout.starts_servers else 0
    deadline, attempt = time.monotonic() + PLACE_SECONDS, 0
    while True:
        nodes = [node["Resources"] for node in alive_nodes()]
        rooms = (room_for_ranks(resources, parallel.threads_per_rank, gpus=gpus) for resources in nodes)
        room_N = sorted(rooms, reverse=True)
        layouts = possible_layouts(parallel.ranks, room_N)
        if layouts:
            # Each layout is tried twice where there are servers: ranks first, then servers first (turn 1).
            first, turn = (attempt // 2, attempt % 2) if num_servers else (attempt, 0)
            layout = layouts[first % len(layouts)]
            bundle = resources_of_ranks(layout.ranks_per_node, parallel.threads_per_rank, gpus=gpus)
            wanted = [([bundle] * layout.num_nodes, "STRICT_SPREAD")]
            wanted += [([server] * num_servers, "SPREAD")] if num_servers else []
            groups = _reserve_all(wanted[::-1] if turn else wanted)
            if groups is not None:
                groups = groups[::-1] if turn else groups
                return Reserved(layout, groups[0], groups[1] if num_servers else None, gpus)
        if is_interrupted():
            raise KeyboardInterrupt
        need = describe_need(parallel.ranks, parallel.threads_per_rank, room_N, gpus=gpus)
        fewer = "train with fewer (parallel.ranks)"
        if num_servers:
            beside = describe_servers(num_servers, server, nodes)
            need = beside if layouts and not any(has_room(one, server) for one in nodes) else f"{need}; {beside}"
            fewer += ", or with smaller servers (rollout.server_options, rollout.server_cpus)"
        if time.monotonic() > deadline:
            again = f"; {resume_hint(run, 'parallel.ranks=N')}" if has_checkpoint(run) else ""
            raise EngineError(f"{need}: add nodes, end other jobs, or {fewer}{again}")
        if not attempt:
            print(f"waiting up to {PLACE_SECONDS:g} s for Ray: {need}", file=sys.stderr, flush=True)
        attempt += 1
        time.sleep(0.0 if layouts else 1.0)


def _reserve_all(wanted: list[tuple[list[dict[str, int]], str]]) -> list[Any] | None:
    """Return groups for bundles with their strategies; None, and nothing is reserved, where one finds no room."""
    from ray.util import placement_group

    groups: list[Any] = []
    for bundles, strategy in wanted:
        groups.append(placement_group(bundles, strategy=strategy))
        if not groups[-1].wait(TRY_SECONDS):
            free_room(groups)
            return None
    return groups


def free_room(groups: list[Any]) -> None:
    """Give back what was reserved."""
    import ray
    from ray.util import remove_placement_group

    for group in groups:
        with suppress(ray.exceptions.RayError):
            remove_placement_group(group)
