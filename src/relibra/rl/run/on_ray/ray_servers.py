"""The rollout servers that a run starts on Ray, as the driver sees them: started, printed, watched, ended."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relibra.environment import StartedServers
from relibra.errors import EngineError
from relibra.printable import printable
from relibra.rl.config.run_config import RunConfig
from relibra.rl.rollout.started.commands import resources_of_server
from relibra.rl.run.on_ray.node_actors import (
    NodeActor,
    ask_actors,
    end_actors,
    explain_loss,
    prepare_nodes,
    start_actors,
    take_answer,
)
from relibra.rl.run.on_ray.node_server import NodeServer

LOOK_SECONDS = 1.0
"""Seconds of one look at a server; longest time until an interrupt is noticed while servers start."""
WATCH_SECONDS = 5.0
"""Seconds that one question whether a server ended is open."""
END_SECONDS = 60.0
"""Seconds that servers may take to end."""
_KEY_BYTES = 32


@dataclass
class _Server(NodeActor):
    """A server, and the call to `NodeServer.ended` that is open at its actor.

    asked   Ray's reference to the answer
    why     how the server was lost; empty: it runs
    """

    asked: Any = None
    why: str = ""


class RayServers:
    """Servers of one start of a run, with a key that is made for it."""

    def __init__(self, config: RunConfig, run: Path) -> None:
        """Prepare them."""
        self._config, self._run = config, run
        self._key = secrets.token_urlsafe(_KEY_BYTES)
        self._servers: list[_Server] = []

    @property
    def losses(self) -> tuple[str, ...]:
        """How each server was lost, if all were."""
        found = tuple(one.why for one in self._servers)
        return found if all(found) else ()

    def start(self, group: Any, *, gpus: bool, offline: bool) -> None:
        """Start a server in each bundle of a group; they load while the ranks are prepared.

        gpus      the run uses some
        offline   use downloaded models only
        """
        resources = resources_of_server(self._config.rollout, gpus=gpus)
        placed = start_actors(NodeServer, group, resources, [()] * self._config.rollout.servers)
        self._servers = [_Server(*one, "a rollout server") for one in placed]
        prepare_nodes(self._servers, self._run)
        for number, one in enumerate(self._servers):
            settings = {"number": number, "host": one.host, "key": self._key, "offline": offline}
            ask_actors([one], "start", self._config.model_dump_json(), str(self._run), **settings)

    def wait_for_addresses(self, is_interrupted: Callable[[], bool]) -> StartedServers:
        """Return the servers when all take requests, and print where they are.

        raises   EngineError where one does not start; LostRankError where one is lost; KeyboardInterrupt
        """
        seconds, urls = self._config.rollout.start_seconds, []
        deadline = time.monotonic() + seconds
        for one in self._servers:
            url = why = ""
            while not url:
                if is_interrupted():
                    raise KeyboardInterrupt
                url, why = take_answer(one, one.actor.address.remote(LOOK_SECONDS))
                if not why and not url and time.monotonic() > deadline:
                    folder = self._run / "server"
                    why = f"it takes no requests after {seconds:g} s (rollout.start_seconds); its log is in {folder}"
                if why:
                    raise EngineError(f"{one.holds} on {one.name} did not start: {why}")
            urls.append(url)
            one.holds = f"the rollout server at {url}"
            one.asked = one.actor.ended.remote(WATCH_SECONDS)
        placed = ", ".join(f"{one.holds.removeprefix('the ')} on {one.name}" for one in self._servers)
        print(printable(placed), file=sys.stderr, flush=True)
        return StartedServers(tuple(urls), self._key)

    def look(self) -> None:
        """Note which servers were lost, and print it while others are left; does not wait."""
        import ray

        for one in [one for one in self._servers if not one.why]:
            ready, _ = ray.wait([one.asked], timeout=0)
            if not ready:
                continue
            try:
                said = ray.get(one.asked)
                one.why = f"{one.holds} on {one.name} {said}" if said else ""
            except ray.exceptions.RayError as error:
                one.lost, one.why = error, explain_loss(one, error)
            if not one.why:
                one.asked = one.actor.ended.remote(WATCH_SECONDS)
                continue
            left = sum(not other.why for other in self._servers)
            if left:
                others = f"{left} other rollout server{'s' * (left > 1)}"
                print(printable(f"{one.why}; the run goes on with {others}"), file=sys.stderr, flush=True)

    def end(self) -> None:
        """Stop the servers."""
        end_actors(self._servers, END_SECONDS)
        self._servers = []
