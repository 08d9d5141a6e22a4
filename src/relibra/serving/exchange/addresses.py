"""Addresses of expert workers: a Unix socket for shared memory, or host and port."""

from __future__ import annotations

import socket
from pathlib import Path

from relibra.errors import EngineError

UNIX = "unix:"
BACKLOG = 1024


def listen(address: str) -> tuple[socket.socket, str]:
    """Return a listening socket and the address that others connect to.

    address   unix:PATH, or HOST:PORT, where port 0 lets the system choose
    """
    if address.startswith(UNIX):
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(address.removeprefix(UNIX))
        listener.listen(BACKLOG)
        return listener, address
    host, _, port = address.rpartition(":")
    listener = socket.create_server((host, int(port)), backlog=BACKLOG)
    return listener, f"{host}:{listener.getsockname()[1]}"


def connect(address: str, timeout: float) -> socket.socket:
    """Return a connected socket whose operations take at most `timeout` seconds; raises EngineError."""
    try:
        if address.startswith(UNIX):
            channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            channel.settimeout(timeout)
            channel.connect(address.removeprefix(UNIX))
            return channel
        host, _, port = address.rpartition(":")
        channel = socket.create_connection((host, int(port)), timeout)
    except OSError as error:
        raise EngineError(
            f"no expert worker answers at {address}: {error.strerror or error}; look whether it is running"
        ) from error
    channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return channel


def worker_address(transport: str, folder: Path, name: str) -> str:
    """Return the address at which an expert worker of this machine listens."""
    return f"{UNIX}{folder}/experts-{name}" if transport != "tcp" else "127.0.0.1:0"
