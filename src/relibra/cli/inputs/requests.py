"""Requests: a frozen dataclass per command. Its fields are the options of the command, its docstring their help."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import typer
from typer.models import ParameterInfo

from relibra.cli.inputs import options
from relibra.errors import ConfigError
from relibra.planning.budget import MOST_SLOTS, PEER_SLOTS, Budget

Request = TypeVar("Request")

_ENTRY = re.compile(r"^(\w+)(?: (\S+))?  +(.+(?:\n +.+)*)\n?", re.MULTILINE)
"""Name of an option, its placeholder, and its help: a line of a docstring with the indented lines below it."""


def takes(request: type[Request]) -> Callable[[Callable[[Request], None]], Callable[..., None]]:
    """Turn a function of one request into a typer command that has an option for each field of the request.

    request    a keyword-only dataclass; lines of its docstring are the name of a field, a placeholder and a help text
    """
    return lambda verb: _command(lambda **values: verb(request(**values)), verb, request)


def documented(verb: Callable[..., None]) -> Callable[..., None]:
    """Turn a function into a typer command; lines of its docstring are its parameters, as in a request (`takes`)."""
    return _command(lambda **values: verb(**values), verb, verb)


def _command(command: Callable[..., None], verb: Callable[..., None], owner: Any) -> Callable[..., None]:
    """Give `command` the name and help text of `verb`, and an option for each field or parameter of `owner`."""
    kinds = reversed(owner.__mro__) if isinstance(owner, type) else [owner]
    helps = {
        name: (metavar or None, " ".join(text.split()))
        for kind in kinds
        for name, metavar, text in _ENTRY.findall(inspect.cleandoc(kind.__doc__ or ""))
    }
    hints = get_type_hints(owner, include_extras=True)
    parameters = [
        item.replace(annotation=_with_help(hints[name], *helps.get(name, (None, None))))
        for name, item in inspect.signature(owner).parameters.items()
    ]
    command.__name__ = verb.__name__
    command.__doc__ = re.sub(r"\n{3,}", "\n\n", _ENTRY.sub("", inspect.cleandoc(verb.__doc__ or "")))
    command.__annotations__ = {item.name: item.annotation for item in parameters}
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def _with_help(hint: Any, metavar: str | None, text: str | None) -> Any:
    """Return the type of an option with a placeholder and a help text, unless it has its own."""
    kind, *extra = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    info = next((copy(item) for item in extra if isinstance(item, ParameterInfo)), typer.Option())
    info.metavar, info.help = info.metavar or metavar, info.help or text
    return Annotated[kind, info]


def within(least: float, most: float | None = None) -> Any:
    """Return an option whose number has to be in a range."""
    return typer.Option(min=least, max=most)


def check_one_balancer(verb: str, balancer: str) -> None:
    """Raise a ConfigError for a list of balancers in a command that takes one."""
    if "," in balancer:
        raise ConfigError(
            f"--balancer {balancer}: relibra {verb} takes one balancer; relibra compare and relibra sweep take several"
        )


_SLOTS = (
    f"Most spare expert slots per rank; default: as many as fit into memory and save time, {PEER_SLOTS} for balancers "
    "that choose no number."
)


@dataclass(frozen=True, kw_only=True)
class WorkloadRequest:
    """The samples of a trace in micro-batches for the ranks of a machine, and what a plan of them may use.

    source TRACE|RUN|RUN.toml  Trace folder, or .npz or .npy of per-token expert choices. Or folder or settings of a
        training run: its last recorded step is taken.
    ranks R  Ranks of the expert-parallel group.
    ranks_per_node G  Ranks on one node; default: those of the cluster, at most --ranks.
    dispatch  flat: a token goes to each rank that computes for it; hierarchical: it crosses to another node once and is
        forwarded there. Default: that of the cluster, flat for presets.
    micro_batch_tokens T  Most tokens per rank in a micro-batch, as update.micro_batch_tokens of a run; a longer sample
        is alone on its rank. Default: that of the run, else 2048, at most half of the recording with --take
        second-half.
    mini_batches N  Mini-batches (optimizer steps), as update.mini_batches of a run: samples stay in theirs. Default:
        those of the run, else 1.
    micro_batches M  Draw samples of a short recording again, seeded, until they fill so many micro-batches.
    schedule FILE  Schedule of your trainer: .npz with micro_batch_S and rank_S, optional mini_batch_M and sample_ids.
        Default: these arrays in TRACE, if it is an .npz that has them; else samples are scheduled here.
    order  recorded: whole samples in recorded order; where groups have names, one of each group in turn; of a run, as
        it trained them. shuffled: in random order.
    seed N  Seed of shuffling and drawing.
    memory_gib GIB  Most memory of a rank for slots of layers, which keep replicas over micro-batches; default: what
        --model leaves of a rank of --cluster. 0: one buffer for all layers.
    tolerance SHARE  Accepted excess of the busiest rank over the lowest possible load.
    steps N  Steps that new homes serve: each step pays 1/N of the moves.
    pack  Samples may change their rank and micro-batch, where that pays.
    """

    source: Annotated[Path, typer.Argument()]
    ranks: Annotated[int, within(1, 1 << 15)]
    ranks_per_node: Annotated[int | None, within(1)] = None
    cluster: options.ClusterName = "h100x8"
    dispatch: options.Dispatch | None = None
    micro_batch_tokens: Annotated[int | None, within(1, 1 << 40)] = None
    mini_batches: Annotated[int | None, within(1, 1 << 20)] = None
    micro_batches: Annotated[int | None, within(1, 1 << 20)] = None
    schedule: Path | None = None
    order: options.Order = options.Order.RECORDED
    seed: Annotated[int, within(0)] = 0
    take: options.TakenPart = options.Take.ALL
    num_experts: options.NumExperts = None
    slots: Annotated[int | None, typer.Option(min=0, max=MOST_SLOTS, metavar="B", help=_SLOTS)] = None
    memory_gib: Annotated[float | None, within(0, 1 << 20)] = None
    tolerance: Annotated[float, within(0, 10)] = Budget.tolerance
    steps: Annotated[int, within(1, 1 << 20)] = Budget.steps_served
    pack: bool = Budget.pack_samples
    model: options.Model = None


@dataclass(frozen=True, kw_only=True)
class PlanningRequest(WorkloadRequest):
    """A workload to make plans for, and an HTML page about them.

    html PATH  Also write an HTML page.
    """

    html: Path | None = None
    as_json: options.Json = False


@dataclass(frozen=True, kw_only=True)
class SimulationRequest(WorkloadRequest):
    """One training step, planned by one balancer and simulated.

    pipeline_stages N  Pipeline stages, each on ranks of its own.
    stage_cut  even: stages of even numbers of expert layers; best: those that end first, counting dense layers and the
        output matrix.
    pipeline  1f1b: ranks keep a stage; round: parts of the layers, forward and backward apart, go in turn to
        --pipeline-stages groups of ranks, with weights from host memory.
    recompute  Compute activations again in the backward pass instead of keeping them.
    """

    balancer: options.Balancer = "relibra"
    pipeline_stages: Annotated[int, within(1, 1 << 15)] = 1
    stage_cut: Literal["even", "best"] = "even"
    pipeline: Literal["1f1b", "round"] = "1f1b"
    recompute: Annotated[bool, typer.Option("--recompute")] = False


@dataclass(frozen=True, kw_only=True)
class SimulateRequest(SimulationRequest):
    """A simulated step, and where to write it.

    timeline PATH  Also write the first micro-batch as a trace for ui.perfetto.dev.
    iteration  Also print where the seconds of an iteration go, beside those that the run measured, and what each lever
        changes: passes of old log-probs, activations kept, rollouts ahead, prompts once.
    faults  Also print what to do when a rank is lost, by the time until the next loss, and what cover costs. Steps take
        as long as the run measured, if it had --ranks ranks.
    restart_seconds S  From a loss to the first step of processes that start again.
    checkpoint_every N  Steps between checkpoints; a restart repeats half as many. Default: those of the run, else 10.
    groups Q  Groups of ranks that train alike, as data parallelism: the peers of a lost rank may take its work.
    """

    timeline: Path | None = None
    iteration: Annotated[bool, typer.Option("--iteration")] = False
    faults: Annotated[bool, typer.Option("--faults")] = False
    restart_seconds: Annotated[float, within(0)] = 60.0
    checkpoint_every: Annotated[int | None, within(1)] = None
    groups: Annotated[int, within(1, 1 << 15)] = 1
    as_json: options.Json = False
