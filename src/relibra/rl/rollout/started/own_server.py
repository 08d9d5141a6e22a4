"""The rollout server that a run starts itself (`rollout.engine=serve`): its command, its start by rank 0, its end."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from relibra.environment import launched_rank, worker_environment
from relibra.errors import ConfigError, EngineError
from relibra.rl.config.rollout_settings import RolloutSettings
from relibra.rl.config.run_config import RunConfig
from relibra.rl.model.tokenizer import Tokenizer
from relibra.rl.rollout.served.weights import write_version
from relibra.rl.rollout.started.server_process import ServerProcess
from relibra.rl.run.ranks import broadcast_json

LEAST_CACHE = 1 << 16
"""Tokens of the KV cache of each attention worker, unless responses are long."""


@contextmanager
def own_server(config: RunConfig, run: Path, model: Any, tokenizer: Tokenizer) -> Iterator[RolloutSettings]:
    """Yield the settings of the rollout, with the address of the server that rank 0 starts; collective.

    The server ends with the block.

    run         its folder `server` holds the log of the server, and the weights on their way there
    model       full copy of the policy, which the server starts from
    tokenizer   of the policy: the server stops at its tokens, not at those of a tokenizer that suits the architecture
    raises      ConfigError for wrong options; EngineError, with the end of what it printed, where it does not start
    """
    rollout = config.rollout
    weights = {"server_weights": rollout.server_weights or run / "server" / "weights"}
    if rollout.engine != "serve":
        yield rollout
        return
    launched = launched_rank()
    if launched is not None and launched.num_local_ranks < launched.num_ranks:
        raise ConfigError(
            "rollout.engine=serve starts a server on the machine of the first rank, and this run has several: start "
            "relibra serve --updates where all ranks reach it, and set rollout.engine=vllm and rollout.url"
        )
    server, outcome = None, None
    if dist.get_rank() == 0:
        try:
            server = _start(config, run / "server", model, tokenizer)
            url = server.wait_for_address(rollout.start_seconds)
            late = f"the rollout server did not start within {rollout.start_seconds:g} s (rollout.start_seconds)"
            outcome = {"url": url} if url else {"error": f"{late}; {server.end_of_log()}"}
        except EngineError as error:
            outcome = {"error": str(error)}
    try:
        outcome = broadcast_json(outcome)
        if "error" in outcome:
            raise EngineError(outcome["error"])
        yield rollout.model_copy(update={**weights, "url": (outcome["url"],)})
    finally:
        if server is not None:
            server.stop()


def _start(config: RunConfig, folder: Path, model: Any, tokenizer: Tokenizer) -> ServerProcess:
    folder.mkdir(exist_ok=True)
    start = write_version(model, folder / "start", "the server of the run", 0)
    tokenizer.save(start)
    return ServerProcess(serve_command(config, str(start)), worker_environment(1), folder / "log")


def serve_command(config: RunConfig, model: str) -> list[str]:
    """Return the words that start `relibra serve` at a free port; it ends with its standard input.

    model   folder that it starts from
    """
    rollout = config.rollout
    longest = rollout.max_prompt + rollout.max_response
    words = [sys.executable, "-m", "relibra", "serve", model, "--port", "0", "--name", "policy", "--updates"]
    words += ["--until-eof", "--dtype", config.model.dtype, "--max-length", str(longest)]
    words += ["--kv-tokens", str(max(LEAST_CACHE, 8 * longest)), "--threads", "0"]
    words += ["--max-batch", str(rollout.max_batch), "--max-waiting", str(1 << 20)]
    words += ["--deadline", str(rollout.timeout_seconds * max(1.0, longest / 1024))]
    return words + shlex.split(rollout.server_options)
