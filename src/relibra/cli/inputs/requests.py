"""Requests: a frozen dataclass per command, whose fields are its command-line options."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, get_type_hints

from relibra.cli.inputs import options
from relibra.errors import ConfigError
from relibra.planning.budget import Budget

Request = TypeVar("Request")


def takes(request: type[Request]) -> Callable[[Callable[[Request], None]], Callable[..., None]]:
    """Turn a function of one request into a typer command that has an option for each field of the request.

    request    a keyword-only dataclass; its fields are annotated with typer arguments and options
    """

    def decorate(verb: Callable[[Request], None]) -> Callable[..., None]:
        def command(**values: Any) -> None:
            verb(request(**values))

        command.__name__, command.__doc__ = verb.__name__, verb.__doc__
        command.__annotations__ = hints = get_type_hints(request, include_extras=True)
        parameters = [
            one.replace(annotation=hints[name]) for name, one in inspect.signature(request).parameters.items()
        ]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return command

    return decorate


def check_one_balancer(verb: str, balancer: str) -> None:
    """Raise a ConfigError for a list of balancers in a command that takes one."""
    if "," in balancer:
        raise ConfigError(
            f"--balancer {balancer}: relibra {verb} takes one balancer; relibra compare and relibra sweep take several"
        )


@dataclass(frozen=True, kw_only=True)
class WorkloadRequest:
    """The samples of a trace in micro-batches for the ranks of a machine, and what a plan of them may use."""

    source: options.Source
    ranks: options.Ranks
    ranks_per_node: options.RanksPerNode = None
    cluster: options.ClusterName = "h100x8"
    dispatch: options.MachineDispatch = None
    micro_batch_tokens: options.MicroBatchTokens = None
    mini_batches: options.MiniBatches = None
    micro_batches: options.MicroBatches = None
    schedule: options.Schedule = None
    order: options.CutOrder = options.Order.RECORDED
    seed: options.Seed = 0
    take: options.TakenPart = options.Take.ALL
    num_experts: options.NumExperts = None
    slots: options.Slots = None
    memory_gib: options.MemoryGib = None
    tolerance: options.Tolerance = Budget.tolerance
    steps: options.Steps = Budget.steps_served
    pack: options.Pack = Budget.pack_samples
    model: options.Model = None


@dataclass(frozen=True, kw_only=True)
class PlanningRequest(WorkloadRequest):
    """A workload to make plans for, and an HTML page about them."""

    html: options.Page = None
    as_json: options.Json = False


@dataclass(frozen=True, kw_only=True)
class SimulationRequest(WorkloadRequest):
    """One training step, planned by one balancer and simulated."""

    balancer: options.Balancer = "relibra"
    pipeline_stages: options.PipelineStages = 1
    recompute: options.Recompute = False
