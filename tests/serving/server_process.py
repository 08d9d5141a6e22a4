"""`relibra serve` as a process, for tests, and a model for it that reads and writes text."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import string
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from torch import nn

from relibra.rl.toy.character_tokenizer import CharacterTokenizer
from tests.serving.models import write_model

READY = re.compile(r"at (http://[\d.]+:\d+)/v1")
LETTERS = string.ascii_letters[:40] + " .?!0123456789,;:\n"
"""Characters of the text model: its tokens 1 to 58; the last one ends an answer."""
TEMPLATE = "{% for one in messages %}{{ one['content'] }}{% if not loop.last %};{% endif %}{% endfor %}"


def write_text_model(folder: Path) -> nn.Module:
    """Write a tiny model with a tokenizer of single characters and a chat template; return it whole."""
    model = write_model("Qwen3MoeForCausalLM", folder)
    CharacterTokenizer(LETTERS).save(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return model


@contextlib.contextmanager
def relibra_serve(folder: Path, *options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run the command; yield its address and its process."""
    command = [sys.executable, "-m", "relibra", "serve", str(folder), "--port", "0", "--max-length", "96", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        lines = []
        while not lines or not READY.search(lines[-1]):
            lines.append(process.stderr.readline())
            assert lines[-1], f"the server ended before it was ready: {lines}"
        yield READY.search(lines[-1]).group(1), process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.wait(30)
        process.stderr.close()


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    """Return the process ids of a server's workers in the order in which they were started: experts first."""
    listed = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True, check=True
    )
    return sorted(int(pid) for pid in listed.stdout.split())
