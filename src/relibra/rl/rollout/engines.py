"""Who samples: the engine inside this process, or a server, and how either gets new weights."""

from __future__ import annotations

import torch.distributed as dist

from relibra.rl.config.run_config import RunConfig
from relibra.rl.model.policy import Policy
from relibra.rl.model.tokenizer import Tokenizer
from relibra.rl.rollout.embedded import EmbeddedEngine
from relibra.rl.rollout.response import RolloutEngine
from relibra.rl.rollout.server import ServedRoutes, ServerEngine, publish_weights


def make_engine(config: RunConfig, policy: Policy, tokenizer: Tokenizer) -> RolloutEngine:
    """Return the engine that the settings ask for; one per rank, or a client of the one server on each."""
    rollout = config.rollout
    if rollout.engine == "embedded":
        return EmbeddedEngine(
            model=policy.copy,
            pad_id=tokenizer.pad_id,
            stop_ids=tokenizer.stop_ids,
            temperature=rollout.temperature,
            seed=config.run.seed,
            max_batch=rollout.max_batch,
            record=bool(policy.layer_ids),
            shortest=config.algorithm.tail_drop + 1,  # of less the policy would train on nothing
        )
    routes = None
    if policy.num_experts and config.algorithm.replay == "R3":
        text_config = policy.copy.config.get_text_config()  # type: ignore[operator, union-attr]
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
        temperature=rollout.temperature,
        seed=config.run.seed,
        max_batch=rollout.max_batch,
    )


def sync_weights(engine: RolloutEngine, policy: Policy, config: RunConfig, weight_version: int) -> None:
    """Bring the trained weights to the full copies, and to the server if there is one; collective.

    raises    EngineError where the server does not load them
    """
    policy.sync()
    folder = config.rollout.server_weights
    if isinstance(engine, ServerEngine):
        assert folder is not None, "RolloutSettings asks for a folder that the server sees"
        if dist.get_rank() == 0:
            publish_weights(policy.copy, folder, engine, weight_version)
        dist.barrier()  # nobody asks the server before it has the weights
