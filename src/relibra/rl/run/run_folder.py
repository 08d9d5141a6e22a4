"""The run folder: its files, its lock, and its configuration. Imports no torch.

config.json            resolved configuration, sizes of the model and package versions
settings.txt           where each value that is not a default came from
memory.json            estimate of the memory that its ranks need, if one was made
metrics.jsonl          one line per finished RL step
samples.jsonl          some responses of each step, with their rewards
checkpoints/           from which a stopped run resumes
reference/             the policy before the first step, if algorithm.kl_coefficient is above 0
tensorboard/           the numbers of metrics.jsonl, for TensorBoard
traces/step-00000/     routes of the latest rollouts and of every 50th step (`trace.keep`)
policy/                the trained policy, a plain `transformers` folder
server/                log of the run's own rollout server, and weights on their way there (rollout.engine=serve)
stacks/                Python stacks of the ranks, if one was lost or hung
.lock                  empty; locked by the process that writes into the folder
.running               there while `relibra train` waits for its ranks; they stop after a step when it is removed
.launch                id of the `torchrun` that made the folder; ranks that it starts again continue there
report.html            written at the end of a run, and by `relibra report`
"""

from __future__ import annotations

import fcntl
import glob
import json
import platform
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

import relibra
from relibra.environment import LaunchedRank
from relibra.errors import ConfigError, EngineError
from relibra.files import write_text
from relibra.rl.config.run_config import RunConfig, changed_settings, describe_sources

_LAUNCH = ".launch"
_STEP_FOLDER = re.compile("step-([0-9]{5,})")
LOCK_SECONDS = 10.0
"""Seconds that a resumed run waits for the lock: the ranks of a killed run end a moment after it."""


def create_run_folder(config: RunConfig) -> Path:
    """Create `run.folder/run.name`, or with -2, -3, ... appended if it exists, and write the configuration into it.

    returns   an absolute path, because a reward function may change the working folder
    raises    ConfigError if it cannot be created
    """
    for attempt in count(1):
        name = config.run.name if attempt == 1 else f"{config.run.name}-{attempt}"
        path = config.run.folder.absolute() / name
        try:
            path.mkdir(parents=True)
            break
        except FileExistsError:
            if not path.is_dir():
                raise ConfigError(f"cannot create the run folder {path}: a file has that name") from None
        except OSError as error:
            raise ConfigError(f"cannot create the run folder {path} (run.folder): {error.strerror}") from error
    write_config(path, config)
    return path


def folders_of_run(folder: Path, name: str) -> list[Path]:
    """Return the run folders that `create_run_folder` has made for a name, in that order."""
    numbered = {folder / name: 1}
    for path in folder.glob(f"{glob.escape(name)}-*"):
        number = path.name.removeprefix(f"{name}-")
        if re.fullmatch("[1-9][0-9]*", number):
            numbered[path] = int(number)
    return sorted((path for path in numbered if path.is_dir()), key=numbered.__getitem__)


def open_launched(config: RunConfig, resume: Path | None, launched: LaunchedRank) -> tuple[Path, str | None]:
    """Return the absolute run folder of a rank: that of `resume`, that of the launch `torchrun` restarts, or a new one.

    returns   also its latest checkpoint where `torchrun` restarts the launch; None: no restart, or it has no checkpoint
    """
    run = resume and resume.absolute()
    if launched.restarts:
        run = run or _folder_of_launch(config, launched.launch)
        if run is not None and (checkpoint := latest_checkpoint(run)):
            return run, checkpoint
        if run is not None and resume is None:
            remove_if_unused(run)
            run = None
    if run is None:
        run = create_run_folder(config)
        write_text(run / _LAUNCH, launched.launch)
    return run, None


def _folder_of_launch(config: RunConfig, launch: str) -> Path | None:
    """Return the latest run folder that a launch has made; None: it has made none."""
    made = [
        (file.stat().st_mtime, file.parent)
        for file in config.run.folder.absolute().glob(f"*/{_LAUNCH}")
        if file.read_text(encoding="utf-8", errors="replace") == launch
    ]
    return max(made)[1] if made else None


def running_file(run: Path) -> Path:
    """Return the file that is there while a run goes on: its ranks stop after the present step when it is removed.

    Unlike a signal, its removal reaches ranks that only start and those on other machines, also where disks are full.
    """
    return run / ".running"


def is_unused(run: Path) -> bool:
    """Return whether a run has no finished step, nothing to resume from, no policy and no stacks of ranks that hung."""
    metrics = run / "metrics.jsonl"
    finished = metrics.exists() and metrics.stat().st_size > 0
    stacks = any(file.stat().st_size for file in (run / "stacks").glob("*"))
    return not (finished or stacks or has_checkpoint(run) or (run / "policy").exists())


def remove_if_unused(run: Path) -> None:
    """Remove the folder of a run that failed before its first result, so that the next try gets its name."""
    if run.is_dir() and is_unused(run):
        shutil.rmtree(run, ignore_errors=True)


