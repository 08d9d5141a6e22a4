"""`serve`: the API server of a model: keys, settings, start and end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import hmac
import ipaddress
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import uvicorn
from fastapi import HTTPException, Request
from pydantic import Field

from relibra.environment import keep_tokenizers_serial
from relibra.errors import ConfigError
from relibra.field_checks import check_fields
from relibra.planning.deployment.expert_placement import ExpertPlacement
from relibra.rl.rollout.served.api_key import is_key, place_of_key, read_key_text
from relibra.routing.trace_files import TraceWriter
from relibra.serving.launch import RunningWorkers
from relibra.serving.layout import WorkerLayout
from relibra.serving.server.admission import Admission
from relibra.serving.server.app import make_app
from relibra.serving.server.connections import BoundedConnection, allow_open_files
from relibra.serving.server.metrics import ServerMetrics
from relibra.serving.server.recording import RouteRecorder
from relibra.serving.server.text import load_codec
from relibra.serving.server.weights import ServedWeights
from relibra.serving.server.workers import WorkerClients
from relibra.serving.worker_timeline import write_timeline


def read_api_keys(source: str) -> tuple[str, ...]:
    """Return the keys of a server; none: it asks for none.

    source   env:NAME of an environment variable, or file:PATH of a file with one key per line; empty: none
    raises   ConfigError where there is no key, or one that no header may hold
    """
    if not source:
        return ()
    text = read_key_text(source, "--api-key-from")
    keys = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not keys or not all(map(is_key, keys)):
        state = "holds something that is no key" if keys else "is not set, or empty"
        raise ConfigError(
            f"--api-key-from {source}: {place_of_key(source)} {state}: it holds one key per line, of printable ASCII "
            "characters without spaces"
        )
    return keys


def key_check(keys: tuple[str, ...]) -> Callable[[Request], None]:
    """Return what raises HTTPException (401) for a request without one of the keys; without keys everybody may ask."""
    digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def check(request: Request) -> None:
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        digest = hashlib.sha256(key.strip().encode("latin-1", "replace")).digest()
        found = [known for known in digests if hmac.compare_digest(known, digest)]
        message = "the key of the header Authorization is none of this server's: ask its operator for one"
        if kind.lower() != "bearer":
            message = "this server asks for a key: send the header Authorization: Bearer KEY"
        if digests and (kind.lower() != "bearer" or not found):
            raise HTTPException(401, message, {"WWW-Authenticate": "Bearer"})

    return check


BACKLOG = 2048
FAREWELL_SECONDS = 0.5
"""How long connections may take to send the ends of their answers when the server stops."""
IDLE_SECONDS = 75
"""How long a connection without requests stays open: longer than clients keep one that they may use again."""


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Where the API server listens, whom it answers, and how much it takes on.

    host          address to listen at
    port          0: any that is free
    name          of the model, as clients call it
    api_key_from  env:NAME or file:PATH of the keys; empty: everybody may ask
    max_waiting   most answers in the queue
    deadline      seconds that a request may take
    updates       folder below which clients may load other weights; None: they may not
    rebalance_seconds   time after which copies of experts are placed anew; 0: never
    until_eof     end when the standard input ends
    record        folder to which the routes of answers are written; None: they are not
    timeline      file to which what the workers did is written in the end; None: nothing is recorded
    """

    host: str
    port: Annotated[int, Field(ge=0, lt=1 << 16)]
    name: str
    api_key_from: str = ""
    max_waiting: Annotated[int, Field(ge=1, le=1 << 20)] = 1024
    deadline: Annotated[float, Field(gt=0, le=1e6)] = 600.0
    updates: Path | None = None
    rebalance_seconds: Annotated[float, Field(ge=0)] = 0.0
    until_eof: bool = False
    record: Path | None = None
    timeline: Path | None = None

    def __post_init__(self) -> None:
        """Raise ConfigError for a value out of range, and for weights that anybody on the network could replace."""
        check_fields(ServerSettings, vars(self), "relibra serve", ConfigError)
        if self.updates is not None and not self.api_key_from and not _is_loopback(self.host):
            raise ConfigError(
                f"--updates at --host {self.host} lets anybody who reaches it load weights: add --api-key-from, or "
                "listen at 127.0.0.1"
            )


