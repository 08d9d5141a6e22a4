"""The ranks of a run on the nodes of a Ray cluster: Ray reserves room and starts one task per node (`node_ranks.py`).

Nodes are told apart by Ray's node id: several may have one address. ray is imported only when it is used.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import relibra
from relibra.environment import first_visible_gpu, keep_hub_offline, ray_address
from relibra.errors import ConfigError, EngineError
from relibra.printable import printable
from relibra.rl.config.model_folder import names_hub
from relibra.rl.config.run_config import RunConfig
from relibra.rl.run.node_ranks import Node, run_node_ranks
from relibra.rl.run.run_failure import EndedRanks, LostRankError, NoRoomError, resume_hint
from relibra.rl.run.run_folder import has_checkpoint, running_file

ADDRESS_SECONDS = 10.0
"""Seconds to wait until the cluster takes a connection."""
PLACE_SECONDS = 60.0
"""Seconds to wait for room on nodes: those of a lost run become free a moment later, a node may be replaced."""
TRY_SECONDS = 5.0
"""Seconds after which the layout is chosen anew from the nodes that are there."""
PREPARE_SECONDS = 120.0
"""Seconds to wait for the first answer of a node, which imports relibra."""
GRACE_SECONDS = 45.0
"""Seconds that other nodes get to end by themselves after one failed; torch's agent there takes up to 30."""