def check_not_removed(run: Path) -> None:
    """Raise EngineError if the folder of a run that writes metrics.jsonl was removed, or moved, while it goes on.

    Only metrics.jsonl is looked for: other files may have been written again.
    """
    with suppress(OSError):  # a file system that does not answer now
        if not (run / "metrics.jsonl").exists():
            raise EngineError(
                f"the run folder {run} was removed or moved while the run went on: steps after that are lost; resume "
                "the moved folder, or start a new run"
            )


@contextmanager
def locked_run_folder(run: Path) -> Iterator[None]:
    """Lock a run folder against other processes; the system releases the lock when this process ends, even by SIGKILL.

    raises    ConfigError if another process holds the lock for LOCK_SECONDS, or the folder cannot be written
    """
    deadline = time.monotonic() + LOCK_SECONDS
    try:
        file = (run / ".lock").open("w")
    except OSError as error:
        raise ConfigError(f"cannot write to the run folder {run} (run.folder): {error.strerror}") from error
    with file:
        while True:
            try:
                # Processes that a reward forks do not inherit the lock.
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except (BlockingIOError, PermissionError):  # both mean: locked by another
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"another process trains in the run folder {run}: wait until it ends, or resume a copy of it"
                    ) from None
                time.sleep(0.1)
            except OSError:  # the file system has no locks
                break
        yield


_BUILT_IN_SIZES = ("hidden_size", "expert_width", "num_layers", "num_experts", "experts_per_token")


def write_config(run: Path, config: RunConfig, model_sizes: Mapping[str, Any] | None = None) -> None:
    """Write config.json: the settings of a run, names of those that were changed, versions, and sizes of its model.

    Settings that only the built-in model has are left out for others.

    model_sizes   of the model that is trained; None: not loaded yet
    raises        ConfigError if it cannot be written
    """
    packages = ("torch", "transformers", "numpy", "safetensors")
    about = {
        "relibra": relibra.__version__,
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
    }
    settings = config.model_dump(mode="json")
    if config.model.path:
        settings["model"] = {key: value for key, value in settings["model"].items() if key not in _BUILT_IN_SIZES}
    sizes = {} if model_sizes is None else {"model_sizes": dict(model_sizes)}
    text = json.dumps({**settings, **sizes, "changed": changed_settings(config), "versions": about}, indent=1) + "\n"
    try:
        write_text(run / "config.json", text)
        if config.sources:
            write_text(run / "settings.txt", "\n".join(describe_sources(config)) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write to the run folder {run} (run.folder): {error.strerror}") from error


def trace_folder(run: Path, step: int) -> Path:
    """Return the folder of the recorded routes of a step."""
    return run / "traces" / f"step-{step:05d}"


def has_checkpoint(run: Path) -> bool:
    """Return whether a run has a checkpoint to resume from."""
    return latest_checkpoint(run) is not None


def latest_checkpoint(run: Path) -> str | None:
    """Return the name of the checkpoint after the most steps; None: there is none."""
    return next(iter(checkpoint_names(run)), None)


def checkpoint_names(run: Path) -> list[str]:
    """Return the names of the checkpoints of a run, that after the most steps first."""
    return [folder.name for _, folder in step_folders(run / "checkpoints")]


def step_folders(parent: Path) -> list[tuple[int, Path]]:
    """Return step and folder of each step folder, complete or not, the latest first; other names are ignored."""
    found = ((_STEP_FOLDER.fullmatch(path.name), path) for path in parent.glob("step-*"))
    return sorted(((int(match[1]), path) for match, path in found if match), reverse=True)


def read_settings(path: Path, verb: str = "resume") -> dict[str, Any]:
    """Return the settings of a run that is to be resumed, or exported.

    raises    ConfigError if the folder is not one of a run with a checkpoint that this version of relibra reads
    """
    if not path.is_dir():
        raise ConfigError(f"cannot {verb} {path}: the folder does not exist; pass the folder of a run")
    if not has_checkpoint(path):
        raise ConfigError(
            f"cannot {verb} {path}: it has no checkpoints/step-* (checkpoint.every was 0, or the run ended early); "
            "pass the folder of another run, or start a new run"
        )
    try:
        settings: dict[str, Any] = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot {verb} {path}: its config.json cannot be read ({error})") from error
    versions = settings.pop("versions", {}) if isinstance(settings, dict) else None
    made_by = versions.get("relibra", relibra.__version__) if isinstance(versions, dict) else None
    if not isinstance(made_by, str):
        raise ConfigError(f"cannot {verb} {path}: its config.json is not one of a run")
    for key in ("model_sizes", "changed"):
        settings.pop(key, None)
    if made_by.startswith("0.1."):
        raise ConfigError(
            f"cannot {verb} {path}: relibra {made_by} made this run, and {relibra.__version__} does not read its "
            f"checkpoints; finish it with {made_by}, or start a new run from its policy (model.path={path}/policy)"
        )
    return settings
