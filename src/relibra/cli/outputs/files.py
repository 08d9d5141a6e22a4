"""Output files: checked before anything is computed, so that no input or other output is overwritten."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from relibra.errors import ConfigError

NamedPath = tuple[str, Path]
"""What a path is called on the command line, and the path."""


def named(option: str, path: Path | None) -> list[NamedPath]:
    """Return the path of an option; nothing where it was not given."""
    return [] if path is None else [(option, path)]


def input_files(trace: Path, cluster: str, schedule: Path | None = None) -> list[NamedPath]:
    """Return the files that a workload is read from."""
    machine = named("--cluster", Path(cluster) if cluster.endswith(".toml") else None)
    return [("TRACE", trace), *machine, *named("--schedule", schedule)]


def demand_path(plan_path: Path) -> Path:
    """Return the file of a plan's demand, beside the plan.

    >>> demand_path(Path("a/plan.safetensors")).name
    'plan.demand.safetensors'
    """
    return plan_path.parent / f"{plan_path.name.removesuffix('.safetensors')}.demand.safetensors"


def find_demand(plan_path: Path, named_path: Path | None) -> Path:
    """Return the demand of a plan: the named file, else the one beside it; raises ConfigError if it is missing."""
    path = named_path or demand_path(plan_path)
    if not path.exists():
        raise ConfigError(f"{path} does not exist: the loads of a plan are in its demand, name it with --demand")
    return path


def check_outputs(outputs: Sequence[NamedPath], inputs: Sequence[NamedPath]) -> None:
    """Check that outputs can be written and overwrite no input and no other output.

    raises    ConfigError when an output is a folder or cannot be written, is an input or lies in a trace folder, or
              when two outputs are one file
    """
    for number, (name, path) in enumerate(outputs):
        _check_writable(name, path)
        for other, taken in inputs:
            if _same_file(path, taken) or (taken.is_dir() and taken.resolve() in path.resolve().parents):
                where = "is" if _same_file(path, taken) else "lies in"
                raise ConfigError(f"{name} {path} {where} the input {other} {taken}: choose another path")
        for other, taken in outputs[:number]:
            if _same_file(path, taken):
                raise ConfigError(f"{other} and {name} are the same file {path}: choose another path for one of them")


def _same_file(one: Path, other: Path) -> bool:
    if one.resolve() == other.resolve():
        return True
    return one.exists() and other.exists() and one.samefile(other)


def _check_writable(name: str, path: Path) -> None:
    if path.is_dir():
        raise ConfigError(f"{name} {path} is a folder: name a file in it")
    parent = next(folder for folder in path.absolute().parents if folder.exists())
    if not parent.is_dir():
        raise ConfigError(f"{name} {path} cannot be written: {parent} is not a folder")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{name} {path} cannot be written: no permission to write in {parent}")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn errors of the file system into a ConfigError with the path that was given."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or os.strerror(error.errno or errno.EIO)
        raise ConfigError(f"{path} cannot be written: {reason}") from error
