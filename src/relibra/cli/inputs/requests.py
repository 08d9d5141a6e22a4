"""Requests: a frozen dataclass per command, whose fields are its command-line options."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, get_type_hints

from relibra.cli.inputs import options

Request = TypeVar("Request")


def takes(request: type[Request]) -> Callable[[Callable[[Request], None]], Callable[..., None]]:
    """Turn a function of one request into a typer command that has an option for each field of the request.

    request    a keyword-only dataclass; its fields are annotated with typer arguments and options
    """

    def decorate(verb: Callable[[Request], None]) -> Callable[..., None]:
        def command(**values: Any) -> None:
            verb(request(**values))

        command.__doc__ = verb.__doc__
        command.__annotations__ = get_type_hints(request, include_extras=True)
        command.__signature__ = _signature(request, command.__annotations__)  # type: ignore[attr-defined]
        return command

    return decorate


def _signature(request: type, hints: dict[str, Any]) -> inspect.Signature:
    parameters = inspect.signature(request).parameters.values()
    return inspect.Signature([parameter.replace(annotation=hints[parameter.name]) for parameter in parameters])


@dataclass(frozen=True, kw_only=True)
class WorkloadRequest:
    """A trace cut into micro-batches for the ranks of a machine."""

    source: options.Source
    ranks: options.Ranks
    ranks_per_node: options.RanksPerNode = None
    cluster: options.ClusterName = "h100x8"
    micro_batch_tokens: options.MicroBatchTokens = None
    order: options.CutOrder = options.Order.RECORDED
    seed: options.Seed = 0
    take: options.TakenPart = options.Take.ALL
    num_experts: options.NumExperts = None


@dataclass(frozen=True, kw_only=True)
class PlanningRequest(WorkloadRequest):
    """A workload to make plans for, and an HTML page about them."""

    slots: options.Slots = 1
    html: options.Page = None
    as_json: options.Json = False


@dataclass(frozen=True, kw_only=True)
class SimulationRequest(WorkloadRequest):
    """One training step, planned by one balancer and simulated."""

    slots: options.Slots = 1
    balancer: options.Balancer = "relibra"
    objective: options.PlanObjective = options.Objective.SECONDS
    model: options.Model = None
    pipeline_stages: options.PipelineStages = 1
    recompute: options.Recompute = False
