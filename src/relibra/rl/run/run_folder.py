"""The run folder: what a run leaves on disk, each file whole or absent, each line of metrics whole or ignored.

config.json            resolved configuration and versions
metrics.jsonl          one line per finished RL step
samples.jsonl          some responses of each step, with their rewards
checkpoints/           what a run that was killed goes on from
reference/             the policy before the first step, where it is needed
tensorboard/           the same numbers for TensorBoard
traces/step-00000/     routes of each step's rollout
policy/                the trained policy, a plain `transformers` folder
.lock                  empty; held by the process that writes into the folder
report.html            the report
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import platform
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import relibra
from relibra.errors import ConfigError
from relibra.files import write_text
from relibra.rl.config.run_config import RunConfig

if TYPE_CHECKING:
    from relibra.rl.model.policy import Policy
    from relibra.rl.model.tokenizer import Tokenizer
    from relibra.rl.rollout.response import Response
    from relibra.rl.tasks.task import Task

SAMPLES_OF_A_KIND = 3
LOCK_SECONDS = 10.0
"""How long a run that goes on waits for the ranks of a killed one, which end soon after it."""


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
    write_config(path, config)
    return path


def open_or_create(config: RunConfig, resume: Path | None) -> Path:
    """Return the folder of a new run, or that of one that goes on."""
    return create_run_folder(config) if resume is None else resume


def nothing_began(run: Path) -> bool:
    """Say whether a run folder holds its settings and nothing else."""
    return {path.name for path in run.iterdir()} <= {"config.json", ".lock"}


def forget_if_nothing_began(run: Path) -> None:
    """Remove the folder of a run that failed before it did anything, so that the next try has its name."""
    if nothing_began(run):
        shutil.rmtree(run, ignore_errors=True)


@contextmanager
def held_run_folder(run: Path) -> Iterator[None]:
    """Keep a second process from going on with the same run; the system lets go when this one ends, however it ends.

    raises    ConfigError when another process still holds the folder after LOCK_SECONDS, or it cannot be written
    """
    deadline = time.monotonic() + LOCK_SECONDS
    try:
        file = (run / ".lock").open("w")
    except OSError as error:
        raise ConfigError(f"cannot write into the run folder {run} (run.folder): {error.strerror}") from error
    with file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"another process trains in the run folder {run}: wait until it ends, or go on in a copy of it"
                    ) from None
                time.sleep(0.1)
            except OSError:  # a file system without locks
                break
        yield


def write_config(run: Path, config: RunConfig) -> None:
    """Write the settings of a run, and the versions it runs with, into its folder.

    raises    ConfigError when it cannot be written
    """
    packages = ("torch", "transformers", "numpy", "safetensors")
    about = {
        "relibra": relibra.__version__,
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
    }
    text = json.dumps({**config.model_dump(mode="json"), "versions": about}, indent=1) + "\n"
    try:
        write_text(run / "config.json", text)
    except OSError as error:
        raise ConfigError(f"cannot write into the run folder {run} (run.folder): {error.strerror}") from error


def trace_folder(run: Path, step: int) -> Path:
    """Return where the routes of a step go."""
    return run / "traces" / f"step-{step:05d}"


def has_checkpoint(run: Path) -> bool:
    """Say whether a run has something to go on from."""
    return any((run / "checkpoints").glob("step-*"))


def open_run_folder(path: Path) -> dict[str, Any]:
    """Return the settings of a run that is to go on.

    raises    ConfigError when the folder is not that of a run with a checkpoint
    """
    if not path.is_dir():
        raise ConfigError(f"cannot resume {path}: there is no such folder; name that of a run, such as runs/run")
    if not has_checkpoint(path):
        raise ConfigError(
            f"cannot resume {path}: it has no checkpoints/step-* (was checkpoint.every 0, or the run killed early?); "
            "name the folder of a run, or start anew"
        )
    try:
        settings: dict[str, Any] = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot resume {path}: its config.json cannot be read ({error})") from error
    settings.pop("versions", None)
    return settings


def forget_steps_from(run: Path, step: int) -> None:
    """Remove what a killed run wrote after the checkpoint it goes on from; collective."""
    import torch.distributed as dist

    if dist.get_rank() == 0:
        for name in ("metrics.jsonl", "samples.jsonl"):
            if (run / name).exists():
                lines = (run / name).read_text(encoding="utf-8").splitlines(keepends=True)
                write_text(run / name, "".join(line for line in lines if _step_of(line) < step))
        for folder in (run / "traces").glob("step-*"):
            if int(folder.name.removeprefix("step-")) >= step:
                shutil.rmtree(folder)
    dist.barrier()


def _step_of(line: str) -> float:
    """Return the step of a line; a line that a kill cut off belongs to no step that is kept."""
    try:
        return float(json.loads(line)["step"]) if line.endswith("\n") else math.inf
    except (ValueError, KeyError, TypeError):
        return math.inf


class MetricsLog:
    """Appends finished steps to metrics.jsonl and TensorBoard; rank 0 only."""

    def __init__(self, run: Path, first_step: int = 0) -> None:
        """Open both logs of a run folder; TensorBoard forgets what it shows of `first_step` and later ones."""
        from torch.utils.tensorboard import (
            SummaryWriter,
        )  # loads torch, which whoever only makes a folder can do without

        self._lines = (run / "metrics.jsonl").open("a", encoding="utf-8")
        self._tensorboard = SummaryWriter(str(run / "tensorboard"), purge_step=first_step)

    def append(self, metrics: dict[str, Any]) -> None:
        """Write one step; it is on disk when this returns."""
        self._lines.write(json.dumps(_finite(metrics), allow_nan=False) + "\n")
        self._lines.flush()
        os.fsync(self._lines.fileno())
        for name, value in metrics.items():
            if isinstance(value, dict):
                for part, number in value.items():
                    self._tensorboard.add_scalar(f"{name}/{part}", number, metrics["step"])
            elif isinstance(value, int | float) and name != "step":
                self._tensorboard.add_scalar(name, value, metrics["step"])
        self._tensorboard.flush()

    def close(self) -> None:
        """Close both logs."""
        self._lines.close()
        self._tensorboard.close()


def _finite(value: Any) -> Any:
    """Return a value for JSON, which knows no nan and no infinity: None stands for them."""
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


class SamplesLog:
    """Appends some responses of each step to samples.jsonl, for people to read; rank 0 only."""

    def __init__(self, run: Path) -> None:
        """Open the log of a run folder."""
        self._lines = (run / "samples.jsonl").open("a", encoding="utf-8")

    def append(self, step: int, responses: Sequence[Response], task: Task, tokenizer: Tokenizer) -> None:
        """Write the best, the worst and the longest of the finished responses of a rank."""
        finished = [response for response in responses if response.reward is not None]
        by_reward = sorted(finished, key=lambda response: (response.reward, response.sample_id))
        longest = sorted(finished, key=lambda response: (-response.length, response.sample_id))[:SAMPLES_OF_A_KIND]
        chosen = {
            one.sample_id: one for one in (*by_reward[-SAMPLES_OF_A_KIND:], *by_reward[:SAMPLES_OF_A_KIND], *longest)
        }
        for response in sorted(chosen.values(), key=lambda one: one.sample_id):
            line = {
                "step": step,
                "sample": response.sample_id,
                "prompt": task.prompt(response.group_id).text,
                "response": tokenizer.decode(response.tokens_n[response.prompt_length :].tolist()),
                "reward": response.reward,
                "tokens": response.length,
                "finish": response.finish_reason,
                "windows": response.windows,
            }
            self._lines.write(json.dumps(line, ensure_ascii=False) + "\n")
        self._lines.flush()

    def close(self) -> None:
        """Close the log."""
        self._lines.close()


def save_policy(run: Path, policy: Policy, tokenizer: Tokenizer) -> None:
    """Write policy and tokenizer as a plain `transformers` folder, which appears when it is whole; collective."""
    import torch.distributed as dist

    from relibra.rl.model.policy import write_weights

    temporary, final = run / ".policy.tmp", run / "policy"
    if dist.get_rank() == 0:
        shutil.rmtree(temporary, ignore_errors=True)
    write_weights(policy, temporary)
    if dist.get_rank() == 0:
        tokenizer.save(temporary)
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
