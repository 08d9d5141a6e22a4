"""Start a vLLM server from the untrained built-in model, train with it for a few steps, and stop it.

    python examples/train_with_vllm.py VLLM_PYTHON [KEY=VALUE]...

VLLM_PYTHON is the interpreter of the environment that vLLM is installed in (`make demo-vllm` makes one).
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from relibra.integrations.vllm.local_server import FLAGS, local_server

RUN = Path(__file__).with_name("vllm.toml")


def main(vllm_python: Path, overrides: list[str]) -> int:
    """Return the exit code of the run."""
    relibra = [sys.executable, "-m", "relibra"]
    with tempfile.TemporaryDirectory(prefix="relibra-vllm-") as name:
        folder = Path(name)
        weights = [f"rollout.server_weights={folder / 'weights'}"]
        subprocess.run([*relibra, "export", str(folder / "start"), str(RUN), *weights, *overrides], check=True)
        print("starting a vLLM server (a minute or two) ...", flush=True)
        flags = [*FLAGS, "--max-model-len", "1200"]
        with local_server(vllm_python, folder / "start", folder / "server.log", flags=flags) as url:
            settings = [*weights, f"rollout.url={url}", *overrides]
            return subprocess.run([*relibra, "train", str(RUN), *settings]).returncode


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
