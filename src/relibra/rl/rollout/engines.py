"""Rollout engines of a run: the embedded one or a client of servers, and how each gets new weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.distributed as dist

from relibra.environment import launched_rank
from relibra.errors import EngineError
from relibra.rl.config.rollout_settings import RolloutSettings
from relibra.rl.model.policy import Policy
from relibra.rl.model.sharding import full_parameters
from relibra.rl.model.tokenizer import Tokenizer
from relibra.rl.rollout.embedded import EmbeddedEngine
from relibra.rl.rollout.response import RolloutEngine
from relibra.rl.rollout.served.api_key import read_api_key
from relibra.rl.rollout.served.canary_probe import Canary, CanaryReport, WatchedServer
from relibra.rl.rollout.served.client import ServedRoutes, ServerClient
from relibra.rl.rollout.served.engine import ServerEngine
from relibra.rl.rollout.served.preflight import check_servers
from relibra.rl.rollout.served.sleep import PAUSE, PAUSE_KEEPING, RESUME, on_servers, wake
from relibra.rl.rollout.served.trained_scores import TrainedScorer
from relibra.rl.rollout.served.transfer import send_weights
from relibra.rl.rollout.served.weights import publish_weights, write_version
from relibra.rl.run.ranks import broadcast_json, wait_for_ranks


def make_engine(
    rollout: RolloutSettings, policy: Policy, tokenizer: Tokenizer, *, seed: int, shortest: int, replays_rollout: bool
) -> RolloutEngine:
    """Return this rank's engine: an embedded one, or a client of the servers that all ranks share.

    shortest          a response begins late in a step only if there is time for this many tokens
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
            keeps=rollout.keeps_cache,
        )
    launched, device = launched_rank(), next(policy.trained.parameters()).device.type
    if rollout.transfer in ("nccl", "ipc") and device != "cuda":
        raise EngineError(
            f"rollout.transfer {rollout.transfer} sends weights from GPUs, and this run computes on {device}: set it "
            "to gloo or folder"
        )
    if rollout.transfer == "ipc" and launched is not None and launched.num_local_ranks < launched.num_ranks:
        raise EngineError("rollout.transfer ipc is for one machine, and this run has several: set it to nccl or folder")
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
        transfer=rollout.transfer,
        sleeps=rollout.sleep,
        pauses=rollout.ahead > 0,
        keeps=rollout.on_update == "keep",
    )
    servers = tuple(replace(first, url=url) for url in rollout.url)  # they share `published`
    # Nobody restarts a server that the run started.
    retry_seconds = 0.0 if rollout.engine == "serve" else rollout.start_seconds
    engine = ServerEngine(
        servers=servers,
        seed=seed,
        max_batch=rollout.max_batch,
        retry_seconds=retry_seconds,
        weights=rollout.server_weights,
        rescores=rollout.mixed_routes == "rescore",
    )
    return replace(engine, sampler=engine.new_sampler()) if rollout.ahead else engine


def check_engine(
    engine: RolloutEngine,
    rollout: RolloutSettings,
    *,
    longest: int,
    dtype: str,
    encode_prompt: Callable[[int], list[int]],
    lora_rank: int = 0,
) -> Canary | None:
    """Wait for the servers of a run and check them; return the canary of their updates, on rank 0; collective.

    longest         tokens of the longest prompt and response together
    dtype           of the trainer's forward passes
    encode_prompt   from number to tokens of a prompt of the task
    lora_rank       of adapters that the policy trains; 0: it has none
    raises          EngineError where a server does not fit the run
    """
    if not isinstance(engine, ServerEngine):
        return None
    canary = None
    if dist.get_rank() == 0:
        adapter_rank = 0 if rollout.engine == "serve" or rollout.transfer != "folder" else lora_rank  # 0: merged
        served = check_servers(
            engine.servers, start_seconds=rollout.start_seconds, longest=longest, dtype=dtype, rank=adapter_rank
        )
        engine.published.as_adapter = adapter_rank > 0 and any(one.takes_adapters for one in served)
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
    engine.published.as_adapter = broadcast_json(engine.published.as_adapter)
    return canary


