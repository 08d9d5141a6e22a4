"""Cutting the answers under way at an update of the weights (`rollout.ahead`): hold, pause, load, resume."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

from relibra.errors import EngineError
from relibra.rl.rollout.served.engine import ServerEngine
from relibra.rl.rollout.served.sleep import Requests, on_servers, send
from relibra.rl.run.ranks import wait_for_ranks

PAUSE: Requests = {"vllm": [("/pause?mode=abort", {})], "sglang": [("/pause_generation", {"mode": "abort"})]}
"""Servers end all answers, with what they have of each, and begin none."""
RESUME: Requests = {"vllm": [("/resume", {})], "sglang": [("/continue_generation", {})]}


@contextmanager
def answers_cut(engine: ServerEngine) -> Iterator[None]:
    """Cut the answers under way before the block, which updates the weights, and resume servers after it; collective.

    Samplers stay held: `Sampler.release` lets them ask for the rest. Without one nothing happens.

    raises    EngineError where a server cannot be paused
    """
    if engine.sampler is None:
        yield
        return
    engine.sampler.hold()
    wait_for_ranks()  # a request that comes later than the pause would wait at the server
    on_servers(engine, PAUSE)
    engine.sampler.drain()
    wait_for_ranks()
    try:
        yield
    except BaseException:
        for server in engine.servers if dist.get_rank() == 0 else ():
            with suppress(EngineError):
                asyncio.run(send(RESUME, server))
        raise
    on_servers(engine, RESUME)
