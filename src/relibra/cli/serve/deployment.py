"""Workers that a deployment plan asks for, for the model that is served."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from relibra.cli.serve.plan import open_served_model
from relibra.errors import ConfigError


class Workers(NamedTuple):
    """Numbers of attention workers, expert workers and micro-batches."""

    attention: int
    experts: int
    micro_batches: int


ALONE = Workers(1, 1, 2)
"""Without a plan."""


def planned_workers(path: Path | None, model: Path) -> Workers:
    """Return a worker for each node of a plan; without a plan one of each and two micro-batches.

    model     folder that is served
    raises    PlanError for a file that is no plan; ConfigError when it is of another model
    """
    if path is None:
        return ALONE
    from relibra.planning.deployment.deployment_files import read_deployment

    plan, served = read_deployment(path), open_served_model(str(model))
    sizes = [(one.layers, one.experts, one.top_k, one.hidden) for one in (plan.model, served)]
    if sizes[0] != sizes[1]:
        planned, found = (f"{L} layers, {K} of {E} experts, hidden {H}" for L, E, K, H in sizes)
        raise ConfigError(
            f"--plan {path} is of {plan.model.name!r} ({planned}), {model} has {found}: make a plan of this model with "
            f"relibra serve plan {model} --output FILE"
        )
    return Workers(plan.attention.nodes, plan.experts.nodes, plan.micro_batches)
