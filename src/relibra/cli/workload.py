"""What `relibra plan` and `relibra compare` plan for: a trace cut into micro-batches, a machine, a model."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from relibra.cli.trace import Json, NumExperts, progress, refuse_other_experts
from relibra.errors import ConfigError

__all__ = ["Json", "NumExperts", "progress"]  # shared with the verbs on traces

if TYPE_CHECKING:
    from numpy import ndarray

    from relibra.cluster import Cluster
    from relibra.routing.demand import Demand


class Order(StrEnum):
    """How a trace is cut into micro-batches."""

    RECORDED = "recorded"
    SHUFFLED = "shuffled"


class Take(StrEnum):
    """Which micro-batches are planned."""

    SECOND_HALF = "second-half"
    ALL = "all"


class Measure(StrEnum):
    """What a plan is judged by."""

    SECONDS = "seconds"
    TOKENS = "tokens"


TracePath = Annotated[Path, typer.Argument(metavar="TRACE", help="Trace folder, or .npz of per-token expert choices.")]
Ranks = Annotated[int, typer.Option(min=1, max=1 << 15, metavar="R", help="Ranks of the expert-parallel group.")]
RanksPerNode = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="G", help="Ranks on one node; default: what the cluster has, but no more than --ranks."
    ),
]
ClusterName = Annotated[
    str, typer.Option("--cluster", metavar="NAME", help="Machine: h100x8, h800x8, ... or a TOML file.")
]
Slots = Annotated[int, typer.Option(min=0, max=1024, metavar="B", help="Spare expert slots per rank for replicas.")]
Model = Annotated[str, typer.Option(metavar="NAME", help="Model whose expert sizes price the plan, for the seconds.")]
OptionalModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="NAME",
        help="Model whose expert sizes price the plan; without, it is made for tokens and priced for Qwen3-30B-A3B.",
    ),
]
MicroBatchTokens = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=1 << 40,
        metavar="T",
        help="Tokens per micro-batch; default: 2048, less where that makes under eight.",
    ),
]
OrderOption = Annotated[
    Order, typer.Option(help="recorded: cut every T tokens, task sets take turns; shuffled: deal whole samples.")
]
Seed = Annotated[int, typer.Option(min=0, metavar="N", help="Seed of shuffling and of the annealing.")]
TakeOption = Annotated[
    Take, typer.Option(help="second-half: plan the later half of the micro-batches, the earlier is history.")
]
ObjectiveOption = Annotated[
    Measure, typer.Option(help="What plans are made for: modelled seconds, or tokens of the busiest ranks.")
]
OptionalObjective = Annotated[
    Measure | None,
    typer.Option(
        "--objective",
        help="What the plan is made for: modelled seconds (default with --model), or tokens of the busiest ranks.",
        show_default=False,
    ),
]
Page = Annotated[Path | None, typer.Option(metavar="PATH", help="Also write a page with pictures.")]
DEFAULT_MODEL = "qwen3-30b-a3b"


def open_step(
    path: Path, num_experts: int | None, *, ranks: int, tokens: int | None, order: Order, seed: int, take: Take
) -> tuple[Demand, ndarray | None]:
    """Read a trace, cut micro-batches, and return the step's demand and the loads of the micro-batches before it.

    returns   with `take` all there is no history: None
    raises    TraceError for a damaged trace, or when no micro-batch fills up; ConfigError when one half is empty
    """
    from dataclasses import replace

    import numpy as np

    from relibra.routing.micro_batches import cut_recorded, deal_samples, select_micro_batches
    from relibra.routing.readers import open_trace
    from relibra.routing.statistics import co_activation
    from relibra.routing.survey import default_micro_batch_tokens

    refuse_other_experts(path, num_experts)
    trace = open_trace(path, num_experts)
    tokens = tokens or default_micro_batch_tokens(trace.num_rows)
    if order is Order.RECORDED:
        demand = cut_recorded(trace, tokens, ranks)
    else:
        demand = deal_samples(trace, tokens, ranks, np.random.default_rng(seed))
    demand = replace(demand, pairs_LEE=co_activation(trace))
    if take is Take.ALL:
        return demand, None
    load_MLE = demand.load_MLE
    half = len(load_MLE) // 2
    if half == 0:
        raise ConfigError(
            f"{path} makes {len(load_MLE)} micro-batch of {tokens:,} tokens, which has no second half: choose smaller "
            "micro-batches, or --take all"
        )
    return select_micro_batches(demand, half), load_MLE[:half]


def open_cluster(name: str, ranks: int, ranks_per_node: int | None) -> Cluster:
    """Return a preset or the machine of a TOML file, with so many ranks.

    raises    ClusterError when it is unknown, damaged, or the ranks do not fill nodes evenly
    """
    from relibra.cluster import cluster_preset, read_cluster

    if name.endswith(".toml"):
        return read_cluster(Path(name)).with_ranks(ranks, ranks_per_node)
    return cluster_preset(name, ranks, ranks_per_node)


def size_in_words(demand: Demand, cluster: Cluster) -> str:
    """Say in one line what is planned."""
    assert demand.tokens_MLRE is not None, "needs a demand with a schedule"
    M, L, R, E = demand.tokens_MLRE.shape
    nodes = f"{cluster.num_nodes} node{'s' * (cluster.num_nodes > 1)} of {cluster.ranks_per_node}"
    return f"{M} micro-batches, {L} layers, {E} experts on {R} ranks ({nodes}, {cluster.name})"


def check_outputs(output: Path | None, page: Path | None) -> None:
    """Refuse, before minutes of planning, what could not be written after it.

    raises    ConfigError when a path is a folder, or a page is wanted and plotly is not installed
    """
    if page is not None:
        from relibra.reporting.pictures import plotly_figures

        plotly_figures()
    for path in (output, page):
        if path is not None and path.is_dir():
            raise ConfigError(f"{path} is a folder: name a file in it")
