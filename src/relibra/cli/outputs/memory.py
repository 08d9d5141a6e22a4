"""The memory of a run as a table: GiB of a GPU by part and phase."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from relibra.cli.outputs.terminal import print_table, print_text

if TYPE_CHECKING:
    from relibra.rl.memory.estimate import Estimate
    from relibra.rl.memory.estimator import Help


def print_estimate(found: Estimate, helps: Sequence[Help], *, as_json: bool) -> None:
    """Print an estimate, and what helps where it does not fit."""
    from relibra.rl.memory.estimate import GIB, PARTS
    from relibra.rl.memory.estimator import refusal

    helping = {one.setting: one.saves for one in helps}
    if as_json:
        typer.echo(json.dumps({**found.as_json(), "helps": helping}))
        return
    shown = found.peaks
    print_text(f"{found.model}; rank 0 of {found.ranks}, micro-batches of {found.tokens:,} tokens; GiB of a GPU:")
    rows: list[dict[str, object]] = []
    for part in PARTS:
        if any(one.parts.get(part, 0) >= GIB / 200 for one in shown):
            held = {one.phase: one.parts.get(part, 0.0) for one in shown}
            rows.append({"": part, **{phase: f"{nbytes / GIB:.2f}" for phase, nbytes in held.items()}})
    rows.append({"": "sum", **{one.phase: f"{one.total / GIB:.2f}" for one in shown}})
    print_table(rows)
    peak = found.peak
    print_text(f"most in {peak.phase}: {peak.total / GIB:.2f}, when {peak.line or 'it begins'} takes its part")
    if found.device_bytes is not None:
        print_text(
            f"{found.device_name}: {found.device_bytes / GIB:.1f} GiB, {found.usable_bytes / GIB:.1f} to be used; "
            f"{found.free_bytes / GIB:.1f} left for slots of plans"
        )
    else:
        print_text("no GPU here to compare with: plan.cluster=h100x8 names one")
    if found.choice:
        print_text(str(found.choice))
    print_text(f"host memory of a node: {found.host_bytes / GIB:.1f} GiB")
    if found.offload_bytes >= GIB / 20:
        print_text(
            f"offloading: {found.offload_bytes / GIB:.1f} GiB in an optimizer step, {found.offload_seconds:.2f} s"
        )
    print_text("it fits" if found.fits else f"it does not fit: {refusal(found, list(helps))}")
