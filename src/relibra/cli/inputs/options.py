"""Options that several verbs share, each declared once: the fields of requests are annotated with them."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


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
NumExperts = Annotated[
    int | None,
    typer.Option(min=1, help="Experts per layer, where the format lacks it (.npz, .npy); default: next multiple of 8."),
]

ClusterName = Annotated[
    str, typer.Option("--cluster", metavar="NAME", help="Machine: h100x8, h800x8, ... or a TOML file.")
]

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
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def file_and_overrides(settings: list[str] | None) -> tuple[Path | None, list[str]]:
    """Return the TOML file of `RunSettings`, if the first word is no override, and the overrides."""
    words = settings or []
    return (Path(words[0]), words[1:]) if words and "=" not in words[0] else (None, words)