def sync_weights(
    engine: RolloutEngine, policy: Policy, weight_version: int, canary: Canary | None
) -> CanaryReport | None:
    """Copy the trained weights to the servers, or to the full copies that the ranks sample from; collective.

    Answers under way (`rollout.ahead`) are cut before, or kept (`rollout.on_update`), and go on with the new weights.

    canary    on rank 0: compares the servers with the policy afterwards
    returns   what the canary saw, on all ranks; None: there is none
    raises    EngineError where a server does not load them, or does not compute with them
    """
    if not isinstance(engine, ServerEngine):
        policy.sync()
        return None
    release = (lambda: None) if engine.sampler is None else engine.sampler.release
    scorer, report = TrainedScorer(policy.trained, engine.servers[0], begins=release), None
    watched = broadcast_json(canary is not None)
    is_first, slept = engine.published.version is None, engine.published.asleep
    written = _write_weights(engine, policy, weight_version)
    keeps = engine.servers[0].keeps
    if not keeps:
        _pause_answers(engine)
    if canary is not None and not slept:
        canary.before_update()  # after a cut: before, it would wait in queues; and before a pause that keeps answers
    if keeps:
        _pause_answers(engine)
    wait_for_ranks()  # it has no deadline, here and below: rank 0 may wait long for answers of servers
    if slept:
        wake(engine, "weights")
    _load_into_servers(engine, policy, weight_version, written)
    if slept:
        wake(engine, "kv_cache")
    if keeps:
        on_servers(engine, RESUME)
    if canary is not None:
        report = canary.after_update(scorer, weight_version)
    elif watched:
        scorer([])
    wait_for_ranks()  # no rank asks a server before it has the weights
    if is_first and engine.servers[0].transfer != "folder":
        # Weights are sent again and scores must stay: a back end may load wrong ones without an error.
        before = None if canary is None else canary.exact_scores()
        wait_for_ranks()
        _load_into_servers(engine, policy, weight_version, None)
        if canary is not None and before is not None:
            canary.check_unmoved(before)
        wait_for_ranks()
    release()
    found = broadcast_json(report and asdict(report))
    return found and CanaryReport(**found)


def _pause_answers(engine: ServerEngine) -> None:
    """End the answers under way (`rollout.ahead`) and take in what they hold, or let servers keep them; collective.

    Samplers stay held, so servers get nothing new until `Sampler.release`; what they keep waits for `RESUME`. Raises
    EngineError.
    """
    if engine.sampler is None:
        return
    engine.sampler.hold()
    if engine.servers[0].keeps:
        engine.sampler.drain()
        wait_for_ranks()
        on_servers(engine, PAUSE_KEEPING)
        return
    wait_for_ranks()  # a request that comes later than the pause would wait at the server
    on_servers(engine, PAUSE)
    engine.sampler.drain()
    wait_for_ranks()
    on_servers(engine, RESUME)


def _write_weights(engine: ServerEngine, policy: Policy, weight_version: int) -> Path | None:
    """Write the trained weights where servers, which sample on, read them; None: they are sent instead. Collective."""
    if engine.servers[0].transfer != "folder":
        return None
    assert engine.weights is not None, "RolloutSettings asks for a folder that the server sees"
    as_adapter = engine.published.as_adapter
    return write_version(
        policy, engine.weights, weight_version, setting="rollout.server_weights", as_adapter=as_adapter
    )


def _load_into_servers(engine: ServerEngine, policy: Policy, weight_version: int, written: Path | None) -> None:
    """Let the servers load the trained weights, from the folder `written`, or sent to them (None); collective."""
    if written is None:
        # With gloo, rank 0 sends from host memory; the other ranks only take part in gathering.
        to_host = engine.servers[0].transfer == "gloo" and dist.get_rank() == 0
        device, named = torch.device("cpu") if to_host else None, full_parameters(policy.trained)
        sent = ((name, full.to(device or full.device, policy.meta.get_parameter(name).dtype)) for name, full in named)
        send_weights(sent, engine, weight_version)
    elif dist.get_rank() == 0:
        publish_weights(written, engine, weight_version)
    wait_for_ranks()
    engine.published.version, engine.published.folder = weight_version, written
