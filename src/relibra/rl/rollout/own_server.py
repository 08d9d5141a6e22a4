"""The rollout server that a run starts itself (`rollout.engine=serve`): its command, its start by rank 0, its end."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch.distributed as dist

from relibra.environment import launched_rank, worker_environment
from relibra.errors import ConfigError, EngineError
from relibra.rl.config.rollout_settings import RolloutSettings
from relibra.rl.config.run_config import RunConfig
from relibra.rl.model.policy import Policy
from relibra.rl.model.tokenizer import Tokenizer
from relibra.rl.rollout.served.weights import write_version
from relibra.rl.run.ranks import broadcast_json

LEAST_CACHE = 1 << 16
"""Tokens of the KV cache of each attention worker, unless responses are long."""
POLL_SECONDS = 0.2
STOPPING_SECONDS = 15.0
"""How long a server may take to end, before it is killed."""
LAST_LINES = 15
"""Lines of its log that say why a server did not start."""
ERROR = "error: "
"""How the sentence of an error of `relibra` begins."""
_ADDRESS = re.compile(r"at (http://[^\s/]+:\d+)/v1 ")


@contextmanager
def own_server(config: RunConfig, run: Path, policy: Policy, tokenizer: Tokenizer) -> Iterator[RolloutSettings]:
    """Yield the settings of the rollout, with the address of the server that rank 0 starts; collective.

    The server ends with the block.

    run         its folder `server` holds the log of the server, and the weights on their way there
    policy      which the server starts from
    tokenizer   of the policy: its end tokens stop a response, not those of the usual tokenizer of the architecture
    raises      ConfigError on several machines, or where weights cannot be written; EngineError with the end of its log
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
    start = write_version(policy, run / "server" / "start", 0, setting="run.folder")
    if dist.get_rank() == 0:
        try:
            tokenizer.save(start)
            words = serve_command(config.model_copy(update={"rollout": rollout.model_copy(update=weights)}), str(start))
            server = ServerProcess(words, worker_environment(1), run / "server" / "log")
            outcome = {"url": server.wait_for_address(rollout.start_seconds)}
        except (EngineError, OSError) as error:  # else other ranks would wait
            outcome = {"error": str(error)}
    try:
        outcome = broadcast_json(outcome)
        if "error" in outcome:
            raise EngineError(outcome["error"])
        yield rollout.model_copy(update={**weights, "url": (outcome["url"],)})
    finally:
        if server is not None:
            server.stop()


def serve_command(config: RunConfig, model: str) -> list[str]:
    """Return the words that start `relibra serve` from a folder, at a free port; it ends with its standard input."""
    rollout = config.rollout
    longest = rollout.max_prompt + rollout.max_response
    words = [sys.executable, "-m", "relibra", "serve", model, "--port", "0", "--name", "policy", "--until-eof"]
    words += ["--updates", str(rollout.server_weights or Path(model).parent / "weights")]
    dtype = "float32" if config.lora.rank else config.model.dtype  # adapters are merged
    words += ["--dtype", dtype, "--max-length", str(longest)]
    words += ["--kv-tokens", str(max(LEAST_CACHE, 8 * longest)), "--threads", "0"]
    words += ["--max-batch", str(rollout.max_batch), "--max-waiting", str(1 << 20)]
    words += ["--deadline", str(rollout.timeout_seconds * max(1.0, longest / 1024))]
    return words + shlex.split(rollout.server_options)


class ServerProcess:
    """A server that ends when its standard input ends: with this process, which alone holds the other end."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """Start it; log receives what it prints, after what an earlier one printed."""
        self.log = log
        with log.open("ab") as output:
            self._printed = output.tell()
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=dict(environment),
                start_new_session=True,
            )

    def wait_for_address(self, seconds: float) -> str:
        """Return the server's address once it takes requests.

        raises   EngineError, with the end of what it printed, if it ended, or takes none within so many seconds
        """
        deadline = time.monotonic() + seconds
        while True:
            if self._process.poll() is not None:
                raise EngineError(f"the rollout server ended; {self._end_of_log()}")
            if found := _ADDRESS.search(self._log_text()):
                return found.group(1)
            if time.monotonic() >= deadline:
                late = f"the rollout server did not start within {seconds:g} s (rollout.start_seconds)"
                raise EngineError(f"{late}; {self._end_of_log()}")
            time.sleep(POLL_SECONDS)

    def wait_for_end(self, seconds: float) -> int | None:
        """Return the exit code of the server; None: it did not end within so many seconds."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def _end_of_log(self) -> str:
        """Return why the server ended: its last sentence of an error, else its last lines joined in one.

        The path of the log is not named: the folder of a run without a step is removed, with the log.
        """
        printed = [line.strip() for line in self._log_text().splitlines() if line.strip()]
        sentence = next((line for line in reversed(printed) if line.startswith(ERROR)), None)
        return f"it printed last: {sentence.removeprefix(ERROR) if sentence else ' | '.join(printed[-LAST_LINES:])}"

    def stop(self) -> None:
        """End the server: its standard input ends; it is killed if it goes on after that."""
        assert self._process.stdin is not None, "it was started with a pipe"
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        if self.wait_for_end(STOPPING_SECONDS) is None:
            self._process.kill()
            self._process.wait()

    def _log_text(self) -> str:
        with self.log.open("rb") as file:
            file.seek(self._printed)
            return file.read().decode(errors="replace")
