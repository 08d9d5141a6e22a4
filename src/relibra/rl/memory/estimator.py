"""`estimate_memory`: the memory of a run, by dry runs in a process of their own; and what helps. Imports no torch."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from shutil import which
from typing import Any

from relibra.cluster import PRESETS, read_cluster
from relibra.environment import environment_of_dry_run, first_visible_gpu, host_memory, module_program
from relibra.errors import ConfigError
from relibra.rl.config.run_config import RunConfig
from relibra.rl.memory.estimate import GIB, Estimate

_log = logging.getLogger(__name__)

_SMI = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
_SHARE_OF_A_DATA_SHEET = 0.99
"""Share of the memory in a data sheet, read as GiB, that a program finds on the GPU."""


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Bytes of a GPU (None: there is none), its name or that of the cluster, and free host bytes (None: unknown)."""

    nbytes: float | None
    name: str
    host: float | None = None


def device_memory(config: RunConfig) -> DeviceMemory:
    """Return the memory of the device of a run: of `plan.cluster` if it names one, else of the first GPU here."""
    name = config.plan.cluster
    if name in PRESETS:
        whole = round(PRESETS[name].memory_bytes / 1e9)
        return DeviceMemory(nbytes=_SHARE_OF_A_DATA_SHEET * whole * GIB, name=name)
    if name.endswith(".toml"):
        return DeviceMemory(nbytes=float(read_cluster(Path(name)).memory_bytes), name=name)
    return first_gpu() or DeviceMemory(nbytes=None, name="")


def first_gpu() -> DeviceMemory | None:
    """Return the first visible GPU as nvidia-smi describes it, without a context on it; None: there is none.

    None for a part of a GPU (MIG) too: nvidia-smi tells the memory of the whole.
    """
    first = first_visible_gpu()
    if first == "" or (first or "").startswith("MIG-") or which(_SMI[0]) is None:
        return None
    try:
        command = (*_SMI, *((f"--id={first}",) if first else ()))
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.splitlines()
        name, mebibytes = found[0].rsplit(",", 1)
        return DeviceMemory(nbytes=float(mebibytes) * 2**20, name=name.strip(), host=host_memory(free=True))
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):  # no driver, or no GPU
        return None


@dataclass(frozen=True, kw_only=True)
class Help:
    """A setting, what it saves of the fullest phase in bytes, and whether the run then fits."""

    setting: str
    saves: float
    fits: bool


def estimate_memory(
    config: RunConfig, memory: DeviceMemory | None = None, *, whole: bool = False
) -> tuple[Estimate, list[Help]]:
    """Return the estimate of a run, and if it does not fit, settings that save memory, each with all before it.

    The list ends with the first setting that lets the run fit. A process of its own makes the dry runs.

    memory   None: of the device of the run (`device_memory`)
    whole    run all layers, instead of a few that are extrapolated
    raises   ConfigError where the model cannot be run so
    """
    memory = memory or device_memory(config)
    request = {"config": config.model_dump(mode="json"), "memory": asdict(memory), "whole": whole}
    done = subprocess.run(
        module_program("relibra.rl.memory.worker"),
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=False,
        env=environment_of_dry_run(),
    )
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        answer = {"error": (done.stderr.strip().splitlines() or ["its process ended"])[-1][:300]}
    if "error" in answer:
        raise ConfigError(f"the memory of the run cannot be estimated: {answer['error']}")
    return Estimate.from_json(answer["estimate"]), [Help(**one) for one in answer["helps"]]


def check_memory(config: RunConfig, local_ranks: int | None = None) -> Estimate | None:
    """Return the estimate of a run of the user's own model on the GPUs here; None: no GPUs, or it cannot be made.

    Where settings are chosen by plan, runs of any model have one, also without GPUs.

    local_ranks   on this machine; None: all. Of several machines the host memory is not checked
    raises        ConfigError where it does not fit
    """
    gpu = first_gpu() if config.model.path else None
    by_plan = "plan" in (config.update.activations, config.update.offload) or not config.update.micro_batch_tokens
    if gpu is None and not by_plan:
        return None
    if gpu is not None and local_ranks not in (None, config.parallel.ranks):
        gpu = replace(gpu, host=None)
    memory = gpu or device_memory(config)
    print(f"estimating the memory of the run{memory.name and f' on {memory.name}'}", file=sys.stderr, flush=True)
    try:
        found, helps = estimate_memory(config, memory)
    except ConfigError as error:  # what is wrong with the model itself ends the run when it is loaded
        print(f"warning: {error}", file=sys.stderr, flush=True)
        return None
    if gpu is not None and not found.fits:
        raise ConfigError(f"{refusal(found, helps)}; --force trains all the same")
    return found


def with_estimate(config: RunConfig, found: Estimate | None, *, warns: bool = True) -> RunConfig:
    """Return the configuration with the settings that an estimate chooses; `plan.memory_gib` is at most what it leaves.

    found   None: there is no estimate; what a plan would choose gets its default, with a warning
    """
    by_plan = {"update.offload": "off"} if config.update.offload == "plan" else dict[str, Any]()
    if not config.update.micro_batch_tokens:
        by_plan["update.micro_batch_tokens"] = type(config.update).model_fields["micro_batch_tokens"].default
    if by_plan and found is None and warns:
        usual = " ".join(f"{name}={value}" for name, value in by_plan.items())
        why = "the run has no estimate of its memory (none can be made, or --force, Ray or torchrun)"
        _log.warning("settings are chosen by plan, and %s: %s", why, usual)
    if found is not None and found.choice_line:
        print(found.choice_line, file=sys.stderr, flush=True)
    config = with_settings(config, by_plan | dict(found.chosen if found else {}))
    if not config.follows_plans or found is None or found.device_bytes is None:
        return config
    free, given = round(found.free_bytes / GIB, 2), config.plan.memory_gib
    return with_setting(config, "plan.memory_gib", free if given is None else min(given, free)) or config


def with_settings(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """Return the configuration with other values."""
    for name, value in values.items():
        config = with_setting(config, name, value) or config
    return config


def with_setting(config: RunConfig, name: str, value: Any) -> RunConfig | None:
    """Return the configuration with another value; None: it has that value."""
    section, key = name.split(".")
    part = getattr(config, section)
    if getattr(part, key) == value:
        return None
    return config.model_copy(update={section: part.model_copy(update={key: value})})


def refusal(found: Estimate, helps: list[Help]) -> str:
    """Return one sentence on a run that does not fit: what it needs, what there is, and what helps."""
    peak = found.peak
    if found.host_available is not None and peak.total <= found.usable_bytes:
        host = f"{found.host_bytes / GIB:.1f} GiB of host memory, {found.host_available / GIB:.1f} are free"
        return f"the ranks of a node need {host}: lower update.offload, or use more nodes"
    largest = sorted(peak.parts, key=lambda part: -peak.parts[part])[:3]
    most = ", ".join(f"{part} {peak.parts[part] / GIB:.1f}" for part in largest)
    needs = f"a GPU needs {peak.total / GIB:.1f} GiB in {peak.phase} ({most})"
    has = f"{found.device_name} has {(found.device_bytes or 0) / GIB:.1f}, {found.usable_bytes / GIB:.1f} to be used"
    saved = [f"{one.setting} saves {one.saves / GIB:.1f}" for one in helps]
    together = "with all of these it fits" if helps and helps[-1].fits else "use more GPUs (parallel.ranks)"
    return f"{needs}, {has}: {', '.join([*saved, together])}"
