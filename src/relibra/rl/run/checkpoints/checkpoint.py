"""Checkpoints: everything that a run resumes from, in a folder that is complete or absent.

    checkpoints/step-00010/
      weights/shard-*.safetensors      shards of weights and optimizer states, by torch.distributed.checkpoint
      responses/rank-*.safetensors     responses in progress
      state.json                       the caller's state, homes of experts, scalar optimizer states
      manifest.json                    size and SHA-256 of every other file; written last

Weights and optimizer states are in logical expert order, so that any number of ranks can load them. Nothing is pickled:
torch's default format pickles its index, its safetensors format (used here) has it in the header of each file. A
checkpoint is written under a hidden name, synced, and renamed, so that an interrupted one is never read.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from relibra.errors import ConfigError, EngineError, RelibraError
from relibra.files import sync_folder
from relibra.rl.rollout.response import Response
from relibra.rl.rollout.response_arrays import load_responses, save_responses
from relibra.rl.run.checkpoints.checkpoint_manifest import digest_files, find_damage, write_manifest
from relibra.rl.run.checkpoints.checkpoint_tensors import (
    at_saved_homes,
    in_logical_order,
    restore_scalars,
    scalars,
    tensors,
)
from relibra.rl.run.ranks import broadcast_json, gather_json, wait_for_ranks
from relibra.rl.run.run_folder import checkpoint_names

Models = Mapping[str, tuple[nn.Module, Optimizer | None]]
"""Models of a run by name, each with its optimizer; None: it is not trained."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LoadedCheckpoint:
    """Contents of a checkpoint apart from the models.

    step        finished RL steps
    state       as passed to `stage_checkpoint`
    responses   this rank's share of the responses in progress
    """

    step: int
    state: dict[str, Any]
    responses: list[Response]


@dataclass(frozen=True, kw_only=True, eq=False)
class StagedCheckpoint:
    """A copy of what this rank writes into a checkpoint: training may go on while it is written.

    step        finished RL steps
    contents    of state.json
    tensors     in host memory, experts in logical order
    responses   in progress on this rank
    """

    step: int
    contents: dict[str, Any]
    tensors: dict[str, Tensor]
    responses: Sequence[Response]


def stage_checkpoint(
    step: int, *, models: Models, responses: Sequence[Response], state: dict[str, Any]
) -> StagedCheckpoint:
    """Copy all that a checkpoint holds; collective.

    Experts move to logical order and back. Needs host memory for the shards of this rank, and for as much again while
    it is written.

    step        finished RL steps
    responses   in progress on this rank
    state       JSON data that the caller needs to resume, the same on all ranks
    """
    contents: dict[str, Any] = {"step": step, "ranks": dist.get_world_size(), "state": state, "models": {}}
    with in_logical_order(models) as homes:
        for name, (model, optimizer) in models.items():
            numbers = scalars(model, optimizer) if optimizer else None
            contents["models"][name] = {"homes": homes[name], "optimizer": numbers}
        copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors(models).items()}
        return StagedCheckpoint(step=step, contents=contents, tensors=copies, responses=tuple(responses))


def write_checkpoint(run: Path, staged: StagedCheckpoint, keep: int, group: dist.ProcessGroup | None = None) -> Path:
    """Write a staged checkpoint, and remove all but the latest ones; collective.

    keep        number of checkpoints to keep, this one included
    group       gloo group of all ranks; None: the default one
    raises      EngineError, on all ranks, if a rank cannot write; earlier checkpoints are unchanged
    """
    folder = run / "checkpoints" / f"step-{staged.step:05d}"
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        _write(partial, staged, group)
        with _writing(partial, group):
            if dist.get_rank() == 0:
                _put_in_place(partial, folder)
                _remove_others(folder, keep)
    except EngineError:
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)  # the disk may be full
        raise
    return folder


def load_checkpoint(run: Path, *, models: Models) -> LoadedCheckpoint | None:
    """Load the latest undamaged checkpoint into models and optimizers, in place; collective. None: there is none.

    A damaged one is skipped with a warning. On the number of ranks that saved it, experts return to their homes and all
    state is bitwise the same; on another number they stay in logical order.

    raises    ConfigError, on all ranks, if all checkpoints are damaged, or the latest is of other models
    """
    found = broadcast_json(checkpoint_names(run) if dist.get_rank() == 0 else None)
    damage = []
    for name in found:
        folder = run / "checkpoints" / name
        own = find_damage(folder, dist.get_rank(), dist.get_world_size())
        wait_for_ranks()
        wrong = [each for each in gather_json(own) if each]
        if not wrong:
            return _load(folder, models)
        damage.append(wrong[0])
        if dist.get_rank() == 0:
            _log.warning("checkpoint %s is damaged and was skipped: %s", folder, wrong[0])
    if not found:
        return None
    raise ConfigError(
        f"none of the checkpoints in {run / 'checkpoints'} can be read ({', '.join(found)}): {damage[0]}; restore "
        "one from a backup, or start a new run"
    )


def load_weights(folder: Path, name: str, model: nn.Module) -> None:
    """Load the weights of one model of a checkpoint into a whole model, in its types; in this process alone.

    raises    ConfigError if the checkpoint is damaged, or of another model
    """
    if damage := find_damage(folder, 0, 1):
        raise ConfigError(f"checkpoint {folder} is damaged: {damage}; choose another --step")
    _load_tensors(tensors({name: (model, None)}), folder, alone=True)


