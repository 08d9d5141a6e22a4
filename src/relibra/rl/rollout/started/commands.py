"""The command that starts a rollout server of a run, and the CPUs and GPUs that it needs. Pure; imports no torch."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from relibra.environment import SERVER_KEY
from relibra.rl.config.rollout_settings import RolloutSettings
from relibra.rl.config.run_config import RunConfig

LEAST_CACHE = 1 << 16
"""Tokens of the KV cache of each attention worker, unless responses are long."""
_WORKERS = (("--attention",), ("--experts",))
_GPUS = (
    ("--tensor-parallel-size", "-tp"),
    ("--pipeline-parallel-size", "-pp"),
    ("--data-parallel-size", "-dp"),
)


def serve_command(
    config: RunConfig, model: str, *, host: str = "127.0.0.1", has_key: bool = False, threads: int = 0
) -> list[str]:
    """Return the words that start `relibra serve` at a free port; it ends with its standard input.

    model     folder that it starts from
    has_key   it asks for the key in the environment variable SERVER_KEY
    threads   of torch per worker; 0: cores / workers
    """
    rollout, longest = config.rollout, _longest(config)
    words = [sys.executable, "-m", "relibra", "serve", model, "--host", host, "--port", "0", "--name", "policy"]
    words += ["--updates", "--until-eof", "--dtype", config.model.dtype, "--max-length", str(longest)]
    words += ["--kv-tokens", str(max(LEAST_CACHE, 8 * longest)), "--threads", str(threads)]
    words += ["--max-batch", str(rollout.max_batch), "--max-waiting", str(1 << 20)]
    words += ["--deadline", str(rollout.timeout_seconds * max(1.0, longest / 1024))]
    words += ["--api-key-from", f"env:{SERVER_KEY}"] if has_key else []
    return words + shlex.split(rollout.server_options)


def vllm_command(config: RunConfig, model: str, *, host: str, port: int) -> list[str]:
    """Return the words that start vLLM with what training needs of it (docs/guides/servers.md).

    It reads VLLM_API_KEY and VLLM_SERVER_DEV_MODE from its environment, and does not end with its standard input.
    """
    words = [config.rollout.server_python or sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    words += ["--model", model, "--host", host, "--port", str(port), "--dtype", config.model.dtype]
    words += ["--max-model-len", str(_longest(config)), "--logprobs-mode", "processed_logprobs"]
    words += ["--enable-return-routed-experts"] if config.algorithm.replay == "R3" else []
    words += ["--trust-remote-code"] if config.model.trust_remote_code else []
    return words + shlex.split(config.rollout.server_options)


def resources_of_server(rollout: RolloutSettings, *, gpus: bool) -> dict[str, int]:
    """Return what is reserved for a server, by Ray's names.

    gpus     the cluster has some, and the run uses them

    >>> resources_of_server(RolloutSettings(engine="serve", server_options="--experts 3 --threads 2"), gpus=True)
    {'CPU': 8}
    >>> resources_of_server(RolloutSettings(engine="vllm", server_options="-tp 4"), gpus=True)
    {'CPU': 4, 'GPU': 4}
    """
    num_gpus = rollout.server_gpus
    if num_gpus is None:
        num_gpus = num_chips(rollout) if gpus and rollout.engine != "serve" else 0
    if rollout.engine == "serve":
        cpus = num_workers(rollout) * threads_per_worker(rollout)
    else:
        cpus = max(1, num_gpus)
    return {"CPU": rollout.server_cpus or cpus, **({"GPU": num_gpus} if num_gpus else {})}


def threads_per_worker(rollout: RolloutSettings) -> int:
    """Return the threads of each worker of `relibra serve` where it shares its machine with others."""
    words = shlex.split(rollout.server_options)
    return _number(words, ("--threads",), 0) or max(1, rollout.server_cpus // num_workers(rollout))


def num_workers(rollout: RolloutSettings) -> int:
    """Return the workers of `relibra serve`; those of a `--plan` file are not counted."""
    words = shlex.split(rollout.server_options)
    return max(1, sum(_number(words, names, 1) for names in _WORKERS))


def num_chips(rollout: RolloutSettings) -> int:
    """Return the GPUs that the options of vLLM ask for."""
    words, product = shlex.split(rollout.server_options), 1
    for names in _GPUS:
        product *= _number(words, names, 1)
    return product


def _number(words: Sequence[str], names: Sequence[str], default: int) -> int:
    """Return the last value of an option, as in `--experts 2` or `--experts=2`; what is no number is left out."""
    found = default
    for word, following in zip(words, [*words[1:], ""], strict=False):
        name, equals, value = word.partition("=")
        text = value if equals else following
        if name in names and text.isdecimal():
            found = int(text)
    return found


def _longest(config: RunConfig) -> int:
    return config.rollout.max_prompt + config.rollout.max_response


def model_to_serve(config: RunConfig) -> Path | None:
    """Return the folder of `model.path`; None: the built-in model, or a name of the hub."""
    folder = Path(config.model.source) if config.model.path else None
    return folder.absolute() if folder is not None and folder.is_dir() else None
