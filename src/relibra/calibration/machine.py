"""The machine that a run plans for: `plan.cluster` as a `Cluster`."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from relibra.cluster import PRESETS, Cluster, cluster_preset, read_cluster, write_cluster
from relibra.environment import cache_folder
from relibra.errors import ClusterError
from relibra.planning.costs.expert_shape import EXPERT_SHAPES

if TYPE_CHECKING:
    import torch

_OF_GPU = {"GB200": "nvl72", "H200": "h200x8", "H800": "h800x8", "H100": "h100x8", "H20": "h20x8", "4090": "rtx4090x8"}
"""Preset of a GPU whose name holds these letters; the first that fits."""
CPU_PRESET = "laptop"
_FIGURES = "with hides_copies"
"""Part of the name of a kept measurement: one without these figures is made again."""
UNKNOWN_GPU_PRESET = "h100x8"


def find_cluster(name: str, device: torch.device, num_ranks: int, ranks_per_node: int) -> Cluster:
    """Return the machine of `plan.cluster`, with the ranks of the run.

    name     a preset, a .toml file, "measure" (`measured_cluster` has been called before), or "auto"
    raises   ClusterError for an unknown name, an invalid file, or "measure" without a measurement
    """
    if name.endswith(".toml"):
        cluster = read_cluster(Path(name))
    elif name == "measure":
        if not (path := measurement_path()).exists():
            raise ClusterError(
                f"plan.cluster 'measure': no measurement of this machine at {path}, and under torchrun none is made; "
                "run `relibra calibrate --output cluster.toml` once and set plan.cluster=cluster.toml"
            )
        cluster = read_cluster(path)
    else:
        cluster = cluster_preset(_preset_of(device) if name == "auto" else name)
    return cluster.with_ranks(num_ranks, ranks_per_node)


def _preset_of(device: torch.device) -> str:
    if device.type != "cuda":
        return CPU_PRESET
    import torch

    words = torch.cuda.get_device_name(device)
    return next((preset for part, preset in _OF_GPU.items() if part in words), UNKNOWN_GPU_PRESET)


def measurement_path() -> Path:
    """Return the file that keeps the measurement of this machine, in the user's cache folder."""
    from relibra.calibration.measurement import choose_job, describe_machine

    job = choose_job(None, EXPERT_SHAPES["qwen3-30b-a3b"], quick=True)
    machine = describe_machine(job)
    words = f"{_FIGURES} {machine.name} {machine.memory_bytes} {machine.words.rpartition(',')[0]}"  # without the date
    return cache_folder() / f"{machine.name}-{hashlib.sha256(words.encode()).hexdigest()[:12]}.toml"


def measure_cluster() -> Path:
    """Measure this machine, unless that was done before, and return the file with the result.

    With one GPU there is no other rank to exchange with: the links are those of the preset of this GPU.
    """
    path = measurement_path()
    if path.exists():
        return path
    import torch

    from relibra.calibration.fit import fit_cluster
    from relibra.calibration.measurement import choose_job, describe_machine, measure_machine

    expert = EXPERT_SHAPES["qwen3-30b-a3b"]
    job = choose_job(None, expert, quick=True)
    links = PRESETS[_preset_of(torch.device("cuda", 0))] if job.ranks == 1 else None
    found = fit_cluster(measure_machine(job), describe_machine(job), expert, links)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_cluster(path, replace(found.cluster, name=path.stem))
    return path
