"""The connection to a running Ray cluster, its nodes, and its errors in words."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from importlib.util import find_spec
from typing import Any

from relibra.environment import ray_address
from relibra.errors import ConfigError
from relibra.printable import printable

ADDRESS_SECONDS = 10.0
"""Seconds to wait until the cluster takes a connection."""


def check_ray() -> None:
    """Raise ConfigError if ray is not installed."""
    if find_spec("ray") is None:
        raise ConfigError(
            "parallel.launcher=ray needs the package 'ray': in the checkout, on every node, pip install -e '.[ray]'"
        )


@contextmanager
def connected_ray() -> Iterator[None]:
    """Connect to the running Ray cluster; a connection that the program has already stays as it is.

    raises   ConfigError if there is none: no cluster is started, because its ports have no password
    """
    _check_address(ray_address())
    import ray

    if ray.is_initialized():
        yield
        return
    try:
        ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"parallel.launcher=ray finds no running Ray cluster ({last_line(error)}): start one with `ray start "
            "--head`, run relibra on a node of one, or set RAY_ADDRESS"
        ) from error
    try:
        # Ray prints what happens to its workers, with pages of its logs; we say it in a sentence.
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            yield
    finally:
        ray.shutdown()


def _check_address(address: str) -> None:
    """Raise ConfigError if nobody listens at host:port, where Ray itself tries again for minutes."""
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ADDRESS_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"parallel.launcher=ray finds no Ray cluster at {address} (RAY_ADDRESS): {error}; start one with `ray "
            "start --head`, or set the address that it prints"
        ) from error


def alive_nodes() -> list[dict[str, Any]]:
    """Return what Ray says of each node that is there."""
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def last_line(error: Exception) -> str:
    """Return the last line of an error of Ray, which ends a report of many."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return printable(lines[-1]) if lines else type(error).__name__
