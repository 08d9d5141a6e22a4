"""`serve`: start a layout, answer HTTP until it is stopped, stop the workers."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

from relibra.errors import ConfigError, missing_packages
from relibra.serving.launch import RunningWorkers
from relibra.serving.layout import WorkerLayout

INSTALL = "in the checkout, pip install -e '.[train,serve]'"
BACKLOG = 2048


def serve(
    folder: Path,
    layout: WorkerLayout,
    *,
    host: str,
    port: int,
    name: str,
    dtype: str,
    threads: int,
    rebalance_seconds: float,
    tell: Callable[[str], None],
) -> None:
    """Serve a model until Ctrl-C or SIGTERM.

    tell     is given a line when requests are taken
    raises   ConfigError where the address is taken, and as `RunningWorkers` does
    """
    with missing_packages("relibra serve", INSTALL):
        import uvicorn

        from relibra.serving.server.app import make_app
    listener = _listen(host, port)
    with listener, RunningWorkers(folder, layout, dtype=dtype, threads=threads) as model:
        url = f"http://{host}:{listener.getsockname()[1]}"
        workers = f"{layout.attention} attention and {layout.experts} expert workers"
        app = make_app(
            model, folder, name, lambda: tell(f"{name} at {url}/v1 ({workers}); Ctrl-C stops"), rebalance_seconds
        )
        config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=5)
        uvicorn.Server(config).run(sockets=[listener])


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--host {host} --port {port} cannot be listened at: {error}; choose another port") from error
