"""New weights sent to servers without files (`rollout.transfer` gloo, nccl, ipc), by vLLM's weight-transfer calls.

Per version: one `/start_weight_update`, `/update_weights` for each bucket, one `/finish_weight_update`. No request is
repeated: a start within an update, or a bucket that comes twice, leaves weights mixed.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

import torch.distributed as dist
from torch import Tensor

from relibra.errors import EngineError
from relibra.rl.config.rollout_settings import LOOPBACK
from relibra.rl.rollout.served.client import ServerClient
from relibra.rl.rollout.served.engine import ServerEngine
from relibra.rl.rollout.served.ipc_handles import gather_handles
from relibra.rl.rollout.served.loading import Call, check_version, drop_caches, shown
from relibra.rl.rollout.served.pool import on_every_server
from relibra.rl.rollout.served.requests import ServerLost
from relibra.rl.rollout.served.weight_group import (
    Bucket,
    GroupAddress,
    broadcast_bucket,
    join_group,
    joined_key,
    layout_of,
    whole_layers,
)
from relibra.rl.run.ranks import wait_for_ranks

_POLL_SECONDS = 0.001


class _Link(NamedTuple):
    """A server, a function that sends it a request, and how many workers hold its model, or parts of it."""

    url: str
    call: Call
    workers: int


def send_weights(named: Iterable[tuple[str, Tensor]], engine: ServerEngine, weight_version: int) -> None:
    """Let all servers receive weights, load them, drop their caches, and know the version; collective.

    A server that does not answer the first request is left out, while there is another.

    named     every parameter in full, layer by layer, experts in logical order; on the device that sends
    raises    EngineError naming who waited for whom, or what a server refused
    """
    sends, transfer = dist.get_rank() == 0, engine.servers[0].transfer
    buckets = whole_layers(named, keep=sends or transfer == "ipc")
    if sends:
        asyncio.run(_send(buckets, engine, weight_version))
        return
    for bucket in buckets:
        if transfer == "ipc":
            gather_handles(bucket)
        wait_for_ranks()  # no deadline: rank 0 waits for servers; after it IPC memory may be freed


async def _send(buckets: Iterator[Bucket], engine: ServerEngine, version: int) -> None:
    seconds, transfer = engine.servers[0].timeout_seconds, engine.servers[0].transfer
    found = await on_every_server(engine.servers, _count_workers, retry_seconds=engine.retry_seconds)
    async with AsyncExitStack() as stack:
        links = [
            _Link(one.url, partial(one.call, await stack.enter_async_context(one.connections(1))), workers)
            for one, workers in zip(engine.servers, found, strict=True)
            if not isinstance(workers, ServerLost)
        ]
        group = None
        if transfer == "gloo" or transfer == "nccl":
            group = await _join(links, transfer, seconds)
        else:
            await _tell(links, "/init_weight_transfer_engine", {"init_info": {}})
        await _tell(links, "/start_weight_update", {})
        for bucket in buckets:
            info = asdict(layout_of(bucket))
            if transfer == "ipc":
                info["ipc_handles_pickled"] = gather_handles(bucket)
            await _send_bucket(links, group, bucket, info, seconds)
            wait_for_ranks()
        await _tell(links, "/finish_weight_update", {"weight_version": str(version)})
        for link in links:
            await drop_caches(link.call, link.url)
            await check_version(link.call, "vllm", link.url, version)


async def _count_workers(server: ServerClient) -> int:
    async with server.connections(1) as connection:
        answer = await server.call(connection, "/get_world_size")
    workers = answer.get("world_size") if isinstance(answer, dict) else None
    if type(workers) is not int or not 0 < workers <= 1 << 16:
        raise EngineError(f"{server.url} has {shown(workers)} workers by /get_world_size: is it vLLM 0.29 or later?")
    return workers


def _begin(links: Sequence[_Link], path: str, bodies: Sequence[Mapping[str, Any]]) -> list[asyncio.Task[Any]]:
    return [asyncio.ensure_future(link.call(path, body)) for link, body in zip(links, bodies, strict=True)]


async def _tell(links: Sequence[_Link], path: str, body: Mapping[str, Any]) -> None:
    await asyncio.gather(*_begin(links, path, [body] * len(links)))


async def _send_bucket(
    links: Sequence[_Link], group: Any, bucket: Bucket, info: Mapping[str, Any], seconds: float
) -> None:
    requests = _begin(links, "/update_weights", [{"update_info": info}] * len(links))
    works = [] if group is None else broadcast_bucket(group, bucket)
    what = f"{', '.join(link.url for link in links)} to take {bucket[0][0]} to {bucket[-1][0]}"
    await _wait_until(lambda: all(work.is_completed() for work in works), requests, seconds, lambda: what)
    await asyncio.gather(*requests)  # first: a server that refuses breaks the connection, and says why
    for work in works:
        work.wait()


async def _join(links: Sequence[_Link], transport: Literal["gloo", "nccl"], seconds: float) -> Any:
    """Return a group of this process, rank 0, and the workers of all servers."""
    host = _own_address([link.url for link in links])
    timeout = timedelta(seconds=seconds)
    store = dist.TCPStore(host, 0, None, True, timeout, wait_for_workers=False)  # type: ignore[attr-defined]
    address = GroupAddress(transport, host, store.port, 1 + sum(link.workers for link in links), 1, seconds)
    bodies, keys_of = [], {}
    for link in links:
        bodies.append({"init_info": asdict(address)})
        keys_of[link.url] = [joined_key(address.rank_offset + worker) for worker in range(link.workers)]
        address = replace(address, rank_offset=address.rank_offset + link.workers)
    requests = _begin(links, "/init_weight_transfer_engine", bodies)

    def missing() -> list[str]:
        return [url for url, keys in keys_of.items() if not store.check(keys)]

    place = f"{host}:{store.port}"
    await _wait_until(
        lambda: not missing(), requests, seconds, lambda: f"workers of {', '.join(missing())} to come to {place}"
    )
    group = join_group(store, address, rank=0)
    await asyncio.gather(*requests)
    return group


async def _wait_until(
    done: Callable[[], bool], requests: Sequence[asyncio.Task[Any]], seconds: float, what: Callable[[], str]
) -> None:
    """Wait until something is done; raise the error of a request that fails meanwhile.

    raises    EngineError after so many seconds, which says `what` was waited for
    """
    end = time.monotonic() + seconds
    while not done():
        for request in requests:
            if request.done():
                request.result()
        if time.monotonic() > end:
            raise EngineError(
                f"rank 0 of the trainer waited {seconds:g} s (rollout.timeout_seconds) for {what()}: check that "
                "nothing blocks connections between them, or look at its log"
            )
        await asyncio.sleep(_POLL_SECONDS)


def _own_address(urls: Sequence[str]) -> str:
    """Return the address at which servers reach this machine; no packet is sent."""
    hosts = [urlsplit(url).hostname or "" for url in urls]
    other = next((host for host in hosts if host not in LOOPBACK), "127.0.0.1")
    family, kind, protocol, _, target = socket.getaddrinfo(other, 80, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
