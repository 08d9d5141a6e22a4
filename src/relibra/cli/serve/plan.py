"""`relibra serve plan`: how many GPUs of which kind for attention and experts, or better not apart."""

from __future__ import annotations

import os
import platform
import re
import shlex
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from relibra.cli.inputs import options
from relibra.cli.inputs.models import open_model
from relibra.cli.inputs.requests import takes, within
from relibra.cli.outputs.files import check_outputs, named, writing
from relibra.cli.outputs.terminal import print_note, print_result, progress
from relibra.cli.serve.simulated import RUN_COLUMNS, Arrivals, simulate_decision
from relibra.cli.serve.simulated import figures as run_figures
from relibra.environment import host_memory
from relibra.errors import ConfigError

if TYPE_CHECKING:
    from relibra.planning.deployment.accelerator import Accelerator
    from relibra.planning.deployment.colocated import ColocatedPlan
    from relibra.planning.deployment.decision import Decision
    from relibra.planning.deployment.deployment_plan import DeploymentPlan
    from relibra.planning.deployment.performance import Efficiency
    from relibra.planning.deployment.served_model import ServedModel

DEFAULT_GPUS = ("h20", "l40s")
PAIR_COLUMNS = (
    *("attention", "experts", "micro_batches", "requests", "attention_seconds", "expert_seconds", "hop_seconds"),
    *("iteration_seconds", "gpus", "limit", "tokens_per_second_per_unit"),
)
COLOCATED_COLUMNS = (
    *("kind", "gpu", "ways", "groups", "micro_batches", "requests", "iteration_seconds", "gpus", "limit"),
    "tokens_per_second_per_unit",
)
"""Figures of the tables in a terminal; --json has all."""


class Objective(StrEnum):
    """What tokens per second are divided by."""

    PRICE = "price"
    WATTS = "watts"
    GPUS = "gpus"


@dataclass(frozen=True, kw_only=True)
class ServePlanRequest:
    """A model, GPUs to choose from, and the service that is asked for.

    model MODEL  mixtral-8x22b, dbrx, scaled-moe, a name that other commands take as --model, or a config.json.
    gpus NAME,...  GPUs to choose from: h20, l40s, l20, a800, h800, or of --accelerators. Default: h20,l40s
        and all of --accelerators; with --measured worker processes of this machine.
    accelerators FILE  TOML with a table per GPU of yours: price, memory, speeds (docs/serving.md).
    tpot TIME  Most time per output token, such as 150ms or 0.15s.
    context TOKENS  Mean tokens of a request while it decodes, prompt included.
    skew RATIO  Rows of the busiest expert node (GPUs that share its experts) / rows of the mean one.
    objective  What tokens per second are divided by.
    max_gpus N  Most GPUs of one instance; 0: any number; for workers of this machine, its cores.
    simulate  Also simulate decode steps of the best plans.
    trace TRACE  With --simulate: recorded routes of this model; default: uniform ones.
    copies N  With --simulate: spare expert slots of a node, for copies.
    measured FILE  TOML with measured seconds of nodes, of relibra serve measure or your own (docs/serving.md).
    rate R  With --simulate: also R requests per second, at random.
    lengths PROMPT,RESPONSE  With --rate: median tokens of prompts and of responses.
    timeline FILE  With --simulate: write four layers of the last simulated step for Perfetto.
    output FILE  Write the best plan, JSON.
    """

    model: Annotated[str, typer.Argument()]
    gpus: str | None = None
    accelerators: Path | None = None
    tpot: str = "150ms"
    context: Annotated[float, within(1)] = 650.0
    skew: Annotated[float, within(1, 1e6)] = 1.0
    objective: Objective = Objective.PRICE
    max_gpus: Annotated[int, within(0)] = 0
    simulate: Annotated[bool, typer.Option("--simulate")] = False
    trace: Path | None = None
    copies: Annotated[int, within(0, 64)] = 0
    measured: Path | None = None
    rate: Annotated[float | None, within(1e-6, 1e9)] = None
    lengths: str = "571,159"
    timeline: Path | None = None
    output: Annotated[Path | None, typer.Option("--output", "-o")] = None
    as_json: options.Json = False

    def choices(self) -> tuple[list[Accelerator], Efficiency]:
        """Return the GPUs to choose from, each once, and what they reach; measured ones are nodes of one GPU."""
        from relibra.planning.deployment.accelerator import accelerator, read_accelerators
        from relibra.planning.deployment.measured_seconds import read_measured
        from relibra.planning.deployment.performance import Efficiency, measured_worker

        measured = None if self.measured is None else read_measured(self.measured)
        if measured is not None and self.gpus is None and self.accelerators is None:
            worker, used = measured_worker(measured, platform.node() or "here", host_memory(free=False) or 1.0)
            return [worker], used
        more = read_accelerators(self.accelerators) if self.accelerators else {}
        names = [*DEFAULT_GPUS, *more]
        if self.gpus is not None:
            names = [name.strip().lower() for name in self.gpus.split(",") if name.strip()]
        try:
            gpus = [accelerator(name, more) for name in dict.fromkeys(names)]
        except ConfigError as error:
            raise ConfigError(f"--gpus: {error}") from error
        if measured is None:
            return gpus, Efficiency()
        if len(gpus) > 1:
            raise ConfigError(f"--measured {self.measured} is of one GPU: name it alone (--gpus), not {len(gpus)}")
        return [replace(gpu, node_size=1) for gpu in gpus], Efficiency(measured=measured, launch_seconds=0)


