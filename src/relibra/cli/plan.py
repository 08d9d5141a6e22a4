"""`relibra plan`: decide one step and write the plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from relibra.cli import workload
from relibra.cli.trace import visible
from relibra.errors import ConfigError

if TYPE_CHECKING:
    from relibra.cluster import Cluster
    from relibra.planning.comparison import ComparisonRow
    from relibra.planning.objective import ExpertShape
    from relibra.planning.plan import StepPlan
    from relibra.routing.demand import Demand

EXPORTS = ("sglang", "vllm-ascend", "tensorrt-llm")


def plan(
    trace: workload.TracePath,
    ranks: workload.Ranks,
    ranks_per_node: workload.RanksPerNode = None,
    cluster: workload.ClusterName = "h100x8",
    slots: workload.Slots = 1,
    micro_batch_tokens: workload.MicroBatchTokens = None,
    order: workload.OrderOption = workload.Order.RECORDED,
    seed: workload.Seed = 0,
    take: workload.TakeOption = workload.Take.ALL,
    balancer: Annotated[str, typer.Option(metavar="NAME", help="Who decides; relibra compare lists them.")] = "relibra",
    objective: workload.OptionalObjective = None,
    pack: Annotated[bool, typer.Option("--pack", help="Samples may change their micro-batch.")] = False,
    cross_node_copies: Annotated[
        bool, typer.Option("--cross-node-copies", help="Replicas may sit on another node than their home.")
    ] = False,
    model: workload.OptionalModel = None,
    deadline: Annotated[float | None, typer.Option(metavar="SECONDS", help="Stop improving after so long.")] = None,
    previous: Annotated[
        Path | None, typer.Option(metavar="PLAN", help="Plan of the step before: a warm start.")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="PATH", help="Where to write the plan.")] = Path(
        "plan.safetensors"
    ),
    export: Annotated[
        list[str] | None,
        typer.Option(metavar="FORMAT=PATH", help=f"Also write a placement: {', '.join(EXPORTS)}; repeat for more."),
    ] = None,
    num_experts: workload.NumExperts = None,
    html: workload.Page = None,
    as_json: workload.Json = False,
) -> None:
    """Decide one step from known routes: homes, schedule, replicas and token quotas; write the plan.

    The demand it was made for is written beside it (NAME.demand.safetensors), for relibra explain.

    Example: relibra plan runs/demo/traces/step-00000 --ranks 4 --slots 1 --micro-batch-tokens 256
    """
    from relibra.planning.budget import Budget
    from relibra.planning.comparison import with_levers
    from relibra.planning.plan_files import read_plan
    from relibra.planning.step import plan_step

    machine = workload.open_cluster(cluster, ranks, ranks_per_node)
    chosen, expert = _judged_by(objective, model)
    budget = Budget(
        slots=slots,
        objective=chosen.value,
        pack_samples=pack,
        cross_node_copies=cross_node_copies,
        deadline_seconds=deadline,
        seed=seed,
    )
    # The names with levers say themselves what relibra may move; plain "relibra" leaves it to the options.
    name, budget = (balancer, budget) if balancer == "relibra" else with_levers(balancer, budget)
    exports = _exports(export or [])
    workload.check_outputs(output, html)
    before = None if previous is None else read_plan(previous)
    with workload.progress(f"cutting {trace}"):
        demand, history_MLE = workload.open_step(
            trace, num_experts, ranks=ranks, tokens=micro_batch_tokens, order=order, seed=seed, take=take
        )
    with workload.progress(f"planning with {balancer} (the first run compiles kernels: half a minute)"):
        made = plan_step(demand, machine, budget, name, expert=expert, previous=before, history_MLE=history_MLE)
    made.validate(machine, demand)
    _write(made, demand, output, exports, html)
    _tell(made, demand, machine, expert, output, chosen, as_json=as_json)


def _judged_by(objective: workload.Measure | None, model: str | None) -> tuple[workload.Measure, ExpertShape]:
    """Seconds need the size of an expert; without one plans are made for tokens, and priced for the default model."""
    from relibra.planning.objective import expert_shape

    if objective is workload.Measure.SECONDS and model is None:
        raise ConfigError("--objective seconds needs the size of an expert: name a model with --model")
    chosen = objective or (workload.Measure.TOKENS if model is None else workload.Measure.SECONDS)
    return chosen, expert_shape(model or workload.DEFAULT_MODEL)


def _write(made: StepPlan, demand: Demand, output: Path, exports: list[tuple[str, Path]], html: Path | None) -> None:
    from relibra.planning.plan_files import write_plan
    from relibra.routing.demand_files import write_demand

    write_plan(output, made)
    write_demand(demand_path(output), demand)
    for form, path in exports:
        _write_export(form, path, made, demand)
    if html is not None:
        from relibra.reporting.plan_page import write_plan_page

        typer.echo(f"page: {visible(str(write_plan_page(html, made, demand)))}", err=True)


def _tell(
    made: StepPlan,
    demand: Demand,
    machine: Cluster,
    expert: ExpertShape,
    output: Path,
    objective: workload.Measure,
    *,
    as_json: bool,
) -> None:
    from relibra.planning.comparison import measure
    from relibra.planning.levers import lever_gaps

    row = measure(made, demand, machine, expert, balancer=made.balancer, sees="")
    levers = lever_gaps(made, demand)
    if as_json:
        typer.echo(json.dumps({"objective": objective.value, **_facts(made, row, levers, output)}))
        return
    typer.echo(workload.size_in_words(demand, machine))
    _print_summary(made, row, levers, output, objective)


def demand_path(plan_path: Path) -> Path:
    """Return where the demand of a plan lies.

    >>> demand_path(Path("a/plan.safetensors")).name
    'plan.demand.safetensors'
    """
    return plan_path.with_name(f"{plan_path.name.removesuffix('.safetensors')}.demand.safetensors")


def _facts(plan: StepPlan, row: ComparisonRow, levers: list[tuple[str, float]], output: Path) -> dict[str, object]:
    return {
        **{name: value for name, value in row.figures().items() if name not in ("sees", "message")},
        "skew_before": levers[0][1],
        "levers": dict(levers),
        "predicted": dict(plan.predicted),
        "digest": plan.digest(),
        "plan": str(output),
        "demand": str(demand_path(output)),
    }


def _print_summary(
    plan: StepPlan, row: ComparisonRow, levers: list[tuple[str, float]], output: Path, objective: workload.Measure
) -> None:
    assert row.skew is not None, "measured"
    assert row.moved_bytes is not None, "measured"
    across = f", {row.cross_node_copies:,} of them on another node than their home" if row.cross_node_copies else ""
    terms = ", ".join(f"{name} {value:.3g}" for name, value in plan.predicted.items() if name != "total")
    lines = {
        "balancer": f"{plan.balancer}, planned for {objective.value}",
        "skew": f"{levers[0][1]:.3f} static -> {row.skew:.3f} planned; bound {row.bound:.3f}, gap {row.gap:.2%}",
        "copies": f"{row.copies:,} ({row.copies_per_micro_batch_layer:.1f} per micro-batch and layer){across}",
        "moved": f"{row.moved_experts:,} of {plan.home_LE.size:,} experts, {row.moved_bytes / 1e9:.1f} GB",
        "across nodes": f"{row.cross_node_token_slots:,} token-slots",
        "step": f"{row.predicted_seconds:.3g} s (model: {terms})",
        "planned in": f"{plan.plan_seconds:.2f} s",
        "digest": plan.digest()[:16],
        "written": f"{visible(str(output))} and {visible(demand_path(output).name)}",
    }
    for name, text in lines.items():
        typer.echo(f"{name:<13} {text}")
    typer.echo("what each lever bought (token objective: busiest ranks / mean ranks):")
    value_before = None
    for lever, value in levers:
        change = "" if value_before is None or lever == "bound" else f"{value - value_before:+.3f}"
        typer.echo(f"  {lever:<18} {value:6.3f}  {change}".rstrip())
        value_before = value


def _exports(words: list[str]) -> list[tuple[str, Path]]:
    pairs = []
    for word in words:
        form, equals, path = word.partition("=")
        if form not in EXPORTS or not equals or not path:
            raise ConfigError(f"--export {word!r} is not FORMAT=PATH with a format of {', '.join(EXPORTS)}")
        workload.check_outputs(Path(path), None)
        pairs.append((form, Path(path)))
    return pairs


def _write_export(form: str, path: Path, plan: StepPlan, demand: Demand) -> None:
    from relibra.planning import exports

    writers = {
        "sglang": exports.write_sglang_json,
        "vllm-ascend": exports.write_vllm_ascend_json,
        "tensorrt-llm": exports.write_tensorrt_llm_yaml,
    }
    writers[form](path, plan, demand)
