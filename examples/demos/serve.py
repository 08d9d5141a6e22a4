"""Serve a small model, stream an answer with curl, and stop: what `make demo-serve` runs.

    python -m examples.demos.serve [MODEL]

MODEL is a folder of a transformers MoE model with a tokenizer; without it one is warmed up, in about a minute.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from relibra.errors import EngineError, RelibraError

RELIBRA = (sys.executable, "-m", "relibra")
PROMPT = "3+4+5="
TRAINING = ("run.name=model", "run.steps=1", "warmup.steps=200", "rollout.max_response=48", "evaluation.every=0")
_ADDRESS = re.compile(r"at (http://\S+)/v1 ")
_STOPPING_SECONDS = 30.0


def serve_and_ask(model: Path) -> int:
    """Return the exit code of curl, which shows the events of an answer as they come."""
    with local_server(model) as url:
        body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "stream": True}
        command = ["curl", "--no-buffer", "--silent", "--show-error", "--fail-with-body", f"{url}/v1/completions"]
        command += ["--header", "Content-Type: application/json", "--data", json.dumps(body)]
        print("$ " + " ".join(f"'{word}'" if " " in word else word for word in command), flush=True)
        return subprocess.run(command).returncode


@contextmanager
def local_server(model: Path, flags: Sequence[str] = ("--experts", "2")) -> Iterator[str]:
    """Run `relibra serve` at a free port; yield its address.

    raises   EngineError where it does not start; it has said why
    """
    command = [*RELIBRA, "serve", str(model), *flags, "--port", "0", "--max-length", "512", "--until-eof"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdin is not None, "it is a pipe"
    assert process.stderr is not None, "it is a pipe"
    try:
        address = None
        for line in process.stderr:
            print(line, end="", file=sys.stderr, flush=True)
            if address := _ADDRESS.search(line):
                break
        if address is None:
            raise EngineError("relibra serve ended before it took requests: see above")
        yield address.group(1)
    finally:
        process.stdin.close()  # with its standard input the server ends, and with it its workers
        try:
            process.wait(_STOPPING_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stderr.close()


def main(arguments: list[str]) -> int:
    """Return the exit code of the demo."""
    if arguments:
        return serve_and_ask(Path(arguments[0]))
    with tempfile.TemporaryDirectory(prefix="relibra-serve-") as name:
        print("warming up a small model on additions, about a minute", flush=True)
        trained = subprocess.run([*RELIBRA, "train", *TRAINING, f"run.folder={name}"], capture_output=True, text=True)
        if trained.returncode:
            print(trained.stderr, file=sys.stderr)
            return trained.returncode
        return serve_and_ask(Path(name) / "model" / "policy")


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except RelibraError as error:
        sys.exit(f"error: {error}")