@takes(ServePlanRequest)
def plan(request: ServePlanRequest) -> None:
    """Search which GPUs compute attention and which experts, and compare with not separating them; all is modelled.

    Gain is (tokens per second / objective) with separation / that without; seconds of attention, experts and hop (one
    way between them) are those of one micro-batch in one layer. Limit is what keeps the batch from growing. Of
    simulated runs, shares of time are those of the mean node and of the busiest NIC, bytes those a GPU sends in a step.

    Example: relibra serve plan dbrx --gpus h20,l40s --tpot 150ms
    """
    from relibra.planning.deployment.decision import decide
    from relibra.planning.deployment.deployment_files import write_deployment
    from relibra.planning.deployment.search import SearchSpace
    from relibra.planning.deployment.service_level import ServiceLevel

    inputs = [*named("--accelerators", request.accelerators), *named("--trace", request.trace)]
    inputs += named("--measured", request.measured)
    check_outputs([*named("--output", request.output), *named("--timeline", request.timeline)], inputs)
    if not request.simulate and any((request.trace, request.copies, request.rate, request.timeline)):
        raise ConfigError("--trace, --copies, --rate and --timeline are of a simulation: add --simulate")
    arrivals = None if request.rate is None else Arrivals.read(request.rate, request.lengths)
    model, (gpus, used) = open_served_model(request.model), request.choices()
    cores = 0 if request.measured is None or request.gpus else len(os.sched_getaffinity(0))
    space = SearchSpace(objective=request.objective.value, most_gpus=request.max_gpus or cores)
    seconds = read_seconds(request.tpot)
    level = ServiceLevel(seconds_per_token=seconds, context=request.context, expert_skew=request.skew)
    with progress(f"searching deployments of {model.name}"):
        decision = decide(model, level, gpus, space, used)
    if request.output is not None:
        if decision.best is None:
            print_note(f"{request.output} is not written: no deployment with attention and experts apart fits")
        else:
            with writing(request.output):
                write_deployment(request.output, decision.best)
    runs = {}
    if request.simulate:
        if decision.best is None and (request.copies or request.rate):
            print_note("--copies and --rate are not simulated: no deployment with attention and experts apart fits")
        with progress(f"simulating {model.name}; the first run compiles kernels"):
            runs = simulate_decision(decision, request.trace, request.copies, arrivals)
        if request.timeline is not None:
            with writing(request.timeline):
                next(iter(runs.values())).timeline().save_perfetto(request.timeline)
    if request.measured is not None:
        print_note("colocated is one measured node that does both in turn: its seconds added, no messages")
    facts = {
        "model": model.name,
        "sizes": {"layers": model.layers, "experts": model.experts, "top_k": model.top_k},
        "seconds_per_token": level.seconds_per_token,
        "context": level.context,
        **figures(decision),
        "serve_best_pair": serve_command(request.model, decision.best) if request.measured and decision.best else None,
        "simulated": [run_figures(*run) for run in runs.items()],
    }
    columns = {"pairs": PAIR_COLUMNS, "colocated": COLOCATED_COLUMNS, "simulated": RUN_COLUMNS}
    print_result(facts, as_json=request.as_json, columns=columns)


