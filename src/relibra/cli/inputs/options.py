"""Options that several verbs share, each declared once: the fields of requests are annotated with them."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from relibra.planning.budget import MOST_SLOTS, PEER_SLOTS


class Order(StrEnum):
    """In which order samples fill micro-batches."""

    RECORDED = "recorded"
    SHUFFLED = "shuffled"


class Take(StrEnum):
    """Which micro-batches are planned."""

    SECOND_HALF = "second-half"
    ALL = "all"


class Dispatch(StrEnum):
    """How tokens reach ranks of other nodes."""

    FLAT = "flat"
    HIERARCHICAL = "hierarchical"


RunSettings = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RUN.toml] [KEY=VALUE]...",
        help="A TOML file (default: built-in settings), then dotted overrides; the last one wins.",
    ),
]
Source = Annotated[
    Path,
    typer.Argument(
        metavar="TRACE|RUN|RUN.toml",
        help="Trace folder, or .npz or .npy of per-token expert choices. Or folder or settings of a training run: its "
        "last recorded step is taken.",
    ),
]
NumExperts = Annotated[
    int | None,
    typer.Option(min=1, help="Experts per layer, where the format lacks it (.npz, .npy); default: next multiple of 8."),
]

Ranks = Annotated[int, typer.Option(min=1, max=1 << 15, metavar="R", help="Ranks of the expert-parallel group.")]
RanksPerNode = Annotated[
    int | None,
    typer.Option(min=1, metavar="G", help="Ranks on one node; default: those of the cluster, at most --ranks."),
]
ClusterName = Annotated[
    str, typer.Option("--cluster", metavar="NAME", help="Machine: h100x8, h800x8, ... or a TOML file.")
]
MachineDispatch = Annotated[
    Dispatch | None,
    typer.Option(
        "--dispatch",
        help="flat: a token goes to each rank that computes for it; hierarchical: it crosses to another node once and "
        "is forwarded there. Default: that of the cluster, flat for presets.",
    ),
]
Slots = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=MOST_SLOTS,
        metavar="B",
        help="Most spare expert slots per rank; default: as many as memory allows and as pay, "
        f"{PEER_SLOTS} for balancers that choose no number.",
    ),
]
MemoryGib = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=1 << 20,
        metavar="GIB",
        help="Most memory of a rank for slots of layers, which keep replicas over micro-batches; default: what --model "
        "leaves of a rank of --cluster. 0: one buffer for all layers.",
    ),
]
Tolerance = Annotated[
    float,
    typer.Option(
        min=0, max=10, metavar="SHARE", help="Accepted excess of the busiest rank over the lowest possible load."
    ),
]
Steps = Annotated[
    int,
    typer.Option(
        min=1, max=1 << 20, metavar="N", help="Steps that new homes serve: each step pays this part of the moves."
    ),
]
Pack = Annotated[
    bool, typer.Option("--pack/--no-pack", help="Samples may change their rank and micro-batch, where that pays.")
]
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
        help="Most tokens per rank in a micro-batch, as update.micro_batch_tokens of a run; a longer sample is alone "
        "on its rank. Default: that of the run, else 2048, at most half of the recording with --take second-half.",
    ),
]
MicroBatches = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=1 << 20,
        metavar="M",
        help="Draw samples of a short recording again, seeded, until they fill so many micro-batches.",
    ),
]
MiniBatches = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=1 << 20,
        metavar="N",
        help="Mini-batches (optimizer steps), as update.mini_batches of a run: samples stay in theirs. Default: those "
        "of the run, else 1.",
    ),
]
CutOrder = Annotated[
    Order,
    typer.Option(
        help="recorded: whole samples in recorded order, named groups in turn, or as the run trained them; shuffled: "
        "in random order."
    ),
]
Schedule = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Schedule of your trainer: .npz with micro_batch_S and rank_S, optional mini_batch_M and sample_ids. "
        "Default: these arrays in TRACE, if it is an .npz that has them; else samples are scheduled here.",
    ),
]
Seed = Annotated[int, typer.Option(min=0, metavar="N", help="Seed of shuffling and drawing.")]
TakenPart = Annotated[
    Take | None,
    typer.Option(
        help="second-half: plan the second half of the micro-batches, with the loads of the first as history; all: "
        "plan all, without history.  [default: all; compare: second-half where the schedule is made here, in one "
        "mini-batch]",
        show_default=False,
    ),
]

Balancer = Annotated[
    str, typer.Option(metavar="NAME", help="Balancer that makes the plan: a name that relibra compare lists.")
]

_SIZES = (
    "a name, a config.json, or HIDDENxWIDTH of one expert, such as 2880x2880; default: the model of the run, else "
    "Qwen3-30B-A3B."
)
Model = Annotated[
    str | None, typer.Option("--model", metavar="NAME", help=f"Model with the sizes for the seconds: {_SIZES}")
]

Demand = Annotated[
    Path | None, typer.Option("--demand", help="Demand of the plan; default: NAME.demand.safetensors beside it.")
]
Page = Annotated[Path | None, typer.Option("--html", metavar="PATH", help="Also write an HTML page.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def file_and_overrides(settings: list[str] | None) -> tuple[Path | None, list[str]]:
    """Return the TOML file of `RunSettings`, if the first word is no override, and the overrides."""
    words = settings or []
    return (Path(words[0]), words[1:]) if words and "=" not in words[0] else (None, words)
