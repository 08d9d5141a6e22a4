"""Result rows: a figure without commit, machine, versions, seed, command and label is refused."""

import json
import platform
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from relibra.errors import ConfigError
from relibra.files import write_text

LABELS = ("measured", "model", "simulated", "cited")
REQUIRED = ("case", "label", "seed", "repetitions")
RESULTS = Path(__file__).parent / "results"
PACKAGES = ("relibra", "numpy", "numba", "scipy", "safetensors", "torch", "transformers")


def write_results(name: str, rows: list[dict], command: str | None = None, folder: Path = RESULTS) -> Path:
    """Write rows to `FOLDER/NAME.json`, each with where it comes from.

    command   what to run to get the rows again; default: what is running
    raises    ConfigError when a row lacks one of REQUIRED or has an unknown label
    """
    for row in rows:
        missing = [key for key in REQUIRED if key not in row]
        if missing or row["label"] not in LABELS:
            raise ConfigError(f"result row {row} lacks {missing} or its label is not one of {LABELS}")
    origin = {
        "commit": _git("rev-parse", "HEAD"),
        # Results of other benchmarks, and the pages made of them, are no part of what was measured.
        "dirty": bool(
            _git("status", "--porcelain", "--untracked-files=no", ":!benchmarks/results", ":!docs", ":!README.md")
        ),
        "machine": f"{_processor()}, {platform.system()} {platform.machine()}",
        "versions": {"python": platform.python_version(), **{package: version(package) for package in PACKAGES}},
        "command": command or f"python {shlex.join(sys.argv)}",
    }
    path = folder / f"{name}.json"
    write_text(path, json.dumps([{**row, **origin} for row in rows], indent=1) + "\n")
    return path


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent.parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown processor"
