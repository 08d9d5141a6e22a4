"""Rollout engines of a run: the embedded one or a client of servers, and how each gets new weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace

import torch.distributed as dist

from relibra.rl.config.rollout_settings import RolloutSettings
from relibra.rl.model.policy import Policy
from relibra.rl.model.tokenizer import Tokenizer
from relibra.rl.rollout.embedded import EmbeddedEngine
from relibra.rl.rollout.response import RolloutEngine
from relibra.rl.rollout.served.api_key import read_api_key
from relibra.rl.rollout.served.canary_probe import Canary, CanaryReport, WatchedServer
from relibra.rl.rollout.served.client import ServedRoutes, ServerClient
from relibra.rl.rollout.served.engine import ServerEngine
from relibra.rl.rollout.served.preflight import check_servers
from relibra.rl.rollout.served.trained_scores import TrainedScorer
from relibra.rl.rollout.served.weights import publish_weights, write_version
from relibra.rl.run.ranks import broadcast_json, wait_for_ranks


def make_engine(
    rollout: RolloutSettings, policy: Policy, tokenizer: Tokenizer, *, seed: int, shortest: int, replays_rollout: bool
) -> RolloutEngine:
    """Return this rank's engine: an embedded one, or a client of the servers that all ranks share.

    shortest          tokens that a response begun in the middle of a step needs time for
    replays_rollout   training replays the routes of the rollout (R3), so a server has to report them
    """
    if rollout.engine == "embedded":
        assert policy.copy is not None, "the ranks sample"
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
    text_config = policy.meta.config.get_text_config()
    routes = None
    if policy.num_experts and replays_rollout:
        routes = ServedRoutes(
            num_experts=policy.num_experts,
            layer_ids=policy.layer_ids,
            num_layers=int(text_config.num_hidden_layers),
            top_k=policy.top_k,
        )
    first = ServerClient(
        url=rollout.url[0],
        dialect="sglang" if rollout.engine == "sglang" else "vllm",  # which relibra serve speaks, too
        routes=routes,
        stop_ids=tokenizer.stop_ids,
        vocab_size=int(text_config.vocab_size),
        temperature=rollout.temperature,
        timeout_seconds=rollout.timeout_seconds,
        key=read_api_key(rollout.api_key_from),
    )
    return ServerEngine(
        servers=tuple(replace(first, url=url) for url in rollout.url),  # they share `published`
        seed=seed,
        max_batch=rollout.max_batch,
        retry_seconds=0.0 if rollout.engine == "serve" else rollout.start_seconds,  # nobody else starts it again
        weights=rollout.server_weights,
    )


def check_engine(
    engine: RolloutEngine,
    rollout: RolloutSettings,
    *,
    longest: int,
    dtype: str,
    encode_prompt: Callable[[int], list[int]],
) -> Canary | None:
    """Wait for the servers of a run and check them; return the canary of their updates, on rank 0.

    Collective.

    longest         tokens of the longest prompt and response together
    dtype           of the trainer's forward passes
    encode_prompt   from number to tokens of a prompt of the task
    raises          EngineError where a server does not fit the run
    """
    if not isinstance(engine, ServerEngine):
        return None
    canary = None
    if dist.get_rank() == 0:
        served = check_servers(engine.servers, start_seconds=rollout.start_seconds, longest=longest, dtype=dtype)
        canary = Canary(
            [
                WatchedServer(client, exact=one.dtype == dtype == "float32")
                for client, one in zip(engine.servers, served, strict=True)
            ],
            encode_prompt,
            context=min(one.context or longest for one in served),
            retry_seconds=engine.retry_seconds,
        )
    wait_for_ranks()  # servers may take minutes to start
    return canary


def sync_weights(
    engine: RolloutEngine, policy: Policy, weight_version: int, canary: Canary | None
) -> CanaryReport | None:
    """Copy the trained weights to the servers, or to the full copies that the ranks sample from; collective.

    canary    on rank 0: compares the servers with the policy afterwards
    returns   what the canary saw, on all ranks; None: there is none
    raises    EngineError where a server does not load them, or does not compute with them
    """
    if not isinstance(engine, ServerEngine):
        policy.sync()
        return None
    assert engine.weights is not None, "RolloutSettings asks for a folder that the server sees"
    watched = broadcast_json(canary is not None)
    written = write_version(policy, engine.weights, weight_version, setting="rollout.server_weights")
    scorer, report = TrainedScorer(policy.trained, engine.servers[0]), None
    if dist.get_rank() == 0:
        if canary is not None:
            canary.before_update()
        publish_weights(written, engine, weight_version)
        report = canary and canary.after_update(scorer, weight_version)
    elif watched:
        scorer([])
    wait_for_ranks()  # without a deadline; no rank asks a server before it has the weights
    found = broadcast_json(report and asdict(report))
    engine.published.version, engine.published.folder = weight_version, written
    return found and CanaryReport(**found)