def _write(partial: Path, staged: StagedCheckpoint, group: dist.ProcessGroup | None) -> None:
    """Write all files of a checkpoint, the manifest last, and sync them to disk; collective."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    with _writing(partial, group):
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.parent.mkdir(exist_ok=True)  # raises where somebody removed the run folder
            (partial / "weights").mkdir(parents=True)
            (partial / "responses").mkdir()
    with _writing(partial, group):
        save_responses(partial / "responses" / f"rank-{rank:05d}.safetensors", staged.responses)
    _write_tensors(staged.tensors, partial / "weights", group)
    with _writing(partial, group):
        if rank == 0:
            (partial / "state.json").write_text(json.dumps(staged.contents), encoding="utf-8")
    with _writing(partial, group):
        own = digest_files(partial, rank, num_ranks)
    everyone = gather_json(own, group)
    with _writing(partial, group):
        if rank == 0:
            write_manifest(partial, {file: digest for part in everyone for file, digest in part.items()})


def _load(folder: Path, models: Models) -> LoadedCheckpoint:
    contents = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    saved = contents["models"]
    if set(saved) != set(models):
        raise ConfigError(
            f"checkpoint {folder} holds {', '.join(saved)}, this run has {', '.join(models)}: resume with the "
            "configuration of the run that wrote it"
        )
    same_ranks = contents["ranks"] == dist.get_world_size()
    with at_saved_homes(models, {name: saved[name]["homes"] if same_ranks else None for name in models}):
        for name, (model, optimizer) in models.items():
            unknown = set(saved[name]["optimizer"] or ()) - {key for key, _ in model.named_parameters()}
            if unknown:
                raise ConfigError(
                    f"checkpoint {folder} has states of {min(unknown)}, which is no parameter of its own here (tied "
                    "weights are one parameter since relibra 0.3.0): finish the run with the version that wrote it"
                )
            if optimizer and saved[name]["optimizer"] is not None:
                restore_scalars(model, optimizer, saved[name]["optimizer"])
        _load_tensors(tensors(models), folder)
    return LoadedCheckpoint(
        step=contents["step"], state=contents["state"], responses=_own_responses(folder, same_ranks=same_ranks)
    )


def _load_tensors(named: dict[str, Any], folder: Path, *, alone: bool = False) -> None:
    try:
        with warnings.catch_warnings():
            if alone:
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load(named, storage_reader=HuggingFaceStorageReader(str(folder / "weights")), no_dist=alone)
    except CheckpointException as error:
        raise ConfigError(
            f"checkpoint {folder} does not fit the models of this run: {_reason(error)}; resume with the "
            "configuration of the run that wrote it"
        ) from error


def _own_responses(folder: Path, *, same_ranks: bool) -> list[Response]:
    """Return the responses that this rank saved; on another number of ranks, its share of all of them."""
    rank, files = dist.get_rank(), sorted((folder / "responses").iterdir())
    if same_ranks:
        return load_responses(files[rank])
    all_responses = (response for file in files for response in load_responses(file))
    return sorted(all_responses, key=lambda response: response.sample_id)[rank :: dist.get_world_size()]


@contextmanager
def _writing(folder: Path, group: dist.ProcessGroup | None) -> Iterator[None]:
    """Turn a write error of any rank into the same EngineError on all ranks; collective."""
    problem = None
    try:
        yield
    except (OSError, SafetensorError, RelibraError) as error:
        problem = f"rank {dist.get_rank()}: {getattr(error, 'strerror', None) or error}"
    problems = [each for each in gather_json(problem, group) if each]
    if problems:
        raise _cannot_write(folder, problems[0])


def _write_tensors(named: dict[str, Any], folder: Path, group: dist.ProcessGroup | None) -> None:
    try:
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        save(named, storage_writer=writer, process_group=group)
    except CheckpointException as error:  # torch raises it on all ranks, with the errors of each
        causes = [cause for cause, _ in error.failures.values()]
        if not all(isinstance(cause, OSError) for cause in causes):
            raise
        raise _cannot_write(folder, _reason(error)) from error


def _reason(error: CheckpointException) -> str:
    rank, (cause, _) = min(error.failures.items())
    text = getattr(cause, "strerror", None) or (str(cause).strip().splitlines() or [type(cause).__name__])[0]
    return f"rank {rank}: {text.rstrip('.')}"


def _cannot_write(folder: Path, problem: str) -> EngineError:
    if os.strerror(errno.ENOENT) in problem:
        return EngineError(f"cannot write the checkpoint {folder} ({problem}): was the run folder removed or moved?")
    return EngineError(
        f"cannot write the checkpoint {folder} ({problem}): earlier checkpoints are unchanged; free disk space and "
        "resume, or set checkpoint.every=0"
    )


def _put_in_place(partial: Path, folder: Path) -> None:
    """Rename a complete checkpoint to its name; one of an earlier attempt at the same step is removed."""
    if folder.exists():
        _discard(folder)
    partial.rename(folder)
    sync_folder(folder.parent)


def _remove_others(latest: Path, keep: int) -> None:
    """Remove partial checkpoints, those beyond `keep`, and those of later steps (from before a resume)."""
    for path in latest.parent.glob(".step-*.partial"):
        shutil.rmtree(path, ignore_errors=True)
    names = checkpoint_names(latest.parent.parent)
    now = names.index(latest.name)
    for name in [*names[:now], *names[now + keep :]]:
        _discard(latest.parent / name)


def _discard(folder: Path) -> None:
    """Remove a checkpoint; it is renamed first, so that a half removed one is never read."""
    hidden = folder.with_name(f".{folder.name}.removed.partial")
    shutil.rmtree(hidden, ignore_errors=True)
    os.rename(folder, hidden)
    shutil.rmtree(hidden, ignore_errors=True)
