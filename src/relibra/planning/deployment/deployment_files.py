"""Files of deployment plans and placements: JSON that a server reads for its workers, with a SHA-256."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from relibra.errors import PlanError
from relibra.field_checks import build
from relibra.files import read_bounded, write_text
from relibra.planning.deployment.deployment_plan import DeploymentPlan
from relibra.planning.deployment.expert_placement import ExpertPlacement

FORMAT, PLACEMENT_FORMAT, VERSION = "relibra deployment plan", "relibra expert placement", 1
MAX_BYTES = 1 << 20
Record = TypeVar("Record", DeploymentPlan, ExpertPlacement)


def write_deployment(path: Path | str, plan: DeploymentPlan) -> None:
    """Write a plan, whole or not at all, and its predictions, for other programs: relibra does not read them back.

    raises    PlanError for a plan that breaks a rule
    """
    plan.validate()
    body = {"format": FORMAT, "version": VERSION, **asdict(plan), "predicted": predicted(plan)}
    _write(Path(path), body, indent=1)


def read_deployment(path: Path | str) -> DeploymentPlan:
    """Return the plan in a file of `write_deployment`.

    raises    PlanError when the file is missing, of another format or version, damaged, or its plan breaks a rule
    """
    return _read(Path(path), FORMAT, "relibra serve plan", DeploymentPlan)


def write_expert_placement(path: Path | str, placement: ExpertPlacement) -> None:
    """Write a placement of experts, whole or not at all; raises PlanError where it breaks a rule."""
    placement.validate()
    _write(Path(path), {"format": PLACEMENT_FORMAT, "version": VERSION, **asdict(placement)}, indent=None)


def read_expert_placement(path: Path | str) -> ExpertPlacement:
    """Return the placement in a file of `write_expert_placement`; raises PlanError as `read_deployment` does."""
    return _read(Path(path), PLACEMENT_FORMAT, "relibra serve place", ExpertPlacement)


def predicted(plan: DeploymentPlan) -> dict[str, float]:
    """Return figures of a plan by name; seconds, tokens per second, shares. All are modelled."""
    return {
        "attention_seconds": float(plan.stage.attention),
        "expert_seconds": float(plan.stage.experts),
        "hop_seconds": float(plan.stage.hop),
        "iteration_seconds": plan.iteration_seconds,
        "tokens_per_second": plan.tokens_per_second,
        "tokens_per_second_per_gpu": plan.tokens_per_second / plan.gpus,
        "tokens_per_second_per_price": plan.tokens_per_second / plan.price,
        "tokens_per_second_per_watt": plan.tokens_per_second / plan.watts,
        "bubble": plan.bubble,
        "requests": plan.batch,
        "gpus": plan.gpus,
    }


def _write(path: Path, body: dict[str, Any], indent: int | None) -> None:
    write_text(path, json.dumps({**body, "sha256": _digest(body)}, indent=indent, allow_nan=False) + "\n")


def _read(path: Path, kind: str, command: str, record: type[Record]) -> Record:
    """Return what a file of this format holds."""
    body = _object(path)
    if body.get("format") != kind:
        raise PlanError(f"{path} is no {kind.removeprefix('relibra ')}: name a file that {command} --output wrote")
    if body.get("version") != VERSION:
        raise PlanError(
            f"{path} has version {body.get('version')!r}, this relibra reads {VERSION}: use the relibra that wrote it"
        )
    if body.pop("sha256", None) != _digest(body):
        raise PlanError(f"{path} is damaged: its SHA-256 does not match its content; write it again")
    fields = {name: value for name, value in body.items() if name not in ("format", "version", "predicted")}
    found = build(record, fields, str(path), PlanError)
    found.validate()
    return found


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _object(path: Path) -> dict[str, Any]:
    text = read_bounded(path, MAX_BYTES, PlanError, "a file of relibra serve")
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{path} is not JSON ({error}): write it again") from error
    if not isinstance(body, dict):
        raise PlanError(f"{path} holds no JSON object: name a file of relibra serve")
    return body
