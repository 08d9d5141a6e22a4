"""A GPU that trainer and servers share (`rollout.sleep`): servers give its memory back while the trainer works.

Order: sleep, which drops weights and caches; training; weights get memory again and are loaded; caches get memory
again. Requests for tokens would hang from the first of these to the last.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from relibra.errors import EngineError
from relibra.rl.rollout.response import RolloutEngine
from relibra.rl.rollout.served.canary_probe import Canary
from relibra.rl.rollout.served.client import ServerClient
from relibra.rl.rollout.served.dialects import Dialect
from relibra.rl.rollout.served.engine import ServerEngine
from relibra.rl.rollout.served.loading import Call
from relibra.rl.rollout.served.pool import on_every_server
from relibra.rl.rollout.served.requests import refused_with
from relibra.rl.run.ranks import gather_json, wait_for_ranks

_log = logging.getLogger(__name__)

Requests = Mapping[Dialect, Sequence[tuple[str, Mapping[str, Any]]]]
"""Paths and bodies, in order."""
_TAGS = ["weights", "kv_cache"]
_SLEEP: Requests = {
    "sglang": [("/flush_cache", {}), ("/release_memory_occupation", {"tags": _TAGS})],
    "vllm": [("/sleep?level=2&mode=wait", {})],
}
_WAKE: Mapping[str, Requests] = {
    tag: {"sglang": [("/resume_memory_occupation", {"tags": [tag]})], "vllm": [(f"/wake_up?tags={tag}", {})]}
    for tag in _TAGS
}
PAUSE: Requests = {"vllm": [("/pause?mode=abort", {})], "sglang": [("/pause_generation", {"mode": "abort"})]}
"""Servers end all answers, with what they have of each, and begin none."""
PAUSE_KEEPING: Requests = {"vllm": [("/pause?mode=keep", {})], "sglang": [("/pause_generation", {"mode": "retract"})]}
"""Servers stop sampling, and keep what they have; SGLang frees its caches, which an update would not do."""
RESUME: Requests = {"vllm": [("/resume", {})], "sglang": [("/continue_generation", {})]}


def free_bytes(device: torch.device) -> int | None:
    """Return the memory of a GPU that no process holds; None: no GPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def put_servers_to_sleep(engine: RolloutEngine, canary: Canary | None, device: torch.device) -> None:
    """Let servers that share the trainer's GPUs (`rollout.sleep`) give their memory back until an update; collective.

    canary    on rank 0: fills the servers' caches first, to see later that sleep and update dropped them
    device    of this rank
    raises    EngineError where a server refuses, or no GPU of the trainer has more memory than before
    """
    if not isinstance(engine, ServerEngine) or not engine.servers[0].sleeps:
        return
    if canary is not None:
        canary.before_update()
    wait_for_ranks()
    before, engine.published.asleep = free_bytes(device), True
    on_servers(engine, _SLEEP)
    after = free_bytes(device)
    gained = gather_json(None if before is None or after is None else after - before)
    if None not in gained and max(gained) <= 0:
        raise EngineError(
            f"{engine.names} went to sleep, and no GPU of the trainer has more free memory than before: start it on "
            "these GPUs, or set rollout.sleep=false"
        )


def wake(engine: ServerEngine, tag: str) -> None:
    """Let all servers have memory again: for "weights" first, for "kv_cache" once these are loaded; collective."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # else what the trainer freed is still its own
    on_servers(engine, _WAKE[tag])
    engine.published.asleep = tag != _TAGS[-1]


def wake_after_failure(engine: RolloutEngine) -> None:
    """Wake servers that a failed run leaves asleep, and say what they lack; on rank 0."""
    if not isinstance(engine, ServerEngine) or not engine.published.asleep or dist.get_rank():
        return
    for server in engine.servers:
        try:
            for tag in _TAGS:
                asyncio.run(send(_WAKE[tag], server))
        except EngineError as error:
            _log.warning("%s; it sleeps since this run failed: start it again", error)
        else:
            _log.warning("%s slept when the run failed: it is awake, without weights until a resumed run", server.url)


async def is_asleep(call: Call, dialect: Dialect) -> bool:
    """Return whether a server sleeps, or is paused; SGLang does not say it."""
    answer = await call("/is_sleeping") if dialect == "vllm" else None
    return isinstance(answer, dict) and answer.get("is_sleeping") is True


def on_servers(engine: ServerEngine, requests: Requests) -> None:
    """Send the same requests to all servers, from rank 0; collective."""
    if dist.get_rank() == 0:
        asyncio.run(on_every_server(engine.servers, partial(send, requests), retry_seconds=engine.retry_seconds))
    wait_for_ranks()


async def send(requests: Requests, server: ServerClient) -> None:
    """Send a server the requests of its dialect, one after the other; raises EngineError."""
    async with server.connections(1) as connection:
        for path, body in requests[server.dialect]:
            try:
                await server.call(connection, path, body)
            except EngineError as error:
                if refused_with(error) != 200:  # SGLang's answers here are no JSON
                    raise
