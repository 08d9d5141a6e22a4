"""Measured and estimated memory of a run, after its second step."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from relibra.rl.memory.estimate import ESTIMATE_FILE, GIB, Estimate
from relibra.rl.run.ranks import largest_over_ranks


def compare_memory(run: Path, device: torch.device) -> str | None:
    """Return estimated and measured memory of the fullest GPU in a line; None: there is no estimate. Collective."""
    if device.type == "cpu":
        return None
    measured = largest_over_ranks(torch.get_device_module(device).max_memory_allocated(device))
    try:
        estimated = Estimate.from_json(json.loads((run / ESTIMATE_FILE).read_text(encoding="utf-8"))).peak.total
    except (OSError, ValueError):  # with --force, Ray or torchrun, or of another version
        return None
    figures = f"estimated {estimated / GIB:.1f} GiB, measured {measured / GIB:.1f}"
    return f"memory of a GPU: {figures}, difference {measured / estimated - 1:+.1%}"
