"""Values of step.html: one step under two plans, first counted, then simulated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from relibra.planning.analysis.levers import lever_bounds, lever_gaps
from relibra.planning.costs.prediction import predict
from relibra.planning.plan import StepPlan
from relibra.reporting.data.byte_ledger import ByteLedger, byte_ledger
from relibra.reporting.data.compared_plans import ComparedStep
from relibra.reporting.data.number_format import count, exact_percent, gigabytes, percent
from relibra.reporting.data.step_simulation import simulate_plans, simulate_timelines
from relibra.reporting.data.ways_to_send import ways_to_send
from relibra.reporting.html.step_figures import load_figures, timeline_values
from relibra.simulation import SimulatedStep, memory_use, with_mini_batches
from relibra.simulation.fault_coverage import replica_cover, step_cover
from relibra.simulation.limits import overlap_ratios, step_parts, sustained_overlap_ratios
from relibra.simulation.units import format_bytes, format_seconds
from relibra.timeline import Timeline

Simulated = tuple[SimulatedStep, SimulatedStep]
"""Under the first and the second plan."""

MOE_TERMS = ("compute", "exchange", "gates", "copies", "relocation")
"""Parts of a simulated step that belong to its expert layers."""

MAX_FAILED_RANKS = 16

MIN_RELOCATION_SHARE = 0.01
"""A duration is shown without relocation too where relocation takes more than this share of it."""

FACTORS = (
    ("efficiency_L", "efficiency: useful / capacity"),
    ("data_factor_L", "data factor: useful / received"),
    ("routing_factor_L", "routing factor: received / sent by all ports"),
    ("port_factor_L", "port factor: sent by all ports / capacity"),
)


class Bar(NamedTuple):
    """A row of a table of bars (`bar_table` of elements.html).

    low, high   ends of the bar, in the unit of the axis
    kind        class of the style sheet: "whole", "saved", "added" or "limit"; each has a texture of its own
    mark        place of a line across the bar; None: no line
    """

    name: str
    low: float
    high: float
    cells: tuple[str, ...]
    kind: str = "whole"
    mark: float | None = None


def waterfall(levers: Sequence[tuple[str, float]], reachable: Sequence[tuple[str, float]]) -> list[Bar]:
    """Return the skew after each lever: the start, the change by each, the plan, and its bound.

    levers, reachable   as `planning.analysis.levers.lever_gaps` and `lever_bounds` return them
    """
    start, steps, bound = levers[0], levers[1:-1], levers[-1]
    reached = {name: f"{value:.3f}" for name, value in reachable}

    def whole(name: str, value: float, kind: str = "whole") -> Bar:
        return Bar(name, 1.0, value, (f"{value:.3f}", "", reached.get(name, "")), kind)

    bars = [whole(*start)]
    for (_, previous), (name, value) in zip(levers[:-2], steps, strict=True):
        cells = (f"{value:.3f}", f"{round(value - previous, 3) + 0.0:+.3f}", reached.get(name, ""))
        kind = "saved" if value <= previous else "added"
        bars.append(Bar(name, min(previous, value), max(previous, value), cells, kind))
    return [*bars, whole("the plan", steps[-1][1]), whole("its bound", bound[1], "limit")]


def end_of_skews(bars: Sequence[Bar]) -> float:
    """Return the end of an axis of skews that begins at 1."""
    return max([1.01, *(bar.high for bar in bars)])


def step_values(step: ComparedStep, timelines: Sequence[tuple[str, Timeline]] = (), remedy: str = "") -> dict[str, Any]:
    """Return the values of step.html.

    timelines   (name, timeline) of the step, measured or simulated elsewhere
    remedy      advice shown where counts of rows are bounds: how to count token by token; "" for none
    """
    simulated = simulate_plans(step) if step.after.demand.load_MLE.any() else None
    micro_batch, layer = step.most_improved()
    drawn, ranks = simulate_timelines(step, micro_batch) if simulated else ([], [])
    bars = {
        i: waterfall(lever_gaps(compared.plan, compared.given), lever_bounds(compared.plan, compared.given))
        for i, compared in enumerate(step.plans)
        if not compared.is_static
    }
    return {
        "compared": step,
        "simulated": simulated,
        "figures": key_figures(step, simulated),
        "levers": [(i, step.plans[i].name, rows, end_of_skews(rows)) for i, rows in bars.items()],
        "loads": load_figures(step) if all(plan.demand.load_MLE.any() for plan in step.plans) else None,
        "micro_batches": max(len(plan.plan.replica_MLRB) for plan in step.plans),
        "cover": _cover(step),
        "ledgers": _ledgers(step, simulated),
        "ways": _ways(step),
        "limits": _limits(step, simulated) if simulated else None,
        "remedy": remedy,
        "micro_batch": micro_batch,
        "simulated_ranks": ranks,
        "timelines": timeline_values([*drawn, *timelines], int(step.after.plan.layer_ids[layer])),
    }


def step_headline(step: ComparedStep) -> str:
    """Return for both plans the skew, and the mean share of the expert time that ranks wait for the busiest."""
    return " · ".join(
        f"{plan.name}: skew {plan.skew:.3f}, {exact_percent(1 - 1 / plan.skew)} of the expert time spent waiting"
        for plan in step.plans
    )


def key_figures(step: ComparedStep, simulated: Simulated | None) -> list[list[str]]:
    """Return rows of name, figure of both plans, and how many times as fast the second is."""
    plans = [compared.plan for compared in step.plans]
    rows = [
        ["skew", *(f"{compared.skew:.3f}" for compared in step.plans)],
        ["bound of the skew", *(f"{compared.bound:.3f}" for compared in step.plans)],
        ["gap", *(exact_percent(compared.skew / compared.bound - 1) for compared in step.plans)],
        ["share of the expert time spent waiting", *(exact_percent(1 - 1 / compared.skew) for compared in step.plans)],
        ["replicas", *(count(plan.num_copies) for plan in plans)],
        ["replicas per micro-batch and layer", *map(_copies_per_cell, plans)],
        ["replicas across nodes", *(count(plan.num_cross_node_copies) for plan in plans)],
        [f"experts moved before the step, of {count(plans[1].home_LE.size)}", *(count(p.num_moved) for p in plans)],
    ]
    moe: list[list[str]] = []
    if simulated:
        seconds = [sum(result.terms[name] for name in MOE_TERMS) for result in simulated]
        moe = duration_rows("expert layers, simulated", seconds, [result.terms["relocation"] for result in simulated])
    return [*([*row, ""] for row in rows), *moe]


def duration_rows(name: str, seconds: Sequence[float], relocation: Sequence[float]) -> list[list[str]]:
    """Return the row of a duration and, if relocation is long, one without it: experts move once for many steps."""
    durations = {name: seconds}
    if any(moved > MIN_RELOCATION_SHARE * total for total, moved in zip(seconds, relocation, strict=True)):
        durations[f"{name}, without relocation"] = (seconds[0] - relocation[0], seconds[1] - relocation[1])
    return [
        [name, format_seconds(old), format_seconds(new), f"{old / new if new else 1.0:.2f}×"]
        for name, (old, new) in durations.items()
    ]


def _cover(step: ComparedStep) -> dict[str, Any] | None:
    """Return the share of load whose experts survive if one rank fails, rank by rank; None: one rank, or no load."""
    before, after = step.plans
    plan = after.plan
    if plan.num_ranks < 2 or not after.demand.load_MLE.any():
        return None
    before_R, after_R = (step_cover(compared.plan, compared.demand) for compared in step.plans)
    order = np.argsort(after_R, kind="stable")
    shown = [(rank, float(before_R[rank]), float(after_R[rank])) for rank in sorted(order[:MAX_FAILED_RANKS].tolist())]
    layers = [replica_cover(compared.plan, compared.demand).min(axis=1) for compared in (before, after)]
    least = int(np.argmin(layers[1]))
    means = {
        "mean over ranks": (before_R.mean(), after_R.mean()),
        f"least covered rank, {order[0]}": (before_R[order[0]], after_R[order[0]]),
        f"least covered layer, {plan.layer_ids[least]}": (layers[0][least], layers[1][least]),
    }
    return {
        "means": [[name, *(percent(float(share)) for share in shares)] for name, shares in means.items()],
        "bars": [Bar(f"rank {rank}", 0.0, new, (percent(old), percent(new)), mark=old) for rank, old, new in shown],
        "replicas": _copies_per_cell(plan),
    }


def _copies_per_cell(plan: StepPlan) -> str:
    """Return the replicas per micro-batch and layer."""
    return f"{plan.num_copies / max(1, plan.bound_ML.size):.1f}"


def _ledgers(step: ComparedStep, simulated: Simulated | None) -> dict[str, Any] | None:
    """Return bytes by kind, then the ledger of dispatches, in total and per layer; None: no row travels."""
    ledgers = named_ledgers(step)
    totals = [item.total() for _, item in ledgers]
    if not any(total.useful_L.any() for total in totals):
        return None
    sizes = (("useful_L", "useful, GB"), ("duplicate_L", "duplicate, GB"), ("forwarded_L", "forwarded, GB"))
    sent = [item.bytes.as_dict() for item in simulated or ()]
    links = ("inside", "between") if step.cluster.num_nodes > 1 else ("inside",)
    kinds = [(kind, link, [item[kind][link] for item in sent]) for link in links for kind in (sent[0] if sent else ())]
    old, new = (item.efficiency_L for _, item in ledgers[:2])
    return {
        "names": [name for name, _ in ledgers],
        "kinds": [
            [f"{kind}, {link} nodes", *map(gigabytes, of_plans)] for kind, link, of_plans in kinds if any(of_plans)
        ],
        "exact": all(total.exact for total in totals),
        "totals": [
            *([name, *(gigabytes(float(getattr(total, key)[0])) for total in totals)] for key, name in sizes),
            *([name, *(percent(float(getattr(total, key)[0])) for total in totals)] for key, name in FACTORS),
        ],
        "layers": [
            Bar(f"{layer}", 0.0, float(new[i]), _factors_of_layer(ledgers, i), mark=float(old[i]))
            for i, layer in enumerate(step.after.plan.layer_ids.tolist())
        ],
        "most": float(max(old.max(), new.max())) or 1.0,
    }


def _ways(step: ComparedStep) -> list[list[str]]:
    """Return rows of the ways to send the rows of the second plan; none where no row travels."""
    after, model = step.after, step.model
    ways = ways_to_send(after.plan, after.demand, step.cluster, model.expert, model.top_k, after.rows)
    if not any(way.useful_bytes for way in ways):
        return []
    return [
        [
            f"{way.way} (the plan)" if way.used else way.way,
            *map(gigabytes, (way.useful_bytes, way.duplicate_bytes, way.forwarded_bytes)),
            *map(count, (way.messages, way.fences)),
            *map(percent, (way.data_factor, way.routing_factor, way.port_factor)),
            *map(format_seconds, (way.seconds, way.seconds_counting)),
        ]
        for way in ways
    ]


def named_ledgers(step: ComparedStep) -> list[tuple[str, ByteLedger]]:
    """Return the ledger of each plan as executed (a token goes to a rank once), and the second plan's per choice.

    If it is not known which experts tokens choose together, both ledgers count a row per choice; there is no third.
    """
    known, row_bytes = step.shared_choices_known, step.model.expert.row_bytes
    return [
        (
            f"{plan.name}, per choice" if known and not once else plan.name,
            byte_ledger(plan.plan, plan.demand, step.cluster, row_bytes, distinct=plan.rows, send_once=once),
        )
        for plan, once in [(step.before, known), (step.after, known)] + [(step.after, False)] * known
    ]


def _factors_of_layer(ledgers: Sequence[tuple[str, ByteLedger]], i: int) -> tuple[str, ...]:
    return tuple(" → ".join(f"{100 * getattr(item, key)[i]:.0f}" for _, item in ledgers) for key, _ in FACTORS)


def _limits(step: ComparedStep, simulated: Simulated) -> dict[str, Any]:
    """Return overlap ratios, durations, memory, and the seconds of the step part by part, the longest first."""
    after = step.after
    sustained = sustained_overlap_ratios(step.cluster, step.model.expert)
    seconds = [result.seconds for result in simulated]
    before_parts, after_parts = map(step_parts, simulated)
    parts = {name: (before_parts[name], value) for name, value in after_parts.items() if before_parts[name] or value}
    demand, how = with_mini_batches(after.demand)
    use = memory_use(after.plan, demand, step.cluster, step.model, how)
    memory = {**use.parts, "activations, static layout": use.activations_static}
    predicted = predict(after.plan, after.demand, step.cluster, step.model.expert)
    return {
        "overlap": [
            [where, f"{ratio:.2f}", f"{sustained[where]:.2f}"]
            for where, ratio in overlap_ratios(step.cluster, step.model.expert).items()
        ],
        "durations": [
            *duration_rows("step", seconds, [result.terms["relocation"] for result in simulated]),
            ["share of the peak flops used", *(percent(item.model_flops_utilisation) for item in simulated), ""],
        ],
        "memory": [[name, format_bytes(size)] for name, size in memory.items() if size],
        "memory_warning": use.warning,
        "parts": [
            Bar(name, 0.0, new, (format_seconds(old), format_seconds(new), percent(new / (seconds[1] or 1.0))))
            for name, (old, new) in sorted(parts.items(), key=lambda part: -part[1][1])
        ],
        "longest": max(map(max, parts.values()), default=1.0),
        "planner_seconds": predicted.total - predicted.attention - predicted.host,
    }
