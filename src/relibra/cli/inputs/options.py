"""Options that several verbs share, each declared once: the fields of requests are annotated with them."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Order(StrEnum):
    """How a trace is cut into micro-batches."""

    RECORDED = "recorded"
    SHUFFLED = "shuffled"


class Take(StrEnum):
    """Which micro-batches are planned."""

    SECOND_HALF = "second-half"
    ALL = "all"


class Objective(StrEnum):
    """What a plan minimises."""

    SECONDS = "seconds"
    TOKENS = "tokens"


Source = Annotated[
    Path,
    typer.Argument(
        metavar="TRACE|RUN|RUN.toml",
        help="Trace folder, or .npz of per-token expert choices. Or folder or settings of a training run: its last "
        "recorded step is taken.",
    ),
]
NumExperts = Annotated[
    int | None,
    typer.Option(min=1, help="Experts per layer, where the format lacks it (.npz); default: next multiple of 8."),
]

Ranks = Annotated[int, typer.Option(min=1, max=1 << 15, metavar="R", help="Ranks of the expert-parallel group.")]
RanksPerNode = Annotated[
    int | None,
    typer.Option(min=1, metavar="G", help="Ranks on one node; default: those of the cluster, at most --ranks."),
]
ClusterName = Annotated[
    str, typer.Option("--cluster", metavar="NAME", help="Machine: h100x8, h800x8, ... or a TOML file.")
]
Slots = Annotated[int, typer.Option(min=0, max=1024, metavar="B", help="Spare expert slots per rank for replicas.")]
PipelineStages = Annotated[
    int, typer.Option(min=1, max=1 << 15, metavar="N", help="Pipeline stages, each on ranks of its own.")
]
Recompute = Annotated[
    bool, typer.Option("--recompute", help="Compute activations again in the backward pass instead of keeping them.")
]

MicroBatchTokens = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=1 << 40,
        metavar="T",
        help="Tokens per micro-batch; default: 2048, or less so that there are at least eight micro-batches.",
    ),
]
CutOrder = Annotated[
    Order,
    typer.Option(help="recorded: cut every T tokens, task sets alternate; shuffled: deal whole samples at random."),
]
Seed = Annotated[int, typer.Option(min=0, metavar="N", help="Seed of shuffling and annealing.")]
TakenPart = Annotated[
    Take,
    typer.Option(
        help="second-half: plan the second half of the micro-batches, with the loads of the first as history; all: "
        "plan all, without history."
    ),
]

Balancer = Annotated[
    str,
    typer.Option(metavar="NAME", help="Balancer that makes the plan: a name that relibra compare lists, or auto."),
]
PlanObjective = Annotated[
    Objective, typer.Option(help="What a plan minimises: modelled seconds, or tokens of the busiest ranks.")
]
OptionalObjective = Annotated[
    Objective | None,
    typer.Option(
        "--objective",
        help="What a plan minimises: modelled seconds (default with --model), or tokens of the busiest ranks.",
        show_default=False,
    ),
]

_SIZES = (
    "a name, a config.json, or HIDDENxWIDTH of one expert, such as 2880x2880; default: the model of the run, else "
    "Qwen3-30B-A3B."
)
Model = Annotated[
    str | None, typer.Option("--model", metavar="NAME", help=f"Model with the sizes for the seconds: {_SIZES}")
]
PlannedModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="NAME",
        help=f"Model with the sizes for the seconds: {_SIZES} Only with --model the plan minimises seconds.",
    ),
]

Page = Annotated[Path | None, typer.Option("--html", metavar="PATH", help="Also write an HTML page.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
