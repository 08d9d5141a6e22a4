"""Files of deployment plans: JSON that a server reads for its roles and micro-batches, with a SHA-256."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from relibra.errors import PlanError
from relibra.field_checks import build
from relibra.files import read_bounded, write_text
from relibra.planning.deployment.deployment_plan import DeploymentPlan

FORMAT, VERSION = "relibra deployment plan", 1
MAX_BYTES = 1 << 20


def write_deployment(path: Path | str, plan: DeploymentPlan) -> None:
    """Write a plan, whole or not at all, with what it predicts for readers that are not relibra.

    raises    PlanError for a plan that breaks a rule
    """
    plan.validate()
    body = {"format": FORMAT, "version": VERSION, **asdict(plan), "predicted": predicted(plan)}
    write_text(Path(path), json.dumps({**body, "sha256": _digest(body)}, indent=1, allow_nan=False) + "\n")


def read_deployment(path: Path | str) -> DeploymentPlan:
    """Return the plan in a file of `write_deployment`.

    raises    PlanError when the file is missing, of another format or version, damaged, or its plan breaks a rule
    """
    path = Path(path)
    body = _object(path)
    if body.get("format") != FORMAT:
        raise PlanError(f"{path} is no deployment plan: name a file that relibra serve plan --output wrote")
    if body.get("version") != VERSION:
        raise PlanError(
            f"{path} has version {body.get('version')!r}, this relibra reads {VERSION}: use the relibra that wrote it"
        )
    digest = body.pop("sha256", None)
    if digest != _digest(body):
        raise PlanError(f"{path} is damaged: its SHA-256 does not match its content; write it again")
    fields = {name: value for name, value in body.items() if name not in ("format", "version", "predicted")}
    plan = build(DeploymentPlan, fields, str(path), PlanError)
    plan.validate()
    return plan


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


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _object(path: Path) -> dict[str, Any]:
    text = read_bounded(path, MAX_BYTES, PlanError, "a deployment plan")
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{path} is not JSON ({error}): write the plan again") from error
    if not isinstance(body, dict):
        raise PlanError(f"{path} holds no JSON object: name a deployment plan")
    return body
