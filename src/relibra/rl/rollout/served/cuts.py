"""Cutting the answers under way at an update of the weights (`rollout.ahead`): hold, pause, drain, resume."""

from __future__ import annotations

from relibra.rl.rollout.served.engine import ServerEngine
from relibra.rl.rollout.served.sleep import Requests, on_servers
from relibra.rl.run.ranks import wait_for_ranks

PAUSE: Requests = {"vllm": [("/pause?mode=abort", {})], "sglang": [("/pause_generation", {"mode": "abort"})]}
"""Servers end all answers, with what they have of each, and begin none."""
RESUME: Requests = {"vllm": [("/resume", {})], "sglang": [("/continue_generation", {})]}


def cut_answers(engine: ServerEngine) -> None:
    """End the answers under way before an update of the weights, and take in what there is of them; collective.

    Samplers stay held, so servers have nothing to do until `Sampler.release`. Without a sampler nothing happens.

    raises    EngineError where a server cannot be paused
    """
    if engine.sampler is None:
        return
    engine.sampler.hold()
    wait_for_ranks()  # a request that comes later than the pause would wait at the server
    on_servers(engine, PAUSE)
    engine.sampler.drain()
    wait_for_ranks()
    on_servers(engine, RESUME)
