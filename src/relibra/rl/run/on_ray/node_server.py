"""A rollout server of a run on a node: what a Ray actor does there. Imports neither ray nor torch."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

from relibra.environment import SERVER_KEY, keep_hub_offline, worker_environment
from relibra.errors import EngineError
from relibra.rl.config.model_folder import names_hub
from relibra.rl.config.run_config import RunConfig
from relibra.rl.rollout.started.commands import (
    model_to_serve,
    resources_of_server,
    serve_command,
    threads_per_worker,
    vllm_command,
)
from relibra.rl.rollout.started.guard import ENDING_SECONDS
from relibra.rl.rollout.started.server_process import STOPPING_SECONDS, ServerProcess
from relibra.rl.run.on_ray.node_ranks import enter_folder
from relibra.rl.run.rank_processes import signal_name

LAST_LINES = 2
"""Lines of its log that are shown of a server that ended later."""
GUARD = "relibra.rl.rollout.started.guard"


class NodeServer:
    """Starts a rollout server, and ends it with itself.

    Ray runs its methods in several threads: `ended` waits while `end` is called.
    """

    def __init__(self) -> None:
        """Start nothing yet."""
        self._process: ServerProcess | None = None

    def prepare(self, folder: str, run: str, version: str) -> str:
        """Enter the folder of the driver; return why this node cannot serve, or nothing."""
        return enter_folder(folder, run, version)

    def start(self, config_json: str, run: str, *, number: int, host: str, key: str, offline: bool) -> None:
        """Start the server from the model of the run; weights follow when the run begins.

        number    of the server
        host      address of this node, at which it listens
        key       that it will ask for
        offline   use downloaded models only
        """
        if offline:
            keep_hub_offline()
        config, folder = RunConfig.model_validate_json(config_json), Path(run) / "server"
        folder.mkdir(exist_ok=True)
        model, log = _start_model(config, folder / f"start-{number}"), folder / f"log-{number}"
        if config.rollout.engine == "serve":
            threads = threads_per_worker(config.rollout)
            command = serve_command(config, model, host=host, has_key=True, threads=threads)
            self._process = ServerProcess(command, worker_environment(threads, **{SERVER_KEY: key}), log)
            return
        port = _free_port(host)
        command = [sys.executable, "-m", GUARD, *vllm_command(config, model, host=host, port=port)]
        threads = resources_of_server(config.rollout, gpus=False)["CPU"]
        switches = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_API_KEY": key}
        self._process = ServerProcess(
            command,
            worker_environment(threads, **switches),
            log,
            url=f"http://{f'[{host}]' if ':' in host else host}:{port}",
            stopping_seconds=STOPPING_SECONDS + ENDING_SECONDS,
        )

    def address(self, seconds: float) -> tuple[str, str]:
        """Return the address when the server takes requests, or empty text; and why it will not, if it ended."""
        assert self._process is not None, "`start` comes first"
        try:
            return self._process.wait_for_address(seconds) or "", ""
        except EngineError as error:
            return "", str(error)

    def ended(self, seconds: float) -> str:
        """Return how the server ended, and the end of its log; empty: it runs, after so many seconds."""
        assert self._process is not None, "`start` comes first"
        code = self._process.wait_for_end(seconds)
        if code is None:
            return ""
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        return f"{how} ({self._process.end_of_log(LAST_LINES)}; log: {self._process.log})"

    def end(self) -> None:
        """Stop the server."""
        if self._process is not None:
            self._process.stop()


def _start_model(config: RunConfig, folder: Path) -> str:
    """Return what the server starts from: a folder, or for vLLM a name of the hub.

    folder   in which the built-in model is written; one of an earlier start holds the same
    """
    if not config.model.path:
        if not (folder / "config.json").is_file():
            from relibra.rl.start_folder import write_start_folder

            write_start_folder(config, folder)
        return str(folder.absolute())
    if found := model_to_serve(config):
        return str(found)
    if config.rollout.engine == "vllm":
        return config.model.source
    from huggingface_hub import snapshot_download

    return str(snapshot_download(config.model.source, local_files_only=not names_hub(config.model.path)))


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        return int(listener.getsockname()[1])