@dataclass(frozen=True, kw_only=True)
class PlacedNode:
    """A node with a bundle of the placement group, whose number is that of the node in the run."""

    group: Any
    bundle: int
    node_id: str
    host: str
    num_ranks: int

    @property
    def ranks(self) -> str:
        """Its ranks, in words."""
        first, last = self.bundle * self.num_ranks, (self.bundle + 1) * self.num_ranks - 1
        return f"rank {first}" if first == last else f"ranks {first} to {last}"

    @property
    def name(self) -> str:
        """The node, in words."""
        return f"node {self.host} ({self.node_id[:8]})"


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
        ray.init(address="auto", log_to_driver=True, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"parallel.launcher=ray finds no running Ray cluster ({_last_line(error)}): start one with `ray start "
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


def run_on_ray(config: RunConfig, run: Path) -> EndedRanks:
    """Run the ranks on nodes of the cluster; `connected_ray` is active. What they print comes through Ray.

    raises    ConfigError if a node cannot take part; EngineError if no room is found in PLACE_SECONDS
    """
    import ray
    from ray.util import remove_placement_group

    nodes = reserve_nodes(config, run)
    answers: dict[Any, PlacedNode] = {}
    try:
        port = _prepare_nodes(nodes, run)
        for node in nodes:
            place = Node(
                num_ranks=node.num_ranks, number=node.bundle, num_nodes=len(nodes), host=nodes[0].host, port=port
            )
            words = (config.model_dump_json(), str(Path.cwd()), str(run), place)
            answers[_task(run_node, node).remote(*words)] = node
        placed = ", ".join(f"{node.ranks} on {node.name}" for node in nodes)
        print(printable(placed), file=sys.stderr, flush=True)
        return _wait(answers)
    finally:
        with suppress(ray.exceptions.RayError):
            for answer in answers:
                ray.cancel(answer, force=True)  # nothing happens to one that ended
            remove_placement_group(nodes[0].group)


def prepare_node(folder: str, run: str, version: str, host: str) -> tuple[str, int]:
    """Return why this node cannot take part, or nothing; and a port that is free there.

    folder, run   working folder of the driver, which this process enters; run folder
    version       of the driver's relibra
    host          address of this node
    """
    if version != relibra.__version__:
        return f"it has relibra {relibra.__version__}, and the driver {version}: install the same on all nodes", 0
    try:
        os.chdir(folder)
    except OSError as error:
        return f"the folder {folder}, where the run was started, cannot be entered there ({error.strerror})", 0
    if not (Path(run) / "config.json").is_file():
        return f"the run folder {run} is not there: set run.folder to storage that all nodes share", 0
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        return "", int(listener.getsockname()[1])


def run_node(config_json: str, folder: str, run: str, place: Node) -> EndedRanks:
    """Run the ranks of this node, in a task of Ray."""
    os.chdir(folder)
    config = RunConfig.model_validate_json(config_json)
    if config.model.path and not names_hub(config.model.path):
        keep_hub_offline()
    return run_node_ranks(config, Path(run), place)


def _task(function: Any, node: PlacedNode) -> Any:
    """Return a function that Ray runs once, in a process of its own with all that is reserved on a node."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    resources = resources_of_ranks(node.num_ranks, gpus=_use_gpus())
    hidden = {} if "GPU" in resources else {"env_vars": {"CUDA_VISIBLE_DEVICES": ""}}
    return ray.remote(
        num_cpus=resources["CPU"],
        num_gpus=resources.get("GPU", 0),
        runtime_env=hidden,
        max_retries=0,
        max_calls=1,
        scheduling_strategy=PlacementGroupSchedulingStrategy(node.group, placement_group_bundle_index=node.bundle),
    )(function)


def _prepare_nodes(nodes: Sequence[PlacedNode], run: Path) -> int:
    """Return a free port of the first node; raise ConfigError where a node cannot take part."""
    words = (str(Path.cwd()), str(run), relibra.__version__)
    answers = [_task(prepare_node, node).remote(*words, node.host) for node in nodes]
    ports = []
    for node, answer in zip(nodes, answers, strict=True):
        reason, port = _take(answer, node, PREPARE_SECONDS)
        if reason:
            raise ConfigError(f"{node.name} of Ray cannot have {node.ranks}: {reason}")
        ports.append(port)
    return int(ports[0])


def _wait(answers: Mapping[Any, PlacedNode]) -> EndedRanks:
    """Wait until all nodes ended, or until GRACE_SECONDS after the first one that failed."""
    import ray

    waiting, deadline = list(answers), float("inf")
    ended, lost = list[EndedRanks](), list[str]()
    while waiting and time.monotonic() < deadline:
        ready, waiting = ray.wait(waiting, num_returns=1, timeout=1.0)
        for answer in ready:
            try:
                ended.append(_take(answer, answers[answer]))
            except LostRankError as error:
                lost.append(str(error))
        if lost or any(len(one.done) < one.num_ranks for one in ended):
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    return EndedRanks(
        num_ranks=sum(node.num_ranks for node in answers.values()),
        done={rank: done for one in ended for rank, done in one.done.items()},
        failures={rank: failure for one in ended for rank, failure in one.failures.items()},
        lost=tuple(lost),
    )


def _take(answer: Any, node: PlacedNode, seconds: float | None = None) -> Any:
    """Return the answer of a task; raise LostRankError if it was lost, EngineError if it failed or takes too long."""
    import ray

    try:
        return ray.get(answer, timeout=seconds)
    except (ray.exceptions.RayTaskError, ray.exceptions.GetTimeoutError) as error:
        raise EngineError(
            f"{node.name} of Ray does not start {node.ranks} ({_last_line(error)}): is the same relibra installed "
            "there, with its extras [train,ray]?"
        ) from error
    except ray.exceptions.RayError as error:
        raise LostRankError(_loss(node)) from error


def _loss(node: PlacedNode) -> str:
    """Return in words what was lost with a task of a node."""
    if any(alive["NodeID"] == node.node_id for alive in _alive_nodes()):
        logs = "why is in Ray's logs there, /tmp/ray/session_latest/logs"
        return f"the process of Ray that has {node.ranks} on {node.name} ended ({logs})"
    return f"{node.name} of Ray, with {node.ranks}, was lost"


def _alive_nodes() -> list[dict[str, Any]]:
    """Return what Ray says of each node that is there."""
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def _use_gpus() -> bool:
    """Return whether ranks have GPUs: the nodes have, and they are not hidden from the driver."""
    return first_visible_gpu() != "" and any(node["Resources"].get("GPU") for node in _alive_nodes())


def _last_line(error: Exception) -> str:
    """Return the last line of an error of Ray, whose text is a report of many lines."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return printable(lines[-1]) if lines else type(error).__name__


def reserve_nodes(config: RunConfig, run: Path) -> list[PlacedNode]:
    """Reserve what the ranks need in a placement group, and return its nodes; waits for room.

    raises   EngineError if no room is found in PLACE_SECONDS; KeyboardInterrupt where the run is asked to stop
    """
    from ray.util import placement_group, placement_group_table, remove_placement_group

    parallel, gpus, deadline = config.parallel, _use_gpus(), time.monotonic() + PLACE_SECONDS
    attempt = 0
    while True:
        nodes = [node["Resources"] for node in _alive_nodes()]
        room_N = sorted((room_for_ranks(one, gpus=gpus) for one in nodes), reverse=True)
        layouts = possible_layouts(parallel.ranks, room_N)
        if layouts:
            size = layouts[attempt % len(layouts)]
            num_nodes, bundle = parallel.ranks // size, resources_of_ranks(size, gpus=gpus)
            group = placement_group([bundle] * num_nodes, strategy="STRICT_SPREAD")
            if group.wait(TRY_SECONDS):
                hosts = {node["NodeID"]: node["NodeManagerAddress"] for node in _alive_nodes()}
                found = placement_group_table(group)["bundles_to_node_id"]
                return [
                    PlacedNode(
                        group=group, bundle=one, node_id=found[one], host=hosts.get(found[one], ""), num_ranks=size
                    )
                    for one in range(num_nodes)
                ]
            remove_placement_group(group)
        if not running_file(run).exists():
            raise KeyboardInterrupt
        need = describe_need(parallel.ranks, room_N, gpus=gpus)
        if time.monotonic() > deadline:
            again = f"; {resume_hint(run, 'parallel.ranks=N')}" if has_checkpoint(run) else ""
            raise NoRoomError(f"{need}: add nodes, end other jobs, or train with fewer (parallel.ranks){again}")
        if not attempt:
            print(f"waiting up to {PLACE_SECONDS:g} s for Ray: {need}", file=sys.stderr, flush=True)
        attempt += 1
        time.sleep(0.0 if layouts else 1.0)


def possible_layouts(num_ranks: int, room_N: Sequence[int]) -> list[int]:
    """Return the numbers of ranks on each node for which there is room, largest first.

    Each node gets the same number, as on a plan's `Cluster`. Ranks of a node are consecutive.

    room_N   ranks that fit on each node

    >>> possible_layouts(4, [2, 3]), possible_layouts(4, [3, 1])
    ([2], [])
    """
    sizes = [size for size in range(num_ranks, 0, -1) if num_ranks % size == 0]
    return [size for size in sizes if sum(room >= size for room in room_N) >= num_ranks // size]


def resources_of_ranks(num_ranks: int, *, gpus: bool) -> dict[str, int]:
    """Return what Ray reserves for some ranks: for each a CPU and a GPU."""
    return {"CPU": num_ranks, **({"GPU": num_ranks} if gpus else {})}


def room_for_ranks(resources: Mapping[str, float], *, gpus: bool) -> int:
    """Return how many ranks fit on a node.

    resources   of the node, by Ray's names

    >>> room_for_ranks({"CPU": 16.0, "GPU": 4.0}, gpus=True)
    4
    """
    needed = resources_of_ranks(1, gpus=gpus)
    return min(int(resources.get(name, 0.0) // amount) for name, amount in needed.items())


def describe_need(num_ranks: int, room_N: Sequence[int], *, gpus: bool) -> str:
    """Return in words what the ranks need, and what there is.

    room_N   ranks that fit on each node where nothing else runs

    >>> describe_need(4, [2, 1], gpus=True)
    "4 ranks, each with 1 CPU and 1 GPU, need nodes with the same number of ranks; Ray's nodes have room for 2, 1"
    """
    each = " and ".join(f"{amount} {name}" for name, amount in resources_of_ranks(1, gpus=gpus).items())
    room = ", ".join(map(str, room_N)) or "none"
    busy = " where nothing else runs" if possible_layouts(num_ranks, room_N) else ""
    return (
        f"{num_ranks} ranks, each with {each}, need nodes with the same number of ranks; Ray's nodes have room for "
        f"{room}{busy}"
    )
