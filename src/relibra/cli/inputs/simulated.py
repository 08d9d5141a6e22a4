"""What `relibra simulate` and `relibra sweep` share: where routes come from, whose sizes, and one simulated step."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.console import Console

from relibra.cli.inputs import workload
from relibra.cli.trace import visible
from relibra.errors import ConfigError

if TYPE_CHECKING:
    from numpy import ndarray

    from relibra.cluster import Cluster
    from relibra.planning.budget import Budget
    from relibra.planning.plan import StepPlan
    from relibra.routing.demand import Demand
    from relibra.simulation import Execution, MemoryUse, ModelShape, SimulatedStep

Source = Annotated[
    Path,
    typer.Argument(
        metavar="RUN.toml|RUN|TRACE",
        help="Settings or folder of a training run, whose last recorded step is taken; or a trace folder, or .npz.",
    ),
]
ModelName = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="NAME",
        help="Model whose sizes are simulated: a name, a config.json, or HIDDENxWIDTH of an expert; default: what the "
        "run trained, else Qwen3-30B-A3B.",
    ),
]

Recompute = Annotated[
    bool, typer.Option("--recompute", help="Run layers forward again in the backward pass instead of keeping all.")
]


class Routes(NamedTuple):
    """Recorded routes: where they lie, the config.json of the model that was routed ("": not known), and in words."""

    trace: Path
    config: str
    words: str


def find_routes(source: Path) -> Routes:
    """Take a trace as it is; of a run's settings or folder the last recorded step.

    raises    ConfigError when a run has recorded nothing
    """
    if source.suffix == ".toml":
        from relibra.rl.config.run_config import load_config

        run = load_config(source).run
        folders = [run.folder / run.name, *sorted(run.folder.glob(f"{run.name}-*"), key=lambda path: path.name)]
        recorded = [folder for folder in folders if _steps(folder)]
        if not recorded:
            raise ConfigError(
                f"{source}: the run has no recorded routes in {folders[0] / 'traces'}: train first (relibra train "
                f"{source}), or name a trace"
            )
        return _of_run(recorded[-1])
    if (source / "traces").is_dir() or (source / "config.json").is_file():
        if not _steps(source):
            raise ConfigError(f"{source} is the folder of a run without recorded routes: it has no traces/step-*")
        return _of_run(source)
    return Routes(source, "", "")


def _steps(run: Path) -> list[Path]:
    return sorted((run / "traces").glob("step-*"))


def _of_run(run: Path) -> Routes:
    last, config = _steps(run)[-1], run / "policy" / "config.json"
    number = int(last.name.removeprefix("step-"))
    return Routes(last, str(config) if config.is_file() else "", f"step {number} of run {run.name}")


def open_model(name: str) -> ModelShape:
    """Return the sizes of a known model, of a config.json (or the folder it is in), or around an expert's sizes.

    raises    ConfigError for anything else
    """
    from relibra.simulation import MODEL_SHAPES, ModelShape, model_shape_from_config

    if name in MODEL_SHAPES:
        return MODEL_SHAPES[name]
    if re.fullmatch(r"[0-9]{1,9}x[0-9]{1,9}", name):
        expert = workload.open_expert(name)
        heads = max(1, expert.hidden // 128)
        return ModelShape(
            name=name, moe_layers=1, hidden=expert.hidden, query_heads=heads, kv_heads=heads, head_dim=128, experts=1,
            top_k=1, expert=expert, vocabulary=1,
        )  # fmt: skip
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    if not path.is_file() and (path.suffix == ".json" or "/" in name):
        raise ConfigError(f"--model {name}: there is no file {path}: give the path of a config.json")
    if not path.is_file():
        raise ConfigError(
            f"--model {name!r} is unknown: allowed are {', '.join(MODEL_SHAPES)}, the path of a config.json, or "
            "HIDDENxWIDTH of one of its experts, for example 2880x2880"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"--model {name}: {path} is not JSON ({error})") from error
    if not isinstance(config, dict):
        raise ConfigError(f"--model {name}: {path} holds no settings of a model")
    return model_shape_from_config(config, str(config.get("model_type", path.parent.name)))


def mixture_in_words(model: ModelShape, routed: ModelShape) -> str:
    """Say that routes and sizes come from different models; empty where they may be of one."""
    if model.experts == 1:  # sizes of an expert only
        return ""
    own = (model.top_k, model.experts, model.moe_layers)
    if own[:2] == (routed.top_k, routed.experts) and routed.moe_layers <= model.moe_layers:
        return ""
    return (
        f"these routes are of another model: {model.name} picks {model.top_k} of {model.experts} experts in "
        f"{workload.plural(model.moe_layers, 'expert layer')}, so experts, choices and layers are those of the routes, "
        "all other sizes its own; name the model that was routed with --model"
    )


def model_in_words(model: ModelShape, routed: ModelShape) -> str:
    """Say whose sizes are simulated, and what the routes say otherwise."""
    same = (model.moe_layers, model.experts, model.top_k) == (routed.moe_layers, routed.experts, routed.top_k)
    if same:
        return f"model {model.name}"
    part = f" ({routed.part_in_words})" if routed.part_in_words else ""
    return (
        f"sizes of {model.name}; from the routes {workload.plural(routed.moe_layers, 'expert layer')}{part}, "
        f"{routed.top_k} of {workload.plural(routed.experts, 'expert')} per token"
    )


class Simulated(NamedTuple):
    """One balancer's step: its plan, what the events say, memory, and whether rows were counted token by token."""

    plan: StepPlan
    step: SimulatedStep
    memory: MemoryUse
    skew: float
    counted: bool


