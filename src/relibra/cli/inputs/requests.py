"""Requests: a frozen dataclass per command, whose fields are its command-line options."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from relibra.cli.inputs import options
from relibra.errors import ConfigError
from relibra.planning.budget import MOST_SLOTS, PEER_SLOTS, Budget

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
            item.replace(annotation=hints[name]) for name, item in inspect.signature(request).parameters.items()
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

    source: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE|RUN|RUN.toml",
            help="Trace folder, or .npz or .npy of per-token expert choices. Or folder or settings of a training run: "
            "its last recorded step is taken.",
        ),
    ]
    ranks: Annotated[int, typer.Option(min=1, max=1 << 15, metavar="R", help="Ranks of the expert-parallel group.")]
    ranks_per_node: Annotated[
        int | None,
        typer.Option(min=1, metavar="G", help="Ranks on one node; default: those of the cluster, at most --ranks."),
    ] = None
    cluster: options.ClusterName = "h100x8"
    dispatch: Annotated[
        options.Dispatch | None,
        typer.Option(
            "--dispatch",
            help="flat: a token goes to each rank that computes for it; hierarchical: it crosses to another node once "
            "and is forwarded there. Default: that of the cluster, flat for presets.",
        ),
    ] = None
    micro_batch_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1 << 40,
            metavar="T",
            help="Most tokens per rank in a micro-batch, as update.micro_batch_tokens of a run; a longer sample is "
            "alone on its rank. Default: that of the run, else 2048, at most half of the recording with --take "
            "second-half.",
        ),
    ] = None
    mini_batches: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1 << 20,
            metavar="N",
            help="Mini-batches (optimizer steps), as update.mini_batches of a run: samples stay in theirs. Default: "
            "those of the run, else 1.",
        ),
    ] = None
    micro_batches: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1 << 20,
            metavar="M",
            help="Draw samples of a short recording again, seeded, until they fill so many micro-batches.",
        ),
    ] = None
    schedule: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Schedule of your trainer: .npz with micro_batch_S and rank_S, optional mini_batch_M and sample_ids. "
            "Default: these arrays in TRACE, if it is an .npz that has them; else samples are scheduled here.",
        ),
    ] = None
    order: Annotated[
        options.Order,
        typer.Option(
            help="recorded: whole samples in recorded order, named groups in turn, or as the run trained them; "
            "shuffled: in random order."
        ),
    ] = options.Order.RECORDED
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Seed of shuffling and drawing.")] = 0
    take: options.TakenPart = options.Take.ALL
    num_experts: options.NumExperts = None
    slots: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=MOST_SLOTS,
            metavar="B",
            help="Most spare expert slots per rank; default: as many as memory allows and as pay, "
            f"{PEER_SLOTS} for balancers that choose no number.",
        ),
    ] = None
    memory_gib: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1 << 20,
            metavar="GIB",
            help="Most memory of a rank for slots of layers, which keep replicas over micro-batches; default: what "
            "--model leaves of a rank of --cluster. 0: one buffer for all layers.",
        ),
    ] = None
    tolerance: Annotated[
        float,
        typer.Option(
            min=0, max=10, metavar="SHARE", help="Accepted excess of the busiest rank over the lowest possible load."
        ),
    ] = Budget.tolerance
    steps: Annotated[
        int,
        typer.Option(
            min=1, max=1 << 20, metavar="N", help="Steps that new homes serve: each step pays this part of the moves."
        ),
    ] = Budget.steps_served
    pack: Annotated[
        bool, typer.Option("--pack/--no-pack", help="Samples may change their rank and micro-batch, where that pays.")
    ] = Budget.pack_samples
    model: options.Model = None


@dataclass(frozen=True, kw_only=True)
class PlanningRequest(WorkloadRequest):
    """A workload to make plans for, and an HTML page about them."""

    html: Annotated[Path | None, typer.Option("--html", metavar="PATH", help="Also write an HTML page.")] = None
    as_json: options.Json = False


@dataclass(frozen=True, kw_only=True)
class SimulationRequest(WorkloadRequest):
    """One training step, planned by one balancer and simulated."""

    balancer: options.Balancer = "relibra"
    pipeline_stages: Annotated[
        int, typer.Option(min=1, max=1 << 15, metavar="N", help="Pipeline stages, each on ranks of its own.")
    ] = 1
    recompute: Annotated[
        bool,
        typer.Option("--recompute", help="Compute activations again in the backward pass instead of keeping them."),
    ] = False