class _Server(uvicorn.Server):
    """A server that ends its answers, then its connections, before it waits for anybody."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.config.app.state.admission.stop()  # type: ignore[union-attr]
        asyncio.get_running_loop().call_later(FAREWELL_SECONDS, self._end_connections)
        await super().shutdown(sockets)

    def _end_connections(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()  # the work on its requests ends, too


def serve(
    folder: Path,
    layout: WorkerLayout,
    settings: ServerSettings,
    *,
    placement: ExpertPlacement | None = None,
    dtype: str,
    threads: int,
    print_line: Callable[[str], None],
) -> None:
    """Serve a model until Ctrl-C or SIGTERM.

    placement    experts of each expert worker; None: by number
    print_line   prints a warning, the address once requests are taken, and what was written in the end
    raises       ConfigError for no key or a taken address, TraceError for a taken folder, and as `RunningWorkers` does
    """
    keys = read_api_keys(settings.api_key_from)
    writer = None if settings.record is None else TraceWriter(settings.record)
    keep_tokenizers_serial()
    allow_open_files()
    if settings.until_eof:
        threading.Thread(target=_stop_at_eof, name="standard input", daemon=True).start()
    if not keys and not _is_loopback(settings.host):
        print_line(f"anybody who reaches {settings.host} may use this server: --api-key-from asks for a key")
    listener, metrics = _listen(settings.host, settings.port), ServerMetrics()
    at_worker = layout.max_batch + max(1, layout.max_batch // 4)
    started = RunningWorkers(
        folder, layout, placement=placement, dtype=dtype, threads=threads, timeline=settings.timeline is not None
    )
    with listener, started as model, contextlib.ExitStack() as stack:
        recorder = None if writer is None else RouteRecorder(writer, model.num_experts, model.layer_ids)
        if recorder is not None:
            stack.callback(recorder.close)

        @asynccontextmanager
        async def open_workers() -> AsyncIterator[tuple[Admission, ServedWeights]]:
            clients = await WorkerClients.open(model, settings.rebalance_seconds, recorder)
            admission = Admission(
                clients,
                metrics,
                most_waiting=settings.max_waiting,
                most_open=2 * settings.max_waiting + at_worker * layout.attention,
                at_worker=at_worker,
                deadline=settings.deadline,
            )
            url = f"http://{settings.host}:{listener.getsockname()[1]}"
            cache = f"KV cache of {layout.kv_tokens:,} tokens, {model.most_cache_bytes / 2**20:,.1f} MiB at most, each"
            print_line(
                f"{settings.name} at {url}/v1 ({layout.attention} attention and {layout.experts} expert workers; "
                f"{cache}); Ctrl-C stops"
            )
            try:
                yield admission, ServedWeights(admission, settings.updates)
                if settings.timeline is not None:
                    frames = await clients.timelines()
                    for line in write_timeline(settings.timeline, layout, frames, clients.lost_records):
                        print_line(line)
                await clients.close()
            finally:  # after a second Ctrl-C, too
                model.stop()  # a worker that is just being started again ends too, and the thread that waits for it

        codec, check_key = load_codec(folder), key_check(keys)
        config = uvicorn.Config(
            make_app(open_workers, settings.name, _as_vllm(model), codec, check_key, metrics),
            log_level="error",  # what clients send wrongly are warnings
            access_log=False,
            http=BoundedConnection,
            loop="asyncio",
            ws="none",
            timeout_graceful_shutdown=1,
            timeout_keep_alive=IDLE_SECONDS,
        )
        _Server(config).run(sockets=[listener])


def _as_vllm(model: RunningWorkers) -> dict[str, Any]:
    """Return the configuration of a server as vLLM shows its own."""
    return {
        "model_config": {
            "dtype": model.dtype,
            "max_model_len": model.layout.max_length,
            "enable_return_routed_experts": True,
            "logprobs_mode": "processed_logprobs",
        },
        "parallel_config": {"enable_eplb": False},
    }


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _stop_at_eof() -> None:
    """Stop this process when whoever started it is gone."""
    with contextlib.suppress(OSError):  # it is closed, which is an end too
        # Not through sys.stdin: an interpreter that ends meanwhile cannot lock its buffer, and aborts.
        while os.read(0, 1 << 10):
            pass
    os.kill(os.getpid(), signal.SIGTERM)


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), backlog=BACKLOG)
    except OSError as error:
        taken = error.errno in (errno.EADDRINUSE, errno.EACCES)
        advice = "choose another port" if taken else "name an address of this machine"
        raise ConfigError(f"--host {host} --port {port} cannot be listened at: {error}; {advice}") from error
