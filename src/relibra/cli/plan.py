"""`relibra plan`: decide one step and write the plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from relibra.cli.inputs import pages, workload
from relibra.cli.trace import visible
from relibra.errors import ConfigError, PlanError

if TYPE_CHECKING:
    from relibra.cluster import Cluster
    from relibra.planning.analysis.comparison import ComparisonRow
    from relibra.planning.budget import Budget
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
    from relibra.planning.analysis.comparison import measure
    from relibra.planning.budget import Budget
    from relibra.planning.plan_files import read_plan
    from relibra.planning.planner import plan_step

    exports = _exports(export or [])
    workload.check_outputs(_outputs(output, html, exports), workload.inputs_of(trace, cluster, previous))
    machine, expert = workload.open_cluster(cluster), workload.open_expert(model or workload.DEFAULT_MODEL)
    budget = Budget(
        slots=slots, pack_samples=pack, cross_node_copies=cross_node_copies, deadline_seconds=deadline, seed=seed
    )
    name, budget = _judged_by(balancer, objective, model, budget)
    before = None if previous is None else read_plan(previous)
    with workload.progress(f"cutting {trace}"):
        machine, step = workload.open_step(
            trace, num_experts, machine, ranks, ranks_per_node, cut=(micro_batch_tokens, order, seed, take)
        )
    question: dict[str, Any] = {"expert": expert, "previous": before, "history_MLE": step.history_MLE}
    _compile_kernels(step.demand, machine, budget, name, question)
    with workload.progress(f"planning with {balancer}"):
        made = plan_step(step.demand, machine, budget, name, **question)
        static = plan_step(step.demand, machine, budget, "static", expert=expert, previous=before)
    row = measure(made, step.demand, machine, expert, balancer=made.balancer, sees="")
    if not row.valid:
        raise PlanError(row.message)
    _write(made, step.demand, output, exports)
    pages.write_page_of_plan(html, made, step.demand, (machine, model, trace, num_experts))
    result = Result(made, row, static, step, machine, model, output)
    if as_json:
        typer.echo(json.dumps(_facts(result)))
    else:
        _print_summary(result)


class Result(NamedTuple):
    """What there is to say: the plan, its figures, the static layout beside it, and what it was made for."""

    plan: StepPlan
    row: ComparisonRow
    static: StepPlan
    step: workload.Step
    machine: Cluster
    model: str | None
    output: Path


def _outputs(output: Path, html: Path | None, exports: list[tuple[str, Path]]) -> list[tuple[str, Path]]:
    """Return every file that is written, and what it is called on the command line."""
    page = [] if html is None else [("--html", html)]
    places = [(f"--export {form}", path) for form, path in exports]
    return [("--output", output), ("the demand of --output", demand_path(output)), *page, *places]


def _judged_by(
    balancer: str, objective: workload.Measure | None, model: str | None, budget: Budget
) -> tuple[str, Budget]:
    """Return the registry's name of the balancer and what it may do and is judged by.

    Seconds need the size of an expert; without one plans are made for tokens, and priced for the default model. Names
    with levers say themselves what relibra may move; plain "relibra" leaves it to the options.

    raises    ConfigError for options that contradict the name; PlanError for an unknown name
    """
    from relibra.planning.analysis.comparison import LEVER_SETS, with_levers

    if objective is workload.Measure.SECONDS and model is None:
        raise ConfigError("--objective seconds needs the size of an expert: name a model with --model")
    chosen = objective or (workload.Measure.TOKENS if model is None else workload.Measure.SECONDS)
    budget = replace(budget, objective=chosen.value)
    if balancer == "relibra":
        return balancer, budget
    name, allowed = with_levers(balancer, budget)
    if balancer not in LEVER_SETS:
        return name, allowed
    given = {"--pack": budget.pack_samples, "--cross-node-copies": budget.cross_node_copies}
    for option in [option for option, is_given in given.items() if is_given]:
        raise ConfigError(f"--balancer {balancer} says itself what may move: leave out {option}, or name plain relibra")
    if objective is not None and allowed.objective != objective.value:
        raise ConfigError(
            f"--balancer {balancer} plans for {allowed.objective}: leave out --objective {objective.value}"
        )
    return name, allowed


def _compile_kernels(demand: Demand, machine: Cluster, budget: Budget, name: str, question: dict[str, Any]) -> None:
    """Compile before the clock of planning starts, and say so where it took long."""
    from relibra.planning.analysis.comparison import compile_kernels

    with workload.progress("compiling kernels (half a minute the first time)"):
        seconds = compile_kernels(demand, machine, budget, name, **question)
    if seconds > 1:
        typer.echo(f"kernels compiled in {seconds:.0f} s", err=True)


def _write(made: StepPlan, demand: Demand, output: Path, exports: list[tuple[str, Path]]) -> None:
    from relibra.planning.plan_files import write_plan
    from relibra.routing.demand_files import write_demand

    with workload.writing(output):
        write_plan(output, made)
    with workload.writing(demand_path(output)):
        write_demand(demand_path(output), demand)
    for form, path in exports:
        with workload.writing(path):
            _write_export(form, path, made, demand)


def demand_path(plan_path: Path) -> Path:
    """Return where the demand of a plan lies.

    >>> demand_path(Path("a/plan.safetensors")).name
    'plan.demand.safetensors'
    """
    return plan_path.parent / f"{plan_path.name.removesuffix('.safetensors')}.demand.safetensors"


def _facts(result: Result) -> dict[str, object]:
    from relibra.planning.analysis.levers import lever_bounds, lever_gaps

    plan, row, demand = result.plan, result.row, result.step.demand
    levers = lever_gaps(plan, demand)
    return {
        **{name: value for name, value in row.figures().items() if name not in ("sees", "message")},
        "objective": plan.objective,
        "model": result.model or workload.DEFAULT_MODEL,
        "static_predicted_seconds": result.static.predicted["total"],
        "skew_before": levers[0][1],
        "levers": dict(levers),
        "lever_bounds": dict(lever_bounds(plan, demand)),
        "predicted": dict(plan.predicted),
        "cut": result.step.cut,
        "cut_short": plan.cut_short,
        "digest": plan.digest(),
        "plan": str(result.output),
        "demand": str(demand_path(result.output)),
    }


def _print_summary(result: Result) -> None:
    from relibra.planning.analysis.levers import lever_gaps

    plan, row, output = result.plan, result.row, result.output
    assert row.skew is not None, "measured"
    assert row.moved_bytes is not None, "measured"
    typer.echo(workload.size_in_words(result.step.demand, result.machine))
    typer.echo(result.step.cut)
    if idle := workload.idle_ranks_in_words(result.step.demand):
        typer.echo(idle)
    levers = lever_gaps(plan, result.step.demand)
    across = f", {row.cross_node_copies:,} of them on another node than their home" if row.cross_node_copies else ""
    default = "" if result.model else ", the default: choose with --model"
    least = {"exchange": "at least "} if result.step.demand.pairs_LEE is not None else {}  # `relibra simulate` counts
    terms = ", ".join(
        f"{name} {least.get(name, '')}{value:.3g}" for name, value in plan.predicted.items() if name != "total"
    )
    static = result.static.predicted
    back = " with the moves back to it" if static["relocation"] else ""
    lines = {
        "balancer": plan.balancer,
        "planned for": f"{plan.objective}; priced for experts of {result.model or workload.DEFAULT_MODEL}{default}",
        "skew": f"{levers[0][1]:.3f} static -> {row.skew:.3f} planned; bound {row.bound:.3f}, gap {row.gap:.2%}",
        "copies": f"{row.copies:,} ({row.copies_per_micro_batch_layer:.1f} per micro-batch and layer){across}",
        "moved": f"{row.moved_experts:,} of {plan.home_LE.size:,} experts, {row.moved_bytes / 1e9:.1f} GB",
        "across nodes": f"{row.cross_node_token_slots:,} token-slots",
        "expert layers": f"{row.predicted_seconds:.3g} s, static {static['total']:.3g} s{back} (model: {terms})",
        "planned in": f"{plan.plan_seconds:.2f} s{', ended by the deadline' if plan.cut_short else ''}",
        "digest": plan.digest()[:16],
        "written": f"{visible(str(output))} and {visible(demand_path(output).name)}",
    }
    for name, text in lines.items():
        typer.echo(f"{name:<13} {text}")
    if slower := _slower_than_static(result):
        typer.echo(slower)
    _print_levers(plan, result.step.demand, levers)


def _slower_than_static(result: Result) -> str:
    """Say why a plan for even ranks is slower than the static layout by the model; empty where it is not."""
    plan, static, demand = result.plan, result.static, result.step.demand
    if plan.objective != "tokens" or plan.predicted["total"] <= static.predicted["total"]:
        return ""
    change = {term: plan.predicted[term] - static.predicted[term] for term in plan.predicted if term != "total"}
    words = {"copies": "copies", "relocation": "moves", "exchange": "exchange", "compute": "small pieces of experts"}
    costly = " and ".join(words[term] for term in sorted(change, key=lambda term: -change[term]) if change[term] > 0)
    tokens = workload.tokens_per_rank(demand, plan.num_ranks)
    advice = "--objective seconds" if result.model else "--model"
    return (
        f"slower than static by the model: at {tokens:,.0f} tokens per rank and micro-batch {costly} cost "
        f"{sum(value for value in change.values() if value > 0):.3g} s, even ranks save "
        f"{-sum(value for value in change.values() if value < 0):.3g} s; plan for seconds with {advice}"
    )


def _print_levers(plan: StepPlan, demand: Demand, levers: list[tuple[str, float]]) -> None:
    from relibra.planning.analysis.levers import lever_bounds

    where = "inside the node" if plan.scope == "node" else "anywhere"
    typer.echo("what each lever bought (skew: token-slots of the busiest ranks / mean ranks), and the lowest skew that")
    typer.echo(f"copies could reach from there ({workload.plural(plan.slots, 'spare slot')} per rank, copies {where}):")
    typer.echo(f"  {'':<18} {'skew':>6}  {'change':>6}  reachable")
    before = None
    for (lever, value), (_, reachable) in zip(levers, lever_bounds(plan, demand), strict=True):
        change = "" if before is None or lever == "bound" else f"{value - before:+.3f}"
        last = "" if lever == "bound" else f"{reachable:9.3f}"
        typer.echo(f"  {lever:<18} {value:6.3f}  {change:>6}  {last}".rstrip())
        before = value
    typer.echo("  a lever that makes others possible may buy little by itself")


def _exports(words: list[str]) -> list[tuple[str, Path]]:
    pairs = []
    for word in words:
        form, equals, path = word.partition("=")
        if form == "vllm":
            raise ConfigError(
                "--export vllm: vLLM reads no placement file, it calls a policy: see RelibraEplbPolicy in "
                "docs/planning.md"
            )
        if form not in EXPORTS or not equals or not path:
            raise ConfigError(f"--export {word!r} is not FORMAT=PATH with a format of {', '.join(EXPORTS)}")
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
