"""Rollout engines of a run: the embedded one or a client of a server, and how each gets new weights."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from relibra.rl.config.settings import RolloutSettings
from relibra.rl.model.policy import Policy
from relibra.rl.model.tokenizer import Tokenizer
from relibra.rl.rollout.embedded import EmbeddedEngine
from relibra.rl.rollout.response import RolloutEngine
from relibra.rl.rollout.server import ServedRoutes, ServerEngine, publish_weights
from relibra.rl.run.ranks import wait_for_ranks


def make_engine(
    rollout: RolloutSettings, policy: Policy, tokenizer: Tokenizer, *, seed: int, shortest: int, replays_rollout: bool
) -> RolloutEngine:
    """Return this rank's engine: an embedded one, or a client of the server that all ranks share.

    shortest          tokens that a response begun in the middle of a step needs time for
    replays_rollout   training replays the routes of the rollout (R3), so a server has to report them
    """
    if rollout.engine == "embedded":
        return EmbeddedEngine(
            model=policy.copy,
            pad_id=tokenizer.pad_id,
            stop_ids=tokenizer.stop_ids,
            temperature=rollout.temperature,
            seed=seed,
            max_batch=rollout.max_batch,
            record=bool(policy.layer_ids),
            shortest=shortest,
        )
    text_config = policy.copy.config.get_text_config()  # type: ignore[operator, union-attr]
    routes = None
    if policy.num_experts and replays_rollout:
        routes = ServedRoutes(
            num_experts=policy.num_experts,
            layer_ids=policy.layer_ids,
            num_layers=int(text_config.num_hidden_layers),
            top_k=policy.top_k,
        )
    return ServerEngine(
        url=rollout.url,
        dialect=rollout.engine,
        routes=routes,
        stop_ids=tokenizer.stop_ids,
        vocab_size=int(text_config.vocab_size),
        temperature=rollout.temperature,
        seed=seed,
        max_batch=rollout.max_batch,
        timeout_seconds=rollout.timeout_seconds,
    )


def sync_weights(engine: RolloutEngine, policy: Policy, server_weights: Path | None, weight_version: int) -> None:
    """Copy the trained weights to the full copies, and to the server if there is one; collective.

    server_weights   folder that the server reads them from (`rollout.server_weights`)
    raises    EngineError where the server does not load them
    """
    policy.sync()
    if isinstance(engine, ServerEngine):
        assert server_weights is not None, "RolloutSettings asks for a folder that the server sees"
        if dist.get_rank() == 0:
            publish_weights(policy.copy, server_weights, engine, weight_version)
        wait_for_ranks()  # no rank uses the server before it has the weights
