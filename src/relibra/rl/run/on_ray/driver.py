"""The user's side of a run on Ray: place the ranks on nodes, print what they say, notice lost nodes. Imports no torch.

One actor per node starts the processes of its ranks (`node_ranks.py`); a placement group reserves what they need. Nodes
are told apart by Ray's node id: several may have one address.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relibra.environment import LaunchedRank
from relibra.printable import printable
from relibra.rl.config.model_folder import names_hub
from relibra.rl.config.run_config import RunConfig
from relibra.rl.run.on_ray.layout import resources_of_ranks
from relibra.rl.run.on_ray.node_actors import (
    NodeActor,
    ask_actors,
    end_actors,
    explain_loss,
    prepare_nodes,
    start_actors,
)
from relibra.rl.run.on_ray.node_ranks import News, NodeRanks
from relibra.rl.run.on_ray.placing import Reserved, free_room, reserve_room
from relibra.rl.run.on_ray.ray_servers import RayServers
from relibra.rl.run.rank_processes import GRACE_SECONDS, EndedRanks
from relibra.rl.run.worker import Exit

NEWS_SECONDS = 1.0
"""Longest time until an interrupt is passed on."""


@dataclass
class _Node(NodeActor):
    """A node of the run: its actor, its ranks, and how they ended."""

    ranks: list[LaunchedRank] = field(default_factory=list)
    ended: EndedRanks | None = None

    @property
    def over(self) -> bool:
        return self.lost is not None or self.ended is not None

    @property
    def failed(self) -> bool:
        codes = () if self.ended is None else self.ended.codes
        return self.lost is not None or any(code not in (Exit.DONE, Exit.STOPPED) for code in codes)


def _in_words(ranks: Sequence[LaunchedRank]) -> str:
    first, last = ranks[0].rank, ranks[-1].rank
    return f"rank {first}" if first == last else f"ranks {first} to {last}"


class RayRanks:
    """The ranks of a run on Ray's nodes; to be used like `RankProcesses`."""

    def __init__(self, config: RunConfig, run: Path) -> None:
        """Prepare them; `connected_ray` is active until `end`."""
        self._config = config
        self._run = run
        self._interrupted = False
        self._reserved: Reserved | None = None
        self._nodes: list[_Node] = []
        self._servers = RayServers(config, run) if config.rollout.starts_servers else None

    def start(self) -> None:
        """Place ranks and servers, and start them: the servers first, so that the ranks know their addresses.

        raises   ConfigError if a node cannot take part; EngineError if there is no room for PLACE_SECONDS
        """
        parallel, model = self._config.parallel, self._config.model.path
        offline = bool(model) and not names_hub(model)
        reserved = self._reserved = reserve_room(self._config, self._run, lambda: self._interrupted)
        if self._servers is not None:
            self._servers.start(reserved.servers, gpus=reserved.gpus, offline=offline)
        self._start_actors(reserved)
        servers = self._servers and self._servers.wait_for_addresses(lambda: self._interrupted)
        first = self._nodes[0]
        [port] = ask_actors([first], "listen", first.host)
        ask_actors(
            self._nodes,
            "start",
            self._config.model_dump_json(),
            str(self._run),
            address=(first.host, port),
            heartbeat_seconds=parallel.heartbeat_seconds,
            offline=offline,
            servers=servers,
        )

    def interrupt(self) -> None:
        """Ask the ranks to stop after the present step; before they start, `start` ends."""
        self._interrupted = True  # `wait` tells them: a signal may arrive inside a call of Ray

    def wait(self, _heartbeat_seconds: float) -> EndedRanks:
        """Print what the ranks print until all ended, or until GRACE_SECONDS after the first node that failed.

        Without its rollout servers a run ends at once.
        """
        import ray

        waiting = {node.actor.news.remote(NEWS_SECONDS): node for node in self._nodes}
        deadline, told = None, False
        losses: tuple[str, ...] = ()
        while waiting and not losses and (deadline is None or time.monotonic() < deadline):
            if self._interrupted and not told:
                told = True
                for node in self._nodes:
                    node.actor.interrupt.remote()
            ready, _ = ray.wait(list(waiting), num_returns=1, timeout=NEWS_SECONDS)
            for answer in ready:
                node = waiting.pop(answer)
                self._hear(node, answer)
                if not node.over:
                    waiting[node.actor.news.remote(NEWS_SECONDS)] = node
                elif node.failed and deadline is None:
                    deadline = time.monotonic() + GRACE_SECONDS
            losses = self._lost_servers() if waiting else ()
        return _join(self._nodes, losses)

    def end(self) -> None:
        """Kill the ranks that still run, stop the servers, and give back what was reserved."""
        end_actors(self._nodes, 2 * GRACE_SECONDS)
        if self._servers is not None:
            self._servers.end()
        if self._reserved is not None:
            groups = (self._reserved.ranks, self._reserved.servers)
            free_room([group for group in groups if group is not None])
        self._nodes, self._reserved = [], None

    def _lost_servers(self) -> tuple[str, ...]:
        """Return how the servers were lost, in words, if none is left."""
        if self._servers is None:
            return ()
        self._servers.look()
        return self._servers.losses

    def _start_actors(self, reserved: Reserved) -> None:
        """Start the actor of each node; raise ConfigError if a node cannot train."""
        layout, threads = reserved.layout, self._config.parallel.threads_per_rank
        count = layout.ranks_per_node
        ranks_N = [
            [LaunchedRank(place * count + local, local, layout.num_nodes * count, count) for local in range(count)]
            for place in range(layout.num_nodes)
        ]
        resources = resources_of_ranks(count, threads, gpus=reserved.gpus)
        placed = start_actors(NodeRanks, reserved.ranks, resources, [(ranks,) for ranks in ranks_N])
        self._nodes = [_Node(*one, _in_words(ranks), ranks=ranks) for one, ranks in zip(placed, ranks_N, strict=True)]
        prepare_nodes(self._nodes, self._run)
        line = ", ".join(f"{node.holds} on {node.name}" for node in self._nodes)
        print(printable(line), file=sys.stderr, flush=True)

    def _hear(self, node: _Node, answer: Any) -> None:
        """Print news of a node, and note whether it ended."""
        import ray

        try:
            news: News = ray.get(answer)
        except ray.exceptions.RayError as error:
            node.lost = error
            return
        for line in news.lines:
            print(printable(line), file=sys.stderr, flush=True)
        node.ended = news.ended


def _join(nodes: Sequence[_Node], losses: tuple[str, ...]) -> EndedRanks:
    """Return how the ranks of all nodes ended, in the order of ranks.

    losses   how the servers were lost that the ranks need, in words
    """
    ended = [
        node.ended or EndedRanks(codes=(None,) * len(node.ranks), last_words=(b"",) * len(node.ranks)) for node in nodes
    ]
    return EndedRanks(
        codes=tuple(code for one in ended for code in one.codes),
        last_words=tuple(word for one in ended for word in one.last_words),
        stopped=tuple(rank for one in ended for rank in one.stopped),
        lost=(*losses, *(explain_loss(node, node.lost) for node in nodes if node.lost is not None)),
        notes=tuple(note for one in ended for note in one.notes),
    )
