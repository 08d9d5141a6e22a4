"""What is asked of a server before a run begins: does it answer, was it started as the run needs it."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx

from relibra.errors import EngineError
from relibra.rl.rollout.served.client import ServerClient
from relibra.rl.rollout.served.dialects import Dialect
from relibra.rl.rollout.served.loading import shown
from relibra.rl.rollout.served.pool import on_every_server
from relibra.rl.rollout.served.requests import ServerLost, refused_with
from relibra.rl.rollout.served.sleep import RESUME, is_asleep, send

_log = logging.getLogger(__name__)

_PROBE_TOKENS = 8
_INFO: dict[Dialect, str] = {"sglang": "/server_info", "vllm": "/server_info?config_format=json"}
_SGLANG_RESERVE = 6
"""Tokens of its context, and of its cache, that SGLang keeps free of prompts."""


@dataclass(frozen=True)
class ServedModel:
    """What a server says of its model: most tokens of a request (0: unknown), and dtype ("float32"; empty: unknown)."""

    context: int = 0
    dtype: str = ""

    @property
    def takes_adapters(self) -> bool:
        """Return whether adapters are sent to it as they are; a server that computes in float32 gets them merged."""
        return self.dtype != "float32"


def check_servers(
    servers: Sequence[ServerClient], *, start_seconds: float, longest: int, dtype: str, rank: int = 0
) -> list[ServedModel]:
    """Wait until all servers have started, then check how each was started, and send it one request.

    start_seconds   to wait for servers that do not answer yet
    longest         tokens of the longest prompt and response together
    dtype           "float32" or "bfloat16": that of the trainer's forward passes
    rank            of adapters (lora.rank); 0: there are none
    raises          EngineError naming each flag that is missing
    """

    async def check(server: ServerClient) -> ServedModel:
        [found] = await on_every_server(
            [server], lambda one: _check(one, longest, dtype, rank), retry_seconds=start_seconds
        )
        assert not isinstance(found, ServerLost), "while the only server is lost, the work is repeated"
        return found

    async def check_all() -> list[ServedModel]:
        return await asyncio.gather(*map(check, servers))

    return asyncio.run(check_all())


async def _check(server: ServerClient, longest: int, dtype: str, rank: int) -> ServedModel:
    async with server.connections(1) as client:
        await server.bring_up(client)
        config = await _read_config(server, client)
        served, wants_routes = read_model(server.dialect, config), server.routes is not None
        needed = list(missing_flags(server.dialect, config, longest=longest, wants_routes=wants_routes))
        if rank and served.takes_adapters and (_find(config, "max_lora_rank") or 0) < rank:
            needed.append(
                f"add --enable-lora --max-lora-rank {max(16, rank)} (lora.rank), or --dtype float32: adapters merged "
                "into narrower weights lose small changes"
            )
        needed += missing_for_weights(server.dialect, config, server.transfer, sleeps=server.sleeps)
        if needed:
            raise EngineError(f"{server.url} was not started as this run needs it: {'; '.join(needed)}")
        if server.sleeps and await is_asleep(partial(server.call, client), server.dialect):
            raise EngineError(
                f"{server.url} sleeps or is paused, perhaps since a run on it was killed: start it again, or send it "
                "POST /wake_up and POST /resume where nothing else uses it"
            )
        if server.pauses:
            await send(RESUME, server)  # a run that was killed may have left it paused
        await _probe(server, client)
    if served.dtype not in ("", dtype):
        _log.warning(
            "%s %s and training in %s (model.dtype), so that log-probs and some routes differ "
            "between them: start it with --dtype %s, or ignore this where the difference is meant",
            server.url,
            "chooses the type that it computes in (--dtype auto)"
            if served.dtype == "auto"
            else f"computes in {served.dtype}",
            dtype,
            dtype,
        )
    return served


async def _read_config(server: ServerClient, client: httpx.AsyncClient) -> dict[str, Any]:
    """Return the configuration of a server; raises EngineError where it shows none."""
    path = _INFO[server.dialect]
    try:
        body = await server.call(client, path)
        config = body if server.dialect == "sglang" else body["vllm_config"]
        if not isinstance(config, dict):
            raise TypeError(f"it is {type(config).__name__}")
        if server.dialect == "sglang" and "max_total_num_tokens" not in config:
            raise KeyError("max_total_num_tokens")
        if server.dialect == "vllm" and _find(config, "max_model_len") is None:
            listed = await server.call(client, "/v1/models")
            config = {**config, "max_model_len": listed["data"][0]["max_model_len"]}
    except EngineError as error:
        if refused_with(error) == 404:
            raise EngineError(f"{server.url} {_UNKNOWN_PATH[server.dialect]}") from error
        raise
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise EngineError(
            f"{server.url}{path} answered without a configuration of {server.dialect} ({error!r}): check that "
            "rollout.engine names the engine at this address"
        ) from error
    return config


_UNKNOWN_PATH: dict[Dialect, str] = {
    "sglang": "shows no configuration: check that this is an SGLang server itself, recent enough to have "
    "/server_info, and no router in front of one (rollout.engine, rollout.url)",
    "vllm": "was not started as this run needs it: set the environment variable VLLM_SERVER_DEV_MODE=1 for it (weights "
    "cannot be updated without), and let nobody else reach it; if it is set, check that this is a vLLM server "
    "(rollout.engine)",
}


def missing_flags(dialect: Dialect, config: dict[str, Any], *, longest: int, wants_routes: bool) -> Iterator[str]:
    """Yield in words what a server with this /server_info has to be started with, and was not."""
    if wants_routes and _find(config, "enable_return_routed_experts") is not True:
        yield "add --enable-return-routed-experts (training replays the experts of the rollout; algorithm.replay)"
    if dialect == "sglang":
        yield from _missing_of_sglang(config, longest, wants_routes)
    else:
        yield from _missing_of_vllm(config, longest)


_BACKENDS = {"gloo": "relibra", "nccl": "relibra", "ipc": "ipc"}
"""Back ends of vLLM's weight transfer, by rollout.transfer."""


