"""The user's side of a run on Ray: place the ranks on nodes, print what they say, notice lost nodes. Imports no torch.

One actor per node starts the processes of its ranks (`node_ranks.py`); a placement group reserves what they need. Nodes
are told apart by Ray's node id: several may have one address.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import relibra
from relibra.environment import LaunchedRank, ray_address
from relibra.errors import ConfigError, EngineError
from relibra.printable import printable
from relibra.rl.config.model_folder import names_hub
from relibra.rl.config.run_config import RunConfig
from relibra.rl.run.on_ray.layout import Layout, describe_need, possible_layouts, resources_of_ranks, room_for_ranks
from relibra.rl.run.on_ray.node_ranks import News, NodeRanks
from relibra.rl.run.rank_processes import GRACE_SECONDS, EndedRanks
from relibra.rl.run.run_failure import LostRankError, resume_hint
from relibra.rl.run.run_folder import has_checkpoint
from relibra.rl.run.worker import Exit

PLACE_SECONDS = 60.0
"""Seconds to wait for room on nodes: those of a lost run become free a moment later, a node may be replaced."""
TRY_SECONDS = 5.0
"""Seconds after which the layout is chosen anew from the nodes that are there."""
ANSWER_SECONDS = 120.0
"""Seconds to wait for an actor that starts: it imports relibra."""
ADDRESS_SECONDS = 10.0
"""Seconds to wait until the cluster takes a connection."""
NEWS_SECONDS = 1.0
"""Longest time until an interrupt is passed on."""
NODE_SECONDS = 30.0
"""Seconds to wait, where an actor does not answer, until Ray knows whether its node is gone."""
ACTOR_THREADS = 4
"""Calls of an actor that may run at once: `news` waits while `interrupt` and `end` are called."""


def check_ray() -> None:
    """Raise ConfigError if ray is not installed."""
    if find_spec("ray") is None:
        raise ConfigError(
            "parallel.launcher=ray needs the package 'ray': in the checkout, on every node, pip install -e '.[ray]'"
        )


@contextmanager
def connected_ray() -> Iterator[None]:
    """Connect to the running Ray cluster; a connection that the program has already stays as it is.

    raises   ConfigError if there is none: no cluster is started, because its ports have no password
    """
    _check_address(ray_address())
    import ray

    if ray.is_initialized():
        yield
        return
    try:
        ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"parallel.launcher=ray finds no running Ray cluster ({_cause(error)}): start one with `ray start "
            "--head`, run relibra on a node of one, or set RAY_ADDRESS"
        ) from error
    try:
        # Ray prints what happens to its workers, with pages of its logs; we say it in a sentence.
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            yield
    finally:
        ray.shutdown()


def _check_address(address: str) -> None:
    """Raise ConfigError if nobody listens at host:port, where Ray itself tries again for minutes."""
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ADDRESS_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"parallel.launcher=ray finds no Ray cluster at {address} (RAY_ADDRESS): {error}; start one with `ray "
            "start --head`, or set the address that it prints"
        ) from error


@dataclass
class _Node:
    """A node of the run: its actor, id and address, its ranks, and how they ended.

    lost   how Ray says that its actor was lost; None: it was not
    """

    actor: Any
    node_id: str
    host: str
    ranks: list[LaunchedRank]
    ended: EndedRanks | None = None
    lost: Exception | None = None

    @property
    def name(self) -> str:
        return f"node {self.host} ({self.node_id[:8]})"

    @property
    def ranks_in_words(self) -> str:
        first, last = self.ranks[0].rank, self.ranks[-1].rank
        return f"rank {first}" if first == last else f"ranks {first} to {last}"

    @property
    def over(self) -> bool:
        return self.lost is not None or self.ended is not None

    @property
    def failed(self) -> bool:
        codes = () if self.ended is None else self.ended.codes
        return self.lost is not None or any(code not in (Exit.DONE, Exit.STOPPED) for code in codes)


class RayRanks:
    """The ranks of a run on Ray's nodes; to be used like `RankProcesses`."""

    def __init__(self, config: RunConfig, run: Path) -> None:
        """Prepare them; `connected_ray` is active until `end`."""
        self._config = config
        self._run = run
        self._interrupted = False
        self._group: Any = None
        self._nodes: list[_Node] = []

    def start(self) -> None:
        """Place the ranks and start them.

        raises   ConfigError if a node cannot take part; EngineError if there is no room for PLACE_SECONDS
        """
        parallel = self._config.parallel
        gpus = parallel.device == "auto" and any(node["Resources"].get("GPU") for node in _alive_nodes())
        layout = self._place(gpus=gpus)
        self._start_actors(layout, gpus=gpus)
        first = self._nodes[0]
        [port] = self._ask([first], "listen", first.host)
        self._ask(
            self._nodes,
            "start",
            self._config.model_dump_json(),
            str(self._run),
            address=(first.host, port),
            heartbeat_seconds=parallel.heartbeat_seconds,
            offline=bool(self._config.model.path) and not names_hub(self._config.model.path),
        )

    def interrupt(self) -> None:
        """Ask the ranks to stop after the present step; before they start, `start` ends."""
        self._interrupted = True  # `wait` tells them: a signal may arrive inside a call of Ray

    def wait(self, _heartbeat_seconds: float) -> EndedRanks:
        """Print what the ranks print until all ended, or until GRACE_SECONDS after the first node that failed."""
        import ray

        waiting = {node.actor.news.remote(NEWS_SECONDS): node for node in self._nodes}
        deadline, told = None, False
        while waiting and (deadline is None or time.monotonic() < deadline):
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
        return _join(self._nodes)

    def end(self) -> None:
        """Kill the ranks that still run, and give back what was reserved."""
        import ray
        from ray.util import remove_placement_group

        with suppress(ray.exceptions.RayError):
            ended = [node.actor.end.remote() for node in self._nodes if node.lost is None]
            ray.wait(ended, num_returns=len(ended), timeout=2 * GRACE_SECONDS) if ended else None
        for node in self._nodes:
            with suppress(ray.exceptions.RayError):
                ray.kill(node.actor)
        if self._group is not None:
            with suppress(ray.exceptions.RayError):
                remove_placement_group(self._group)
        self._nodes, self._group = [], None

    def _place(self, *, gpus: bool) -> Layout:
        """Reserve what the ranks need, and return how they lie on nodes."""
        from ray.util import placement_group, remove_placement_group

        num_ranks, threads = self._config.parallel.ranks, self._config.parallel.threads_per_rank
        deadline, attempt = time.monotonic() + PLACE_SECONDS, 0
        while True:
            rooms = (room_for_ranks(node["Resources"], threads, gpus=gpus) for node in _alive_nodes())
            room_N = sorted(rooms, reverse=True)
            layouts = possible_layouts(num_ranks, room_N)
            if layouts:
                layout = layouts[attempt % len(layouts)]
                bundle = resources_of_ranks(layout.ranks_per_node, threads, gpus=gpus)
                group = placement_group([bundle] * layout.num_nodes, strategy="STRICT_SPREAD")
                if group.wait(TRY_SECONDS):
                    self._group = group
                    return layout
                remove_placement_group(group)
            if self._interrupted:
                raise KeyboardInterrupt
            need = describe_need(num_ranks, threads, room_N, gpus=gpus)
            if time.monotonic() > deadline:
                again = f"; {resume_hint(self._run, 'parallel.ranks=N')}" if has_checkpoint(self._run) else ""
                raise EngineError(f"{need}: add nodes, end other jobs, or train with fewer (parallel.ranks){again}")
            if not attempt:
                print(f"waiting up to {PLACE_SECONDS:g} s for Ray: {need}", file=sys.stderr, flush=True)
            attempt += 1
            time.sleep(0.0 if layouts else 1.0)

    def _start_actors(self, layout: Layout, *, gpus: bool) -> None:
        """Start the actor of each node; raise ConfigError if a node cannot train."""
        import ray
        from ray.util import placement_group_table
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        count, threads = layout.ranks_per_node, self._config.parallel.threads_per_rank
        reserved = resources_of_ranks(count, threads, gpus=gpus)
        hosts = {node["NodeID"]: node["NodeManagerAddress"] for node in _alive_nodes()}
        node_ids = placement_group_table(self._group)["bundles_to_node_id"]
        kind = ray.remote(NodeRanks)
        for place in range(layout.num_nodes):
            node_id = node_ids[place]
            ranks = [
                LaunchedRank(place * count + local, local, layout.num_nodes * count, count) for local in range(count)
            ]
            actor = kind.options(
                num_cpus=reserved["CPU"],
                num_gpus=reserved.get("GPU", 0),
                max_concurrency=ACTOR_THREADS,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=place),
            ).remote(ranks)
            self._nodes.append(_Node(actor, node_id, hosts.get(node_id, ""), ranks))
        reasons = self._ask(self._nodes, "prepare", str(Path.cwd()), str(self._run), relibra.__version__)
        for node, reason in zip(self._nodes, reasons, strict=True):
            if reason:
                raise ConfigError(f"{node.name} of Ray cannot train: {reason}")
        placed = ", ".join(f"{node.ranks_in_words} on {node.name}" for node in self._nodes)
        print(printable(placed), file=sys.stderr, flush=True)

    def _ask(self, nodes: Sequence[_Node], method: str, *args: Any, **options: Any) -> list[Any]:
        """Return the answers of some nodes' actors to a call.

        raises   LostRankError if one was lost; EngineError if one cannot start
        """
        import ray

        answers = [getattr(node.actor, method).remote(*args, **options) for node in nodes]
        found = []
        for node, answer in zip(nodes, answers, strict=True):
            try:
                found.append(ray.get(answer, timeout=ANSWER_SECONDS))
            except ray.exceptions.RayActorError as error:
                raise LostRankError(f"the run ended early: {_explain_loss(node, error)}") from error
            except ray.exceptions.RayError as error:
                raise EngineError(
                    f"{node.name} of Ray does not start its ranks ({_cause(error)}): is the same relibra installed "
                    "there, with its extras [train,ray]?"
                ) from error
        return found

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


