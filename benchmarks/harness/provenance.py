"""Result rows: a figure without commit, machine, versions, seed, command and label is refused."""

import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np

from relibra.errors import ConfigError
from relibra.files import write_text

LABELS = ("measured", "model", "simulated", "cited")
REQUIRED = ("case", "label", "seed", "repetitions")
ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
DATA = ROOT.parent / "shared" / "data"
"""Where recorded routes lie beside a checkout; they are not part of the project."""

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
        "commit": commit(),
        # Results of other benchmarks, and the pages made of them, are no part of what was measured.
        "dirty": bool(
            _git("status", "--porcelain", "--untracked-files=no", ":!benchmarks/results", ":!docs", ":!README.md")
        ),
        "machine": f"{_processor()}, {platform.system()} {platform.machine()}",
        "versions": {"python": platform.python_version(), **{package: version(package) for package in PACKAGES}},
        "command": command or f"{sys.argv[0]} {shlex.join(sys.argv[1:])}".strip(),
    }
    path = folder / f"{name}.json"
    write_text(path, json.dumps([{**row, **origin} for row in rows], indent=1) + "\n")
    return path


def commit() -> str:
    """Return the commit that is checked out."""
    return _git("rev-parse", "HEAD")


def quartiles(numbers: Sequence[float], name: str) -> dict[str, float]:
    """Return how far a figure strays over repetitions, as two entries of its row.

    >>> quartiles([1.0, 2.0, 3.0, 4.0, 5.0], "seconds")
    {'seconds low': 2.0, 'seconds high': 4.0}
    """
    low, high = np.quantile(np.asarray(numbers, dtype=np.float64), (0.25, 0.75))
    return {f"{name} low": float(low), f"{name} high": float(high)}


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown processor"
