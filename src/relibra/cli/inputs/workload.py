"""What `relibra plan` and `relibra compare` plan for: a trace cut into micro-batches, a machine, a model."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from relibra.cli.trace import Json, NumExperts, progress, refuse_other_experts
from relibra.errors import ConfigError
from relibra.planning.budget import DEFAULT_MODEL

__all__ = ["DEFAULT_MODEL", "Json", "NumExperts", "progress"]  # what all verbs take from one place

if TYPE_CHECKING:
    from numpy import ndarray

    from relibra.cluster import Cluster
    from relibra.planning.costs import ExpertShape
    from relibra.routing.demand import Demand
    from relibra.routing.trace import RoutingTrace


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
Model = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Model whose expert sizes price the plan, for the seconds; or HIDDENxWIDTH of an expert, like 2880x2880.",
    ),
]
OptionalModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="NAME",
        help="Model whose expert sizes price the plan, or HIDDENxWIDTH of an expert, like 2880x2880; without, the plan "
        "is made for tokens and priced for Qwen3-30B-A3B.",
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


_MANY_IDLE = 0.1
"""Share of ranks without tokens in a micro-batch from which it is said."""


class Step(NamedTuple):
    """What is planned: the demand, the loads of the micro-batches before it (None: no history), and how it was cut."""

    demand: Demand
    history_MLE: ndarray | None
    cut: str


def open_step(
    path: Path,
    num_experts: int | None,
    machine: Cluster,
    ranks: int,
    ranks_per_node: int | None,
    *,
    cut: tuple[int | None, Order, int, Take],
) -> tuple[Cluster, Step]:
    """Read a trace, give the machine its ranks, and cut the trace into micro-batches for them.

    cut       tokens per micro-batch (None: by the size of the trace), order, seed, and which of them are planned
    raises    TraceError for a damaged trace, or when no micro-batch fills up; ConfigError when the ranks do not fit
              experts or nodes, or when one half is empty
    """
    from relibra.routing.readers import open_trace

    refuse_other_experts(path, num_experts)
    trace = open_trace(path, num_experts)
    machine = fit_cluster(machine, trace.num_experts, ranks, ranks_per_node)
    return machine, _cut_step(trace, path, ranks, *cut)


def _cut_step(
    trace: RoutingTrace, path: Path, ranks: int, tokens: int | None, order: Order, seed: int, take: Take
) -> Step:
    import numpy as np

    from relibra.routing.micro_batches import cut_recorded, deal_samples, select_micro_batches
    from relibra.routing.trace_statistics import default_micro_batch_tokens

    tokens = tokens or default_micro_batch_tokens(trace.num_rows)
    if order is Order.RECORDED:
        demand = cut_recorded(trace, tokens, ranks)
        cut = f"cut every {plural(tokens, 'token')} in recorded order, {_task_sets_in_words(trace, tokens)}"
    else:
        demand = deal_samples(trace, tokens, ranks, np.random.default_rng(seed))
        cut = f"whole samples dealt to micro-batches of at most {plural(tokens, 'token')}, seed {seed}"
    if take is Take.ALL:
        return Step(demand, None, cut)
    load_MLE = demand.load_MLE
    half = len(load_MLE) // 2
    if half == 0:
        raise ConfigError(
            f"{path} makes {plural(len(load_MLE), 'micro-batch')} of {plural(tokens, 'token')}, which has no second "
            "half: choose smaller micro-batches, or --take all"
        )
    return Step(select_micro_batches(demand, half), load_MLE[:half], f"{cut}; the second half is planned")


def _task_sets_in_words(trace: RoutingTrace, tokens: int) -> str:
    """Say whether task sets take turns, and if not, why."""
    import numpy as np

    from relibra.routing.micro_batches import task_sets

    sets = task_sets(trace, tokens)
    if len(sets) > 1:
        return f"{len(sets)} task sets take turns"
    names = len(trace.group_names)
    if names < 2:
        return "one task set"
    group_T = np.repeat(np.asarray(trace.group_ids), np.diff(trace.offsets))
    small = sum(int((group_T == group).sum()) < tokens for group in range(names))
    if small:
        return f"one task set: {small} of {names} groups {'is' if small == 1 else 'are'} smaller than a micro-batch"
    without = int((np.asarray(trace.group_ids) < 0).sum())
    return f"one task set: {plural(without, 'sample')} {'has' if without == 1 else 'have'} no group"


def open_cluster(name: str) -> Cluster:
    """Return a preset or the machine of a TOML file, with the ranks it has.

    raises    ClusterError when it is unknown or damaged
    """
    from relibra.cluster import cluster_preset, read_cluster

    return read_cluster(Path(name)) if name.endswith(".toml") else cluster_preset(name)


def fit_cluster(cluster: Cluster, num_experts: int, ranks: int, ranks_per_node: int | None) -> Cluster:
    """Return the same machine with so many ranks.

    raises    ConfigError when the ranks do not share the experts evenly, or do not fill nodes
    """
    per_node = ranks_per_node or cluster.ranks_per_node
    allowed = [r for r in range(1, num_experts + 1) if num_experts % r == 0 and r % min(r, per_node) == 0]
    listed = ", ".join(map(str, allowed))
    if num_experts % ranks:
        raise ConfigError(
            f"--ranks {ranks}: {num_experts} experts cannot be shared evenly by {plural(ranks, 'rank')}; allowed are "
            f"{listed} (divisors of {num_experts} that fill nodes of {per_node})"
        )
    if ranks % min(ranks, per_node):
        nodes = ", ".join(str(g) for g in range(1, ranks + 1) if ranks % g == 0)
        raise ConfigError(
            f"--ranks {ranks} does not fill nodes of {plural(per_node, 'rank')} evenly: choose --ranks from {listed}, "
            f"or --ranks-per-node from {nodes}"
        )
    return cluster.with_ranks(ranks, ranks_per_node)


def open_expert(name: str) -> ExpertShape:
    """Return the expert of a known model, or of the sizes HIDDENxWIDTH.

    raises    ConfigError for anything else
    """
    from relibra.planning.costs import EXPERT_SHAPES, ExpertShape

    sizes = re.fullmatch(r"([0-9]{1,9})x([0-9]{1,9})", name)
    if sizes:
        if not int(sizes[1]) or not int(sizes[2]):
            raise ConfigError(f"--model {name!r}: HIDDEN and WIDTH of an expert must be at least 1")
        return ExpertShape(hidden=int(sizes[1]), width=int(sizes[2]))
    if name not in EXPERT_SHAPES:
        raise ConfigError(
            f"--model {name!r} is unknown: allowed are {', '.join(EXPERT_SHAPES)}, or HIDDENxWIDTH of one of its "
            "experts, for example 2880x2880"
        )
    return EXPERT_SHAPES[name]


def plural(count: int, noun: str) -> str:
    """Write a number with its noun.

    >>> plural(1, "micro-batch"), plural(2048, "token")
    ('1 micro-batch', '2,048 tokens')
    """
    ending = "" if count == 1 else "es" if noun.endswith("ch") else "s"
    return f"{count:,} {noun}{ending}"


def size_in_words(demand: Demand, cluster: Cluster) -> str:
    """Say in one line what is planned."""
    assert demand.tokens_MLRE is not None, "needs a demand with a schedule"
    M, L, R, E = demand.tokens_MLRE.shape
    nodes = f"{plural(cluster.num_nodes, 'node')} of {cluster.ranks_per_node}, {cluster.name}"
    sizes = ", ".join((plural(M, "micro-batch"), plural(L, "layer"), plural(E, "expert")))
    return f"{sizes} on {plural(R, 'rank')} ({nodes})"


def tokens_per_rank(demand: Demand, ranks: int) -> float:
    """Return the tokens of a mean rank and micro-batch."""
    load_MLE = demand.load_MLE
    return float(load_MLE[:, 0].sum() / (demand.top_k or 1) / max(1, len(load_MLE)) / ranks)


def idle_ranks_in_words(demand: Demand) -> str:
    """Say so where many ranks have no tokens in a mean micro-batch; empty where few have none."""
    assert demand.tokens_MLRE is not None, "needs a demand with a schedule"
    idle = float((demand.tokens_MLRE.sum(axis=(1, 3)) == 0).mean())
    if idle < _MANY_IDLE:
        return ""
    return (
        f"{idle:.0%} of ranks have no tokens in a mean micro-batch: fewer --ranks or larger --micro-batch-tokens would "
        "be closer to a step that is trained"
    )


def inputs_of(trace: Path, cluster: str, previous: Path | None = None) -> list[tuple[str, Path]]:
    """Return what is read, and what each is called on the command line."""
    inputs = [("TRACE", trace)]
    inputs += [("--cluster", Path(cluster))] * cluster.endswith(".toml")
    return inputs + ([] if previous is None else [("--previous", previous)])


def check_outputs(outputs: Sequence[tuple[str, Path]], inputs: Sequence[tuple[str, Path]]) -> None:
    """Refuse, before anything is read, what could not be written after minutes of planning or would destroy an input.

    outputs, inputs   what each is called on the command line, and where it is
    raises            ConfigError when an output is a folder or cannot be written, when it is an input or lies in a
                      trace folder, or when two outputs are one file
    """
    for number, (name, path) in enumerate(outputs):
        _check_writable(name, path)
        for other, taken in inputs:
            if _same_file(path, taken) or (taken.is_dir() and taken.resolve() in path.resolve().parents):
                where = "is" if _same_file(path, taken) else "lies in"
                raise ConfigError(f"{name} {path} {where} the input {other} {taken}: choose another place to write to")
        for other, taken in outputs[:number]:
            if _same_file(path, taken):
                raise ConfigError(f"{other} and {name} are the same file {path}: choose another place for one of them")


def _same_file(one: Path, other: Path) -> bool:
    if one.resolve() == other.resolve():
        return True
    return one.exists() and other.exists() and one.samefile(other)


def _check_writable(name: str, path: Path) -> None:
    if path.is_dir():
        raise ConfigError(f"{name} {path} is a folder: name a file in it")
    parent = next(folder for folder in path.absolute().parents if folder.exists())
    if not parent.is_dir():
        raise ConfigError(f"{name} {path} cannot be written: {parent} is not a folder")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{name} {path} cannot be written: no permission to write in {parent}")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Tell what the file system says of a file that is written, by the name that was given for it."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or os.strerror(error.errno or errno.EIO)
        raise ConfigError(f"{path} cannot be written: {reason}") from error
