"""`relibra sweep`: the same routes simulated for many machines and settings, in one table."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from relibra.cli.inputs import simulated, workload
from relibra.cli.trace import visible
from relibra.errors import ConfigError, RelibraError

if TYPE_CHECKING:
    from relibra.cli.inputs.simulated import Simulated, Tokens
    from relibra.cluster import Cluster
    from relibra.simulation import ModelShape

SETTINGS = ("ranks", "ranks_per_node", "slots", "micro_batch_tokens", "pipeline_stages", "balancer")
MOST_POINTS = 500
STOPPED = "stopped by Ctrl-C"
WORTH_SAYING = 0.005
"""A relocation below this share of a step has no column."""
MOST_SENTENCES = 4
"""Sentences about the best point above the table: the overlap ratio, and the largest parts of its step."""


def _list(metavar: str, words: str) -> Any:
    return typer.Option(metavar=metavar, help=f"{words}; one, or a comma list.")


def sweep(
    source: simulated.Source,
    ranks: Annotated[str, _list("R,...", "Ranks of the expert-parallel group")],
    ranks_per_node: Annotated[str | None, _list("G,...", "Ranks on one node; default: what the cluster has")] = None,
    cluster: workload.ClusterName = "h100x8",
    slots: Annotated[str, _list("B,...", "Spare expert slots per rank")] = "1",
    micro_batch_tokens: Annotated[
        str | None, _list("T,...", "Tokens per micro-batch; default: by the size of the trace")
    ] = None,
    pipeline_stages: Annotated[str, _list("S,...", "Pipeline stages")] = "1",
    recompute: simulated.Recompute = False,
    balancer: Annotated[str, _list("NAME,...", "Who decides; relibra compare lists them")] = "relibra",
    order: workload.OrderOption = workload.Order.RECORDED,
    seed: workload.Seed = 0,
    take: workload.TakeOption = workload.Take.ALL,
    objective: workload.ObjectiveOption = workload.Measure.SECONDS,
    model: simulated.ModelName = None,
    num_experts: workload.NumExperts = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also draw it: .png (matplotlib) or .html (plotly).")
    ] = None,
    as_json: workload.Json = False,
) -> None:
    """Simulate a step for every combination of the given settings, each beside the static layout of the same machine.

    Combinations that cannot be are named and left out.

    Example: relibra sweep runs/demo --ranks 2,4,8 --balancer relibra,eplb
    """
    from relibra.planning.analysis.comparison import with_levers
    from relibra.planning.budget import Budget

    points = _points(ranks, ranks_per_node, slots, micro_batch_tokens, pipeline_stages, balancer)
    for name in dict.fromkeys(point["balancer"] for point in points):
        with_levers(name, Budget())
    routes = simulated.find_routes(source)
    workload.check_outputs([] if plot is None else [("--plot", plot)], workload.inputs_of(routes.trace, cluster))
    if plot is not None:
        from relibra.reporting.pages.sweep_page import check_plot

        check_plot(plot)
    shape = simulated.open_model(model or routes.config or workload.DEFAULT_MODEL)
    question = Question(
        routes.trace, num_experts, workload.open_cluster(cluster), shape, order, seed, take, objective.value, recompute
    )
    found, left_out = _simulated(points, question)
    if plot is not None:
        from relibra.reporting.pages.sweep_page import draw_sweep

        title = f"{shape.name} on {question.machine.name}, simulated"
        with workload.writing(plot):
            varied = _varied(points)
            constant = [name for name in SETTINGS if name not in varied]
            draw_sweep(plot, [one.row for one in found], varied, constant, title)
        typer.echo(f"plot: {visible(str(plot))}", err=True)
    if as_json:
        _print_json(found, left_out)
    else:
        _print(found, left_out, _varied(points), (routes, question))
    if any(point["why"] == STOPPED for point in left_out):
        raise typer.Exit(130)


class Question(NamedTuple):
    """What all points of a sweep have in common."""

    trace: Path
    num_experts: int | None
    machine: Cluster
    shape: ModelShape
    order: workload.Order
    seed: int
    take: workload.Take
    objective: str
    recompute: bool


class Point(NamedTuple):
    """One point: what was simulated, and its row."""

    row: dict[str, Any]
    simulated: Simulated
    machine: Cluster
    model: ModelShape


def _points(
    ranks: str, per_node: str | None, slots: str, tokens: str | None, stages: str, balancers: str
) -> list[dict[str, Any]]:
    """Return every combination, as a dict of SETTINGS.

    raises    ConfigError for an item that is no number, or too many combinations
    """
    lists = (
        _numbers("--ranks", ranks, 1, 1 << 15),
        _numbers("--ranks-per-node", per_node, 1, 1 << 15),
        _numbers("--slots", slots, 0, 1024),
        _numbers("--micro-batch-tokens", tokens, 1, 1 << 40),
        _numbers("--pipeline-stages", stages, 1, 1 << 15),
        _items("--balancer", balancers),
    )
    points = [dict(zip(SETTINGS, values, strict=True)) for values in itertools.product(*lists)]
    if len(points) > MOST_POINTS:
        raise ConfigError(f"the lists make {len(points)} combinations: at most {MOST_POINTS}, shorten one")
    return points


def _items(option: str, text: str) -> list[str]:
    items = [item.strip() for item in text.split(",")]
    if "" in items:
        example = "relibra,eplb" if option == "--balancer" else "8,16"
        raise ConfigError(f"{option} {text!r} has an empty item: write it like {example}")
    return list(dict.fromkeys(items))


def _numbers(option: str, text: str | None, least: int, most: int) -> list[int | None]:
    if text is None:
        return [None]
    numbers: list[int | None] = []
    for item in _items(option, text):
        number = int(item) if item.isascii() and item.isdigit() and len(item) < 16 else -1
        if not least <= number <= most:
            raise ConfigError(f"{option} {text!r} holds {item!r}: expected whole numbers from {least} to {most:,}")
        numbers.append(number)
    return list(dict.fromkeys(numbers))


def _simulated(points: list[dict[str, Any]], question: Question) -> tuple[list[Point], list[dict[str, Any]]]:
    """Simulate point by point; steps are cut, and static layouts simulated, once each.

    returns   what was simulated; and the points that cannot be, each with the reason as "why"
    raises    the reason of the first point, when no point can be
    """
    steps: dict[tuple[Any, ...], tuple[Cluster, workload.Step, Tokens]] = {}
    statics: dict[tuple[Any, ...], Simulated] = {}
    found, left_out = [], []
    first: RelibraError | None = None
    for number, point in enumerate(points):
        with workload.progress(f"simulating {number + 1} of {len(points)} (a first run compiles kernels)"):
            try:
                found.append(_point(point, question, steps, statics))
            except RelibraError as error:
                first = first or error
                left_out.append({**point, "why": str(error)})
            except KeyboardInterrupt:
                if not found:
                    raise
                left_out += [{**rest, "why": STOPPED} for rest in points[number:]]  # what took minutes is shown
                break
    if not found and first is not None:
        raise first
    return found, left_out


def _point(
    point: dict[str, Any],
    question: Question,
    steps: dict[tuple[Any, ...], tuple[Cluster, workload.Step, Tokens]],
    statics: dict[tuple[Any, ...], Simulated],
) -> Point:
    """Simulate one point, with what others have left in `steps` and `statics`."""
    from relibra.planning.budget import Budget
    from relibra.simulation import Execution, cut_model

    key = (point["ranks"], point["ranks_per_node"], point["micro_batch_tokens"])
    if key not in steps:
        cut = (point["micro_batch_tokens"], question.order, question.seed, question.take)
        machine, step = workload.open_step(question.trace, question.num_experts, question.machine, *key[:2], cut=cut)
        steps[key] = machine, step, simulated.open_tokens(question.trace, question.num_experts, step.demand)
    machine, step, tokens = steps[key]
    model = cut_model(question.shape, step.demand)
    how = Execution(pipeline_stages=point["pipeline_stages"], recompute_activations=question.recompute)
    budget = Budget(slots=point["slots"], objective=question.objective, seed=question.seed)  # type: ignore[arg-type]
    asked = (step.demand, step.history_MLE, tokens, machine, model, how)
    place = (*key, point["pipeline_stages"])  # a static layout is the same whatever slots it could have
    if place not in statics:
        statics[place] = simulated.simulate(*asked, "static", budget)
    static = one = statics[place]
    if point["balancer"] != "static":
        one = simulated.simulate(*asked, point["balancer"], budget)
    row = _row(point, machine, one, static, simulated.tokens_of(step.demand, model))
    return Point(row, one, machine, model)


def _row(point: dict[str, Any], machine: Cluster, one: Simulated, static: Simulated, tokens: int) -> dict[str, Any]:
    step, settled = one.step, one.step.seconds_without_relocation
    per_node = min(machine.ranks_per_node, machine.num_ranks)
    return {
        **point,
        "ranks_per_node": per_node,
        **step.figures(),
        "rows_counted": one.counted,
        "ranks": point["ranks"],
        "all_ranks": step.layout.num_ranks,
        "ratio_to_static": static.step.seconds / step.seconds,
        "tokens": tokens,
        "tokens_per_second": tokens / step.seconds,
        "tokens_per_second_per_rank": tokens / step.seconds / step.layout.num_ranks,
        "ratio_to_static_without_relocation": static.step.seconds_without_relocation / settled,
        "tokens_per_second_per_rank_without_relocation": tokens / settled / step.layout.num_ranks,
        "relocation_share": step.terms["relocation"] / step.seconds,
        "exchange_share": (step.terms["exchange"] + step.terms["gates"]) / step.seconds,
        "straggler_share": step.straggler_seconds() / step.seconds,
        "copies_share": step.terms["copies"] / step.seconds,
        "skew": one.skew,
        "copies": one.plan.num_copies,
        "kept_static": simulated.keeps_static(one.plan, static.plan),
        "memory_bytes": one.memory.total,
        "memory_warning": one.memory.warning,
    }


def _varied(points: list[dict[str, Any]]) -> list[str]:
    """Return the settings that differ between points."""
    return [name for name in SETTINGS if len({point[name] for point in points}) > 1]


def _in_words(row: dict[str, Any], names: list[str]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {row[name]}" for name in names)


def _best(found: list[Point]) -> tuple[Point, list[str]]:
    """Return the point with the most tokens per second and rank, relocation apart, and what limits it."""
    from relibra.simulation import advice

    best = max(found, key=lambda one: one.row["tokens_per_second_per_rank_without_relocation"])
    return best, advice(best.simulated.step, best.machine, best.model, best.simulated.memory)


def _print_json(found: list[Point], left_out: list[dict[str, Any]]) -> None:
    from relibra.simulation.limits import overlap_ratios, sustained_overlap_ratios

    best, sentences = _best(found)
    ratios = overlap_ratios(best.machine, best.model.expert)
    sustained = sustained_overlap_ratios(best.machine, best.model.expert)
    facts = {"overlap_ratio": ratios, "advice": sentences, "sustained_overlap_ratio": sustained}
    typer.echo(json.dumps({**facts, "rows": [one.row for one in found], "left_out": left_out}))


def _print(
    found: list[Point], left_out: list[dict[str, Any]], varied: list[str], about: tuple[simulated.Routes, Question]
) -> None:
    """Say what limits the best point, the most first; then show all of them, then those that cannot be."""
    routes, question = about
    best, sentences = _best(found)
    place = _in_words(best.row, varied or ["ranks", "balancer"])
    simulated.in_lines(f"most tokens per second and rank: {place}. What limits that step:")
    memory = [sentence for sentence in sentences[MOST_SENTENCES:] if sentence.startswith("Memory: ")]
    for sentence in sentences[:MOST_SENTENCES] + memory:
        simulated.in_lines(sentence)
    typer.echo()
    if routes.words:
        typer.echo(visible(routes.words))
    words = simulated.model_in_words(question.shape, best.model)
    rows = simulated.rows_in_words(best.simulated)
    simulated.in_lines(f"{words}; {rows}; label: simulated, on {question.machine.name}")
    if mixed := simulated.mixture_in_words(question.shape, best.model):
        simulated.in_lines(mixed)
    _print_table(found, varied)
    for why in dict.fromkeys(point["why"] for point in left_out):
        same = [point for point in left_out if point["why"] == why]
        more = f" and {len(same) - 1} more" * (len(same) > 1)
        simulated.in_lines(f"left out: {_in_words(same[0], varied)}{more}: {why}")


def _print_table(found: list[Point], varied: list[str]) -> None:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    short = {
        "ranks": "ranks", "ranks_per_node": "per\nnode", "slots": "slots", "micro_batch_tokens": "mb\ntokens",
        "pipeline_stages": "stages", "balancer": "balancer",
    }  # fmt: skip
    for name in varied or ["ranks", "balancer"]:
        table.add_column(short[name], justify="left" if name == "balancer" else "right", overflow="fold")
    rows = [point.row for point in found]
    staged = any(row["all_ranks"] != row["ranks"] for row in rows)
    moved = any(row["relocation_share"] >= WORTH_SAYING for row in rows)
    shares = ("exchange_share", "straggler_share", "copies_share") + ("relocation_share",) * moved
    titles = ("seconds", "/ static", "tokens/s\nper rank", "exch\n%", "strag\n%", "copy\n%", *(["move\n%"] * moved))
    for title in ("all\nranks",) * staged + (*titles, "skew", "GB"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            *(str(row[name]) for name in varied or ["ranks", "balancer"]),
            *([str(row["all_ranks"])] * staged),
            f"{row['seconds']:.4g}",
            f"{row['ratio_to_static_without_relocation']:.3f}",
            f"{row['tokens_per_second_per_rank_without_relocation']:,.0f}",
            *(f"{100 * row[name]:.0f}" for name in shares),
            f"{row['skew']:.3f}",
            f"{row['memory_bytes'] / 1e9:.3g}{'!' if row['memory_warning'] else ''}",
        )
    Console().print(table)
    legend = ["all ranks: expert-parallel ranks x pipeline stages"] * staged
    apart = ", without the relocation before the step (move), which later steps pay as far as homes change" * moved
    legend += [
        f"/ static: throughput over that of the static layout of the same machine and cut{apart and ', and tokens/s'}"
        f"{apart}",
        f"exch, strag, copy{', move' * moved}: shares of the step for rows on their way, experts of which only the "
        f"busiest ranks have work, copies in the open{', moves' * moved}",
        "skew: token-slots of the busiest / mean ranks",
        "GB: memory of the fullest rank, ! where it does not fit",
    ]
    simulated.in_lines("; ".join(legend))
    kept = sum(row["kept_static"] and row["balancer"] != "static" for row in rows)
    if kept:
        simulated.in_lines(f"rows in which the balancer kept the static layout: {kept}; relibra simulate says why")