def serve_command(model: str, plan: DeploymentPlan) -> str:
    """Return the command that serves a model, or the folder of its file, with the workers and the cache of a plan."""
    folder, m = shlex.quote(str(Path(model).parent if Path(model).is_file() else model)), plan.micro_batches
    nodes = f"--attention {plan.attention.nodes} --experts {plan.experts.nodes} --micro-batches {m}"
    tokens = max(65536, int(2 * plan.level.context * m * plan.rows))  # requests end at most at twice their mean
    return f"relibra serve {folder} {nodes} --max-batch {m * plan.rows} --kv-tokens {tokens}"


def open_served_model(name: str) -> ServedModel:
    """Return the sizes of a named model, or of a config.json (or its folder); raises ConfigError for anything else."""
    from relibra.planning.deployment.served_model import PAPER_MODELS
    from relibra.simulation.serving.served_shape import served_model

    if name in PAPER_MODELS:
        return PAPER_MODELS[name]
    shape = open_model(name, option="MODEL", also=tuple(PAPER_MODELS))
    if shape.experts == 1:
        raise ConfigError(f"MODEL {name} has only the sizes of one expert: name a whole model, or a config.json")
    return served_model(shape)


def read_seconds(text: str) -> float:
    """Return the seconds of a time, written as a number and its unit.

    raises    ConfigError for anything else, also a number alone, and for a time out of range

    >>> read_seconds("150ms"), read_seconds("1s")
    (0.15, 1.0)
    """
    from relibra.planning.deployment.service_level import LEAST_SECONDS, MOST_SECONDS

    found = re.fullmatch(r"\s*([0-9]{1,9}(?:\.[0-9]{0,9})?)\s*(ms|s|us|)\s*", text)
    if found is None or float(found[1]) == 0:
        raise ConfigError(f"--tpot {text!r}: it must be a time above 0 with its unit, such as 150ms or 0.15s")
    if not found[2]:
        raise ConfigError(f"--tpot {text!r} has no unit: allowed are us, ms and s, such as 150ms or 0.15s")
    seconds = float(found[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[found[2]]
    if not LEAST_SECONDS <= seconds <= MOST_SECONDS:
        raise ConfigError(f"--tpot {text!r} is out of range: it must be from 1us to {MOST_SECONDS:g}s")
    return seconds


def figures(decision: Decision) -> dict[str, Any]:
    """Return a decision as JSON; every figure is modelled."""
    return {
        "label": "model",
        "disaggregate": decision.disaggregate,
        "gain": decision.gain,
        "objective": decision.objective,
        "pairs": [_apart(decision, plan) for plan in decision.pairs],
        "colocated": [_together(decision, plan) for plan in decision.colocated],
    }


def _apart(decision: Decision, plan: DeploymentPlan) -> dict[str, Any]:
    from relibra.planning.deployment.deployment_files import predicted

    return {
        **{
            side: {"gpu": pool.accelerator.name, "ways": pool.ways, "nodes": pool.nodes}
            for side, pool in (("attention", plan.attention), ("experts", plan.experts))
        },
        "experts_per_node": plan.experts_per_node,
        "micro_batches": plan.micro_batches,
        "micro_batch_requests": plan.rows,
        "expert_rows": plan.expert_rows,
        "limit": plan.limit,
        "tokens_per_second_per_unit": decision.figure(plan),
        **predicted(plan),
    }  # fmt: skip


def _together(decision: Decision, plan: ColocatedPlan) -> dict[str, Any]:
    return {
        **{name: getattr(plan, name) for name in ("kind", "micro_batches", "gpus", "limit", "iteration_seconds")},
        "gpu": plan.pool.accelerator.name,
        "ways": plan.pool.ways,
        "groups": plan.pool.nodes,
        "micro_batch_requests": plan.rows,
        "requests": plan.batch,
        "tokens_per_second_per_unit": decision.figure(plan),
    }
