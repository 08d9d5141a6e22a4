"""`Estimate`: bytes of a rank by phase and part, extrapolated from dry runs of a few layers. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import msgspec

from relibra.planning.activation_choice import ActivationChoice

GIB = 2**30
ESTIMATE_FILE = "memory.json"
"""In the folder of a run on GPUs."""
RESERVE = 0.1
"""Share of the device memory for what no ledger sees: context, buffers of communication, fragmentation."""
LAYERS = "update of layers"
"""Phase of layers in the update, apart from the loss ("update") where a plan decides what layers keep."""
PHASES = (
    *("load", "rollout", "recompute", "reference", "values", "update values"),
    *("update", LAYERS, "optimizer", "relocate", "sync"),
)
PARTS = (
    *("weights", "gradients", "moments", "activations", "logits", "slots", "buffers"),
    *("reference", "critic", "copy", "cache", "host", "page-locked"),
)
"""In the order in which they are shown. buffers: of FSDP's gathers and reductions; slots: of replicas."""

Peaks = dict[str, dict[str, dict[str, int]]]
"""By phase and line of code that makes storages: bytes of each part right after that line, where they sum to most."""


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """What a dry run of some layers counted on rank 0.

    device, host         peaks of the storages of each
    traffic              bytes between host and device, by phase and target, as "update to host"
    waits                of the host for the device, in planned passes: kind, line, phase, whether between layers; how
                         often
    mixed                operations on tensors of two devices
    saved, token_slots   of `StepRun`
    """

    layers: int
    device: Peaks
    host: Peaks
    traffic: Mapping[str, int]
    waits: list[tuple[str, str, str, bool, int]]
    mixed: list[str]
    saved: list[tuple[float, float]] = field(default_factory=list)
    token_slots: int = 0


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Parts of a phase when it holds most, in bytes, and the line that made the last of them."""

    phase: str
    parts: Mapping[str, float]
    line: str

    @property
    def total(self) -> float:
        """Return the sum of the parts."""
        return sum(self.parts.values())


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Memory of a rank in a run.

    model           name and layers
    ranks, tokens   of the run; of a micro-batch
    peaks           of the device, by phase, in the order of a step
    host_bytes      of all ranks of a node together
    device_bytes    memory of the device; None: not known
    device_name     what has this memory: `plan.cluster`, else the first GPU here; "" if there is none
    offload_bytes, offload_seconds   between host and device in an optimizer step, both ways together; at the rate of
                    `plan.cluster`
    host_available  of the machine, for the ranks of a node; None: not known
    activations, choice   with `update.activations` "plan": the figures of `ActivationMemory`; what layers keep here
    added_seconds   of a step: copies of offloading, less what `update.activations` "plan" saves; if the
                    size of micro-batches is chosen, also the passes of the update (label `model`)
    chosen          settings that this estimate is of, where a plan chooses them
    other           the next best of them; other_seconds: its `added_seconds`, None: it does not fit
    """

    model: str
    ranks: int
    tokens: int
    peaks: tuple[Peak, ...]
    host_bytes: float
    device_bytes: float | None
    device_name: str
    offload_bytes: float = 0.0
    offload_seconds: float = 0.0
    host_available: float | None = None
    activations: Mapping[str, Any] | None = None
    choice: ActivationChoice | None = None
    added_seconds: float = 0.0
    chosen: Mapping[str, Any] = field(default_factory=dict)
    other: Mapping[str, Any] = field(default_factory=dict)
    other_seconds: float | None = None

    @property
    def peak(self) -> Peak:
        """Return the phase that holds most."""
        return max(self.peaks, key=lambda one: one.total)

    @property
    def usable_bytes(self) -> float:
        """Return the device memory that a run may fill."""
        return (1 - RESERVE) * (self.device_bytes or float("inf"))

    @property
    def fits(self) -> bool:
        """Return whether it fits the device, and the host if its memory is known."""
        fits_host = self.host_available is None or self.host_bytes <= self.host_available
        return self.peak.total <= self.usable_bytes and fits_host

    @property
    def free_bytes(self) -> float:
        """Return what the fullest phase leaves for resident slots, or another program; 0 where it does not fit."""
        return max(0.0, self.usable_bytes - self.peak.total) if self.device_bytes else 0.0

    @property
    def choice_line(self) -> str:
        """Return the settings that a plan chose, in a line; "": it does not choose, or nothing fits."""
        if not self.chosen or not self.fits:
            return ""
        chosen, other = (" ".join(f"{name}={way[name]}" for name in way) for way in (self.chosen, self.other))
        if self.other_seconds is None:
            return f"{chosen} ({other} does not fit)" if other else chosen
        return f"{chosen} (-{self.other_seconds - self.added_seconds:.3g} s a step against {other})"

    def as_json(self) -> dict[str, Any]:
        """Return the figures as JSON."""
        return {**asdict(self), "peak_bytes": self.peak.total, "fits": self.fits, "free_bytes": self.free_bytes}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Estimate:
        """Return the estimate of `as_json`; raises `msgspec.ValidationError`."""
        return msgspec.convert(body, cls)


def choose_estimate(found: Sequence[Estimate]) -> Estimate:
    """Return the estimate that fits with the fewest seconds, and the next best; the first, if none fits."""
    best, *others = sorted(found, key=lambda one: (not one.fits, one.added_seconds if one.fits else 0.0))
    if not others:
        return best
    return replace(best, other=others[0].chosen, other_seconds=others[0].added_seconds if others[0].fits else None)


def extrapolate(first: Peaks, second: Peaks, layers: tuple[int, int], whole: int) -> tuple[Peak, ...]:
    """Return the peaks of a model of `whole` layers, from those of models with fewer.

    The bytes at each line of code are linear in the number of layers; which line has the most may change with it.

    layers   of the two runs; equal where there is one run, of the whole model
    """
    found = []
    for phase in sorted(second, key=lambda one: PHASES.index(one) if one in PHASES else len(PHASES)):
        if phase not in first:
            continue
        lines = []
        for line in second[phase].keys() & first[phase].keys():
            few, more = first[phase][line], second[phase][line]
            parts = {}
            for part in sorted(few.keys() | more.keys(), key=lambda one: PARTS.index(one) if one in PARTS else 99):
                per_layer = (more.get(part, 0) - few.get(part, 0)) / max(1, layers[1] - layers[0])
                parts[part] = max(0.0, few.get(part, 0) + per_layer * (whole - layers[0]))
            per_layer = (sum(more.values()) - sum(few.values())) / max(1, layers[1] - layers[0])
            total = max(0.0, sum(few.values()) + per_layer * (whole - layers[0]))  # a part that shrinks was cut at 0
            parts = {part: nbytes * total / (sum(parts.values()) or 1.0) for part, nbytes in parts.items()}
            lines.append(Peak(phase=phase, parts=parts, line=line))
        found.append(max(lines, key=lambda one: (one.total, one.line)))
    return tuple(found)
