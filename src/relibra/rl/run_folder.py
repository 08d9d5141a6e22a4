"""The run folder: what a run leaves on disk, each file whole or absent, each line of metrics whole or ignored.

config.json            resolved configuration and versions
metrics.jsonl          one line per finished RL step
tensorboard/           the same numbers for TensorBoard
traces/step-00000/     routes of each step's rollout
policy/                the trained policy, a plain `transformers` folder
report.html            the report
"""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import relibra
from relibra.errors import ConfigError
from relibra.files import write_text
from relibra.rl.config import RunConfig


def create_run_folder(config: RunConfig) -> Path:
    """Make a new folder `folder/name`, or `folder/name-2`, ..., and write the configuration into it.

    raises    ConfigError when it cannot be made
    """
    attempt = 1
    while True:
        path = config.run.folder / (config.run.name if attempt == 1 else f"{config.run.name}-{attempt}")
        try:
            path.mkdir(parents=True)
            break
        except FileExistsError:
            if not path.is_dir():
                raise ConfigError(f"cannot make the run folder {path}: a file has that name") from None
            attempt += 1
        except OSError as error:
            raise ConfigError(f"cannot make the run folder {path} (run.folder): {error.strerror}") from error
    packages = ("torch", "transformers", "numpy", "safetensors")
    about = {
        "relibra": relibra.__version__,
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
    }
    text = json.dumps({**config.model_dump(mode="json"), "versions": about}, indent=1) + "\n"
    try:
        write_text(path / "config.json", text)
    except OSError as error:
        raise ConfigError(f"cannot write into the run folder {path} (run.folder): {error.strerror}") from error
    return path


def trace_folder(run: Path, step: int) -> Path:
    """Return where the routes of a step go."""
    return run / "traces" / f"step-{step:05d}"


class MetricsLog:
    """Appends finished steps to metrics.jsonl and TensorBoard; rank 0 only."""

    def __init__(self, run: Path) -> None:
        """Open both logs of a run folder."""
        from torch.utils.tensorboard import (
            SummaryWriter,
        )  # loads torch, which whoever only makes a folder can do without

        self._lines = (run / "metrics.jsonl").open("a", encoding="utf-8")
        self._tensorboard = SummaryWriter(str(run / "tensorboard"))

    def append(self, metrics: dict[str, Any]) -> None:
        """Write one step; it is on disk when this returns."""
        self._lines.write(json.dumps(metrics) + "\n")
        self._lines.flush()
        os.fsync(self._lines.fileno())
        for name, value in metrics.items():
            if isinstance(value, dict):
                for part, number in value.items():
                    self._tensorboard.add_scalar(f"{name}/{part}", number, metrics["step"])
            elif name != "step" and value is not None:
                self._tensorboard.add_scalar(name, value, metrics["step"])
        self._tensorboard.flush()

    def close(self) -> None:
        """Close both logs."""
        self._lines.close()
        self._tensorboard.close()


def save_policy(run: Path, model: Any) -> None:
    """Write the policy as a plain `transformers` folder; it appears under its name only when it is whole."""
    temporary = run / ".policy.tmp"
    model.save_pretrained(temporary)
    temporary.rename(run / "policy")
