"""Actors of a run on nodes of Ray: start them in a reserved group, ask them, say in words what was lost with one."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import relibra
from relibra.errors import ConfigError, EngineError
from relibra.rl.run.on_ray.connection import alive_nodes, last_line
from relibra.rl.run.run_failure import LostRankError

ANSWER_SECONDS = 120.0
"""Seconds to wait for an actor that starts: it imports relibra."""
NODE_SECONDS = 30.0
"""Seconds to wait, where an actor does not answer, until Ray knows whether its node is gone."""
ACTOR_THREADS = 4
"""Calls of an actor that may run at once: `news` waits while `interrupt` and `end` are called."""


@dataclass
class NodeActor:
    """An actor of a run: where it is, and what it holds.

    holds   in words, as in "ranks 0 to 1"
    lost    how Ray says that it was lost; None: it was not
    """

    actor: Any
    node_id: str
    host: str
    holds: str
    lost: Exception | None = None

    @property
    def name(self) -> str:
        """The node, in words."""
        return f"node {self.host} ({self.node_id[:8]})"


def start_actors(
    kind: type[Any], group: Any, resources: Mapping[str, int], arguments: Sequence[tuple[Any, ...]]
) -> list[tuple[Any, str, str]]:
    """Start an actor in each bundle of a group; return actors with id and address of their nodes.

    kind        the class; it takes one of `arguments`
    resources   that each bundle reserves
    """
    import ray
    from ray.util import placement_group_table
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    hosts = {node["NodeID"]: node["NodeManagerAddress"] for node in alive_nodes()}
    node_ids = placement_group_table(group)["bundles_to_node_id"]
    started = []
    for place, own in enumerate(arguments):
        actor = (
            ray.remote(kind)
            .options(
                num_cpus=resources["CPU"],
                num_gpus=resources.get("GPU", 0),
                max_concurrency=ACTOR_THREADS,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=place),
            )
            .remote(*own)
        )
        started.append((actor, node_ids[place], hosts.get(node_ids[place], "")))
    return started


def prepare_nodes(actors: Sequence[NodeActor], run: Path) -> None:
    """Let actors enter the folder of the driver; raise ConfigError where a node cannot take part."""
    reasons = ask_actors(actors, "prepare", str(Path.cwd()), str(run), relibra.__version__)
    for one, reason in zip(actors, reasons, strict=True):
        if reason:
            raise ConfigError(f"{one.name} of Ray cannot have {one.holds}: {reason}")


def ask_actors(actors: Sequence[NodeActor], method: str, *args: Any, **options: Any) -> list[Any]:
    """Return the answers of some actors to a call.

    raises   LostRankError if one was lost; EngineError if one cannot start
    """
    answers = [getattr(one.actor, method).remote(*args, **options) for one in actors]
    return [take_answer(one, answer) for one, answer in zip(actors, answers, strict=True)]


def take_answer(one: NodeActor, answer: Any) -> Any:
    """Return the answer of an actor.

    raises   LostRankError if it was lost; EngineError if it cannot start
    """
    import ray

    try:
        return ray.get(answer, timeout=ANSWER_SECONDS)
    except ray.exceptions.RayActorError as error:
        raise LostRankError(f"the run ended early: {explain_loss(one, error)}") from error
    except ray.exceptions.RayError as error:
        raise EngineError(
            f"{one.name} of Ray does not start {one.holds} ({last_line(error)}): is the same relibra installed "
            "there, with its extras [train,ray]?"
        ) from error


def explain_loss(one: NodeActor, error: Exception) -> str:
    """Return in words what was lost with an actor; Ray may need a while to know of the node."""
    import ray

    unsure = isinstance(error, ray.exceptions.ActorUnavailableError)
    deadline = time.monotonic() + (NODE_SECONDS if unsure else 0.0)
    while any(alive["NodeID"] == one.node_id for alive in alive_nodes()):
        if time.monotonic() > deadline:
            logs = "why is in Ray's logs there, /tmp/ray/session_latest/logs"
            return f"the process of Ray that has {one.holds} on {one.name} ended ({logs})"
        time.sleep(0.5)
    return f"{one.name} of Ray, with {one.holds}, was lost"


def end_actors(actors: Sequence[NodeActor], seconds: float) -> None:
    """Let actors end what they hold, at most so many seconds, and end them."""
    import ray

    with suppress(ray.exceptions.RayError):
        ended = [one.actor.end.remote() for one in actors if one.lost is None]
        ray.wait(ended, num_returns=len(ended), timeout=seconds) if ended else None
    for one in actors:
        with suppress(ray.exceptions.RayError):
            ray.kill(one.actor)
