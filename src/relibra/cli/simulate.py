"""`relibra simulate`: one training step on a cluster nobody has at hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from relibra.cli.inputs import simulated, workload
from relibra.cli.trace import visible

if TYPE_CHECKING:
    from relibra.cli.inputs.simulated import Routes, Simulated, Tokens
    from relibra.cluster import Cluster
    from relibra.simulation import Execution, ModelShape

Stages = Annotated[
    int, typer.Option(min=1, max=1 << 15, metavar="S", help="Pipeline stages, each on ranks of its own.")
]
MOST_TIMELINE_RANKS = 16
_ROUNDING = 1e-9
"""Share of a step below which a part is what sums of floats leave over."""


def simulate(
    source: simulated.Source,
    ranks: workload.Ranks,
    ranks_per_node: workload.RanksPerNode = None,
    cluster: workload.ClusterName = "h100x8",
    slots: workload.Slots = 1,
    micro_batch_tokens: workload.MicroBatchTokens = None,
    order: workload.OrderOption = workload.Order.RECORDED,
    seed: workload.Seed = 0,
    take: workload.TakeOption = workload.Take.ALL,
    balancer: Annotated[str, typer.Option(metavar="NAME", help="Who decides; relibra compare lists them.")] = "relibra",
    objective: workload.ObjectiveOption = workload.Measure.SECONDS,
    model: simulated.ModelName = None,
    pipeline_stages: Stages = 1,
    recompute: simulated.Recompute = False,
    timeline: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Also write the first micro-batch as a trace for ui.perfetto.dev."),
    ] = None,
    num_experts: workload.NumExperts = None,
    as_json: workload.Json = False,
) -> None:
    """Simulate a training step on recorded routes: what limits it, where its seconds go, and what a plan buys.

    Example: relibra simulate runs/demo --ranks 8 --cluster h100x8 --model qwen3-30b-a3b
    """
    from relibra.planning.analysis.comparison import with_levers
    from relibra.planning.budget import Budget
    from relibra.simulation import Execution, cut_model

    outputs = [] if timeline is None else [("--timeline", timeline)]
    budget = Budget(slots=slots, objective=objective.value, seed=seed)
    with_levers(balancer, budget)  # a wrong name is told before anything is read
    routes = simulated.find_routes(source)
    workload.check_outputs(outputs, workload.inputs_of(routes.trace, cluster))
    machine = workload.open_cluster(cluster)
    shape = simulated.open_model(model or routes.config or workload.DEFAULT_MODEL)
    with workload.progress(f"cutting {routes.trace}"):
        machine, step = workload.open_step(
            routes.trace, num_experts, machine, ranks, ranks_per_node, cut=(micro_batch_tokens, order, seed, take)
        )
    routed = cut_model(shape, step.demand)
    how = Execution(pipeline_stages=pipeline_stages, recompute_activations=recompute)
    tokens = simulated.open_tokens(routes.trace, num_experts, step.demand)
    found = {}
    for name in dict.fromkeys(("static", balancer)):
        with workload.progress(f"planning and simulating {name} (a first run compiles kernels)"):
            found[name] = simulated.simulate(step.demand, step.history_MLE, tokens, machine, routed, how, name, budget)
    result = Result(routes, step, machine, shape, routed, how, found, balancer)
    if timeline is not None:
        _write_timeline(timeline, result, tokens)
    if as_json:
        typer.echo(json.dumps(_facts(result)))
    else:
        _print(result)


class Result(NamedTuple):
    """What there is to say: of the static layout and of the balancer, by name."""

    routes: Routes
    step: workload.Step
    machine: Cluster
    model: ModelShape
    routed: ModelShape
    how: Execution
    found: dict[str, Simulated]
    balancer: str


def _facts(result: Result) -> dict[str, object]:
    """Return what --json prints; what limits the step comes first."""
    from relibra.simulation import advice
    from relibra.simulation.limits import overlap_ratios, sustained_overlap_ratios

    chosen, static = result.found[result.balancer], result.found["static"]
    tokens = simulated.tokens_of(result.step.demand, result.routed)
    return {
        "overlap_ratio": overlap_ratios(result.machine, result.routed.expert),
        "advice": advice(chosen.step, result.machine, result.routed, chosen.memory),
        "sustained_overlap_ratio": sustained_overlap_ratios(result.machine, result.routed.expert),
        **chosen.step.figures(),
        "balancer": result.balancer,
        "ratio_to_static": static.step.seconds / chosen.step.seconds,
        "ratio_to_static_without_relocation": static.step.seconds_without_relocation
        / chosen.step.seconds_without_relocation,
        "seconds_without_relocation": chosen.step.seconds_without_relocation,
        "kept_static": simulated.keeps_static(chosen.plan, static.plan),
        "static_seconds": static.step.seconds,
        "tokens": tokens,
        "tokens_per_second": tokens / chosen.step.seconds,
        "tokens_per_second_per_rank": tokens / chosen.step.seconds / chosen.step.layout.num_ranks,
        "skew": chosen.skew,
        "static_skew": static.skew,
        "copies": chosen.plan.num_copies,
        "memory_bytes": chosen.memory.total,
        "memory": dict(chosen.memory.parts),
        "memory_warning": chosen.memory.warning,
        "model": result.model.name,
        "model_part": result.routed.part_in_words,
        "cluster": result.machine.name,
        "cluster_label": result.machine.label,
        "rows_counted": chosen.counted,
        "trace": str(result.routes.trace),
        "cut": result.step.cut,
    }


def _print(result: Result) -> None:
    from relibra.simulation import advice

    chosen = result.found[result.balancer]
    say = simulated.in_lines
    for sentence in advice(chosen.step, result.machine, result.routed, chosen.memory):
        say(sentence)
    typer.echo()
    if result.routes.words:
        say(result.routes.words)
    say(workload.size_in_words(result.step.demand, result.machine))
    say(result.step.cut)
    if idle := workload.idle_ranks_in_words(result.step.demand):
        say(idle)
    all_ranks = chosen.step.layout.num_ranks
    staged = result.how.pipeline_stages > 1
    stages = f", {result.how.pipeline_stages} pipeline stages of them: {all_ranks} ranks in all" * staged
    stages += ", activations recomputed" * result.how.recompute_activations
    slots = workload.plural(chosen.plan.slots, "spare slot")
    planned = f"planned for {chosen.plan.objective}"
    say(f"{simulated.model_in_words(result.model, result.routed)}; {slots} per rank{stages}; {planned}")
    if words := simulated.mixture_in_words(result.model, result.routed):
        say(words)
    Console().print(_table(result))
    machine = result.machine
    say(f"label: simulated, on {machine.name} ({machine.label}: {machine.source})")
    say(
        "straggler: seconds of experts in which only the busiest ranks compute; skew: token-slots of the busiest ranks "
        f"/ mean ranks; memory: of the fullest rank; {simulated.rows_in_words(chosen)}"
    )
    if words := simulated.decision_in_words(result.balancer, chosen, result.found["static"], result.step):
        say(words)
    if staged:
        say("pipeline: parts are those of each column's busiest stage; the last one also has the output matrix")
    for note in chosen.step.notes:
        say(note)


def _table(result: Result) -> Table:
    """One column per balancer, the parts of its seconds below each other."""
    from relibra.simulation.units import bytes_in_words

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("")
    for name in result.found:
        table.add_column(name, justify="right", no_wrap=True)
    tokens = simulated.tokens_of(result.step.demand, result.routed)
    static = result.found["static"].step.seconds

    def row(title: str, cells: list[str]) -> None:
        table.add_row(title, *cells)

    steps = [one.step for one in result.found.values()]
    row("seconds of the step", [f"{step.seconds:.4g}" for step in steps])
    settled = [step.seconds_without_relocation for step in steps]
    moved = any(step.terms["relocation"] for step in steps)
    if moved:
        row("  without relocation", [f"{seconds:.4g}" for seconds in settled])
    row("static / this", [f"{static / step.seconds:.3f}" for step in steps])
    if moved:
        row("  without relocation", [f"{settled[0] / seconds:.3f}" for seconds in settled])
    row("tokens per second", [f"{tokens / step.seconds:,.0f}" for step in steps])
    row("  per rank", [f"{tokens / step.seconds / step.layout.num_ranks:,.0f}" for step in steps])
    for term in steps[0].terms:
        shares = [step.terms[term] / step.seconds for step in steps]
        if max(shares) > _ROUNDING:
            cells = [
                f"{step.terms[term]:.4g}" if share > _ROUNDING else "0"
                for step, share in zip(steps, shares, strict=True)
            ]
            row(f"  {'experts' if term == 'compute' else term}", cells)
        if term == "compute":
            lost = [(step.straggler_seconds(), step.seconds) for step in steps]
            row("    straggler", [f"{value:.4g}" if value > _ROUNDING * whole else "0" for value, whole in lost])
    row("hidden copies, seconds", [f"{max(0.0, step.hidden_copy_seconds):.4g}" for step in steps])
    row("model flops utilisation", [f"{step.model_flops_utilisation:.1%}" for step in steps])
    row("skew", [f"{one.skew:.3f}" for one in result.found.values()])
    row("copies", [f"{one.plan.num_copies:,}" for one in result.found.values()])
    row("memory", [bytes_in_words(one.memory.total) for one in result.found.values()])
    return table


def _write_timeline(path: Path, result: Result, tokens: Tokens) -> None:
    from relibra.simulation import simulated_timeline

    plan = result.found[result.balancer].plan
    scheduled = plan.scheduled(result.step.demand)
    ranks = list(range(min(plan.num_ranks, MOST_TIMELINE_RANKS)))
    made = simulated_timeline(
        plan, scheduled, result.machine, result.routed, result.how, ranks=ranks, micro_batches=[0],
        distinct_MLRR=tokens.rows(plan, scheduled),
    )  # fmt: skip
    with workload.writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        made.save_perfetto(path)
    shown = f"micro-batch 0 on {workload.plural(len(ranks), 'rank')}"
    typer.echo(f"timeline: {visible(str(path))} ({shown}); open it in ui.perfetto.dev", err=True)
