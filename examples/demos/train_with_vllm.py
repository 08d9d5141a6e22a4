"""Start a vLLM server from the untrained built-in model, train with it for a few steps, and stop it.

    python -m examples.demos.train_with_vllm VLLM_PYTHON RUN.toml [KEY=VALUE]...

VLLM_PYTHON is the interpreter of the environment that vLLM is installed in (`make demo-vllm` makes one).
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from examples.demos.local_vllm import FLAGS, local_server
from relibra.errors import RelibraError

CONTEXT_TOKENS = 1200
"""Of the server: enough for the built-in tasks."""


def train_with_vllm(vllm_python: Path, run: Path, overrides: Sequence[str]) -> int:
    """Return the exit code of a run whose responses come from a server of its own."""
    relibra = [sys.executable, "-m", "relibra"]
    with tempfile.TemporaryDirectory(prefix="relibra-vllm-") as name:
        folder = Path(name)
        settings = [str(run), f"rollout.server_weights={folder / 'weights'}", *overrides]
        exported = subprocess.run([*relibra, "export", str(folder / "start"), *settings])
        if exported.returncode:
            return exported.returncode
        print("starting a vLLM server, which takes a minute or two", flush=True)
        flags = [*FLAGS, "--max-model-len", str(CONTEXT_TOKENS)]
        with local_server(vllm_python, folder / "start", folder / "server.log", flags=flags) as url:
            return subprocess.run([*relibra, "train", *settings, f"rollout.url={url}"]).returncode


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the server is stopped on the way out
    try:
        sys.exit(train_with_vllm(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
    except RelibraError as error:
        sys.exit(f"error: {error}")
