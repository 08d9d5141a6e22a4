"""The machine that a run plans for: `plan.cluster` as a `Cluster`."""

from __future__ import annotations

import hashlib
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from relibra.cluster import PRESETS, Cluster, cluster_preset, read_cluster, write_cluster
from relibra.environment import cache_folder
from relibra.errors import ClusterError
from relibra.planning.budget import DEFAULT_MODEL
from relibra.planning.costs.expert_shape import EXPERT_SHAPES

if TYPE_CHECKING:
    import torch

    from relibra.calibration.measurement import Job

_OF_GPU = {"GB200": "nvl72", "H200": "h200x8", "H800": "h800x8", "H100": "h100x8", "H20": "h20x8", "4090": "rtx4090x8"}
"""Preset of a GPU whose name holds these letters; the first that fits."""
CPU_PRESET = "laptop"
_FIGURES = "with hides_copies"
"""Part of the name of a kept measurement: one made before `hides_copies` was measured is not found."""
UNKNOWN_GPU_PRESET = "h100x8"


def find_cluster(name: str, device: torch.device, num_ranks: int, ranks_per_node: int) -> Cluster:
    """Return the machine of `plan.cluster`, with the ranks of the run.

    name     a preset, a .toml file, "measure" (`measure_cluster` has been called before), or "auto"
    raises   ClusterError for an unknown name, an invalid file, or "measure" without a measurement
    """
    if name == "measure":
        path = measurement_path(cuda=device.type == "cuda")
        if (cluster := _kept_measurement(path)) is None:
            raise ClusterError(
                f"plan.cluster 'measure': no measurement of this machine at {path}, and under torchrun none is made; "
                "run `relibra calibrate --output cluster.toml` once and set plan.cluster=cluster.toml"
            )
    else:
        cluster = _named_cluster(_preset_of(device) if name == "auto" else name)
    return cluster.with_ranks(num_ranks, ranks_per_node)


def check_cluster(name: str) -> None:
    """Raise ClusterError for a `plan.cluster` that is an unknown name or an invalid file; nothing is measured."""
    if name not in ("auto", "measure"):
        _named_cluster(name)


def _named_cluster(name: str) -> Cluster:
    if name.endswith(".toml"):
        try:
            return read_cluster(Path(name))
        except ClusterError as error:
            raise ClusterError(
                f"plan.cluster: {error}; `relibra calibrate --output cluster.toml` writes such a file"
            ) from error
    if name not in PRESETS:
        raise ClusterError(
            f"plan.cluster {name!r} is unknown: allowed are {', '.join(PRESETS)}, auto, measure, or the path of a "
            ".toml file from `relibra calibrate`"
        )
    return cluster_preset(name)


def _preset_of(device: torch.device) -> str:
    if device.type != "cuda":
        return CPU_PRESET
    import torch

    return preset_of_gpu(torch.cuda.get_device_name(device))


def preset_of_gpu(words: str) -> str:
    """Return the preset of a GPU by its name."""
    return next((preset for part, preset in _OF_GPU.items() if part in words), UNKNOWN_GPU_PRESET)


def measurement_path(*, cuda: bool) -> Path:
    """Return the file that keeps the measurement of this machine, in the user's cache folder.

    cuda   of its GPUs; False: of its processor
    """
    from relibra.calibration.measurement import describe_machine

    machine = describe_machine(_job(cuda=cuda))
    undated = machine.description.rpartition(",")[0]
    words = f"{_FIGURES} {machine.name} {machine.memory_bytes} {undated}"
    return cache_folder() / f"{machine.name}-{hashlib.sha256(words.encode()).hexdigest()[:12]}.toml"


def measure_cluster(num_ranks: int) -> Path:
    """Measure this machine, unless that was done before, and return the file with the result.

    Measured are the GPUs if each rank has one, else the processor: where ranks train. With one GPU there is no other
    rank to exchange with: the links are those of the preset of this GPU.

    raises   ClusterError when the file cannot be written
    """
    import torch

    from relibra.calibration.fit import fit_cluster
    from relibra.calibration.measurement import describe_machine, measure_machine

    cuda = torch.cuda.device_count() >= num_ranks
    path = measurement_path(cuda=cuda)
    if _kept_measurement(path) is not None:
        return path
    _check_writable(path.parent)  # measuring takes long
    job, expert = _job(cuda=cuda), EXPERT_SHAPES[DEFAULT_MODEL]
    links = PRESETS[_preset_of(torch.device("cuda", 0))] if job.ranks == 1 else None
    found = fit_cluster(measure_machine(job), describe_machine(job), expert, links)
    write_cluster(path, replace(found.cluster, name=path.stem))
    return path


def _job(*, cuda: bool) -> Job:
    from relibra.calibration.measurement import choose_job

    job = choose_job(None, EXPERT_SHAPES[DEFAULT_MODEL], quick=True)
    return job if cuda or not job.cuda else replace(job, ranks=2, cuda=False)


def _kept_measurement(path: Path) -> Cluster | None:
    """Return a measurement made before; None if there is none, or it is damaged: it can be made again."""
    try:
        return read_cluster(path)
    except ClusterError:
        return None


def _check_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ClusterError(
            f"plan.cluster 'measure': the measurement cannot be kept in {folder}: {error.strerror}; set XDG_CACHE_HOME "
            "to a folder that can be written, or run `relibra calibrate --output cluster.toml` and set "
            "plan.cluster=cluster.toml"
        ) from error