def _alive_nodes() -> list[dict[str, Any]]:
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def _join(nodes: Sequence[_Node]) -> EndedRanks:
    """Return how the ranks of all nodes ended, in the order of ranks."""
    ended = [
        node.ended or EndedRanks(codes=(None,) * len(node.ranks), last_words=(b"",) * len(node.ranks)) for node in nodes
    ]
    return EndedRanks(
        codes=tuple(code for one in ended for code in one.codes),
        last_words=tuple(word for one in ended for word in one.last_words),
        stopped=tuple(rank for one in ended for rank in one.stopped),
        lost=tuple(_explain_loss(node, node.lost) for node in nodes if node.lost is not None),
        notes=tuple(note for one in ended for note in one.notes),
    )


def _explain_loss(node: _Node, error: Exception) -> str:
    """Return in words what was lost with the actor of a node; Ray may need a while to know of the node."""
    import ray

    unsure = isinstance(error, ray.exceptions.ActorUnavailableError)
    deadline = time.monotonic() + (NODE_SECONDS if unsure else 0.0)
    while any(alive["NodeID"] == node.node_id for alive in _alive_nodes()):
        if time.monotonic() > deadline:
            logs = "why is in Ray's logs there, /tmp/ray/session_latest/logs"
            return f"the process of Ray that has {node.ranks_in_words} on {node.name} ended ({logs})"
        time.sleep(0.5)
    return f"{node.name} of Ray, with {node.ranks_in_words}, was lost"


def _cause(error: Exception) -> str:
    """Return the last line of an error of Ray, which ends a report of many."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return printable(lines[-1]) if lines else type(error).__name__