class Tokens(NamedTuple):
    """Choices of the tokens of a trace, and the place of each token's sample in a demand."""

    experts_TLK: ndarray
    sample_T: ndarray

    def rows(self, plan: StepPlan, scheduled: Demand) -> ndarray | None:
        """Count the tokens that travel from rank to rank; None where that would take too long."""
        from relibra.planning.traffic.byte_ledger import MAX_PAIRS, distinct_rows_of_step

        assert scheduled.tokens_MLRE is not None, "scheduled by the plan"
        M, L, R, _ = scheduled.tokens_MLRE.shape
        if M * L * R * R > MAX_PAIRS:
            return None
        return distinct_rows_of_step(plan, scheduled, self.experts_TLK, self.sample_T)


def open_tokens(trace: Path, num_experts: int | None, demand: Demand) -> Tokens:
    """Return the tokens that a demand was counted from."""
    from relibra.routing.demand_rows import sample_of_rows
    from relibra.routing.readers import open_trace

    opened = open_trace(trace, num_experts)
    return Tokens(opened.experts_TLK, sample_of_rows(opened, demand))


def rows_in_words(step: Simulated) -> str:
    """Say where the rows between ranks come from."""
    return (
        "rows between ranks are counted token by token"
        if step.counted
        else "rows between ranks are a lower bound from pairs of experts: this step is too large to count them"
    )


def simulate(
    demand: Demand,
    history_MLE: object,
    tokens: Tokens,
    machine: Cluster,
    model: ModelShape,
    how: Execution,
    name: str,
    budget: Budget,
) -> Simulated:
    """Plan with one balancer, as it decides, and simulate the step.

    tokens    of the demand
    name      as the registry and relibra's sets of levers know it
    raises    ConfigError for a layout that does not fit, before anything is planned
    """
    from relibra.planning.analysis.comparison import with_levers
    from relibra.planning.planner import plan_step
    from relibra.simulation import ParallelLayout, memory_use, simulate_step

    layout = ParallelLayout(expert_parallel=machine.num_ranks, pipeline_stages=how.pipeline_stages)
    layout.check(machine, model)
    registered, allowed = with_levers(name, budget)
    question = {"expert": model.expert, "history_MLE": history_MLE, "never_worse": False}
    plan = plan_step(demand, machine, allowed, registered, **question)  # type: ignore[arg-type]
    scheduled = plan.scheduled(demand)
    rows_MLRR = tokens.rows(plan, scheduled)
    step = simulate_step(plan, scheduled, machine, model, how, distinct_MLRR=rows_MLRR)
    memory = memory_use(plan, scheduled, machine, model, how)
    return Simulated(plan, step, memory, plan.skew(scheduled), rows_MLRR is not None)


def keeps_static(plan: StepPlan, static: StepPlan) -> bool:
    """Tell whether a balancer decided nothing but the static layout: its homes and schedule, and no copies."""
    import numpy as np

    same = all(
        np.array_equal(getattr(plan, name), getattr(static, name)) for name in ("home_LE", "micro_batch_S", "rank_S")
    )
    return same and not plan.num_copies


def decision_in_words(balancer: str, chosen: Simulated, static: Simulated, step: workload.Step) -> str:
    """Say where a balancer saw nothing or decided nothing, and what would give it more; empty where it decided."""
    from relibra.planning.balancers import BALANCERS

    if step.history_MLE is None and balancer in BALANCERS and BALANCERS[balancer].sees == "history":
        return f"{balancer} knows earlier loads only, and saw none: --take second-half shows it the first half"
    if balancer == "static" or not keeps_static(chosen.plan, static.plan):
        return ""
    said = f"{balancer} kept the static layout"
    if not balancer.startswith("relibra"):
        return said
    plan = chosen.plan
    tokens = workload.tokens_per_rank(step.demand, plan.num_ranks)
    wider = "larger --micro-batch-tokens" if plan.slots else "larger --micro-batch-tokens or --slots 1"
    return (
        f"{said}: at {tokens:,.0f} tokens per rank and micro-batch nothing it may do saves more {plan.objective} than "
        f"it costs; {wider} would give it more to gain"
    )


def tokens_of(demand: Demand, model: ModelShape) -> int:
    """Return the tokens of a scheduled step."""
    return int(demand.load_MLE[:, 0].sum()) // model.top_k


def in_lines(text: str) -> None:
    """Print a sentence, broken between words where the terminal ends."""
    Console().print(visible(text), highlight=False, markup=False)