def missing_for_weights(dialect: Dialect, config: dict[str, Any], transfer: str, *, sleeps: bool) -> Iterator[str]:
    """Yield what a server has to be started with to sleep, or to take weights without files, as `missing_flags`."""
    key, flag = "enable_sleep_mode", "--enable-sleep-mode"
    if dialect == "sglang":
        key, flag = "enable_memory_saver", "--enable-memory-saver"
    if sleeps and _find(config, key) is not True:
        yield f"add {flag} (rollout.sleep; builds for CPUs give no memory back: set rollout.sleep=false for them)"
    wanted = _BACKENDS.get(transfer)
    configured = _find(config, "weight_transfer_config", default={"backend": wanted})  # absent: the first request tells
    backend = configured.get("backend") if isinstance(configured, dict) else configured
    if wanted and backend != wanted:
        flag = f"--weight-transfer-config '{json.dumps({'backend': wanted})}'"
        yield f"add {flag} (rollout.transfer {transfer}), got {shown(backend)}"


def _missing_of_vllm(config: dict[str, Any], longest: int) -> Iterator[str]:
    mode = _find(config, "logprobs_mode")
    if mode != "processed_logprobs":
        yield f"add --logprobs-mode processed_logprobs (log-probs at rollout.temperature), got {shown(mode)}"
    context = _find(config, "max_model_len")
    if type(context) is int and context < longest:
        yield (
            f"raise --max-model-len to {longest} (the longest prompt and rollout.max_response together), got {context}"
        )
    if _find(config, "enable_eplb") is True:
        yield "leave out --enable-eplb (vLLM writes updated weights into experts that it has moved: vllm#55228)"


def _missing_of_sglang(config: dict[str, Any], longest: int, wants_routes: bool) -> Iterator[str]:
    most = config.get("max_req_input_len")  # the smaller of context and cache, less _SGLANG_RESERVE
    if type(most) is int and most < longest:
        yield (
            f"raise --context-length to {longest + _SGLANG_RESERVE} (the longest prompt and rollout.max_response "
            f"together, and {_SGLANG_RESERVE} that SGLang keeps free), and give its cache room for as many "
            f"(--mem-fraction-static), got {most} in all"
        )
    if config.get("preferred_sampling_params"):
        yield "leave out --preferred-sampling-params (it changes the distribution that tokens are sampled from)"
    began_as = str(config.get("launch_command") or "")  # not in older releases, whose version is the last update's
    if "--weight-version" in began_as and str(config.get("weight_version")).isdigit():
        yield "leave out --weight-version, or give it no number (a server that is started again is known by it)"
    if wants_routes and config.get("enable_hierarchical_cache") is True:
        yield "leave out --enable-hierarchical-cache (tokens come back from it with routes of others: sglang#26975)"
    if config.get("hicache_storage_backend") is not None:
        yield "leave out --hicache-storage-backend (keys and values of earlier weights stay in it)"


def read_model(dialect: Dialect, config: dict[str, Any]) -> ServedModel:
    """Return what the configuration of a server says about its model."""
    context = _find(config, "max_req_input_len" if dialect == "sglang" else "max_model_len")
    return ServedModel(
        context=context if type(context) is int else 0, dtype=str(_find(config, "dtype") or "").removeprefix("torch.")
    )


def _find(config: dict[str, Any], key: str, default: Any = None) -> Any:
    """Return the first value of a key, here or in a section: its section differs between versions."""
    if key in config:
        return config[key]
    return next((one[key] for one in config.values() if isinstance(one, dict) and key in one), default)


async def _probe(server: ServerClient, client: httpx.AsyncClient) -> None:
    """Ask for one token; raises EngineError where log-probs or routes are missing, or another model answers."""
    tokens = list(range(min(_PROBE_TOKENS, server.vocab_size)))
    answer = await server.ask(client, tokens, limit=1, seed=0)
    server.check_tokens(answer)
    server.check_routes(answer.routes, len(tokens) + len(answer.tokens) - 1)
