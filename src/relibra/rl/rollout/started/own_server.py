"""The rollout servers that a run starts itself (`rollout.engine=serve`; on Ray vllm, too), as its ranks see them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from relibra.environment import SERVER_KEY, launched_rank, started_server_urls, worker_environment
from relibra.errors import ConfigError, EngineError
from relibra.rl.config.rollout_settings import RolloutSettings
from relibra.rl.config.run_config import RunConfig
from relibra.rl.model.tokenizer import Tokenizer
from relibra.rl.rollout.served.weights import write_version
from relibra.rl.rollout.started.commands import serve_command
from relibra.rl.rollout.started.server_process import ServerProcess
from relibra.rl.run.ranks import broadcast_json


@contextmanager
def own_server(config: RunConfig, run: Path, model: Any, tokenizer: Tokenizer) -> Iterator[RolloutSettings]:
    """Yield the settings of the rollout, with the addresses of servers that the run starts itself; collective.

    On Ray they run already (`rl/run/on_ray`). Else rank 0 starts one, which ends with the block.

    run         its folder `server` holds the log of the server, and the weights on their way there
    model       full copy of the policy, which the server starts from
    tokenizer   of the policy: the server stops at its tokens, not at those of a tokenizer that suits the architecture
    raises      ConfigError for wrong options; EngineError, with the end of what it printed, where it does not start
    """
    rollout = config.rollout
    weights = {"server_weights": rollout.server_weights or run / "server" / "weights"}
    if urls := started_server_urls():
        yield rollout.model_copy(update={**weights, "url": urls, "api_key_from": f"env:{SERVER_KEY}"})
        return
    if rollout.engine != "serve":
        yield rollout
        return
    launched = launched_rank()
    if launched is not None and launched.num_local_ranks < launched.num_ranks:
        raise ConfigError(
            "rollout.engine=serve starts a server on the machine of the first rank, and this run has several: start "
            "relibra serve --updates where all ranks reach it, and set rollout.engine=vllm and rollout.url; or place "
            "the run on Ray (parallel.launcher=ray)"
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
        found = {**weights, "url": (outcome["url"],)}
        yield rollout.model_copy(update={**found, "retry_seconds": 0.0})  # nobody else starts it again
    finally:
        if server is not None:
            server.stop()


def _start(config: RunConfig, folder: Path, model: Any, tokenizer: Tokenizer) -> ServerProcess:
    folder.mkdir(exist_ok=True)
    start = write_version(model, folder / "start", "the server of the run", 0)
    tokenizer.save(start)
    return ServerProcess(serve_command(config, str(start)), worker_environment(1), folder / "log")
