"""The section on what would limit a model on a cluster, simulated under both plans."""

from __future__ import annotations

from relibra.planning.costs.prediction import predict
from relibra.reporting.data.compared_plans import ComparedStep
from relibra.reporting.data.number_format import percent
from relibra.reporting.data.step_simulation import StepSimulation
from relibra.reporting.html.html import bullets, cards, paragraph, section
from relibra.reporting.html.html_bars import Bar, bar_table
from relibra.simulation import advice
from relibra.simulation.limits import overlap_ratios, sustained_overlap_ratios
from relibra.simulation.units import seconds_in_words

MIN_RELOCATION_SHARE = 0.01
"""A relocation below this share of a duration is not shown by itself."""


def limits_section(step: ComparedStep, found: StepSimulation, *, remedy: str = "") -> str:
    """Show the overlap ratio, what limits the step, and its seconds part by part.

    remedy    how to count rows, shown where they are bounds
    """
    before, after = step.plans
    cluster, model = step.cluster, step.model
    items = [
        *_overlap_cards(step),
        seconds_card(
            step.label("Step, simulated"),
            before.name,
            (found.before.seconds, found.after.seconds),
            found.term("relocation"),
        ),
        (
            step.label("Flops used"),
            percent(found.after.model_flops_utilisation),
            f"of the peak, simulated; {before.name} {percent(found.before.model_flops_utilisation)}",
        ),
    ]
    part = f" ({model.part_in_words})" if model.part_in_words else ""
    return section(
        "limits",
        f"What would limit {model.name} on {cluster.name} (simulated)",
        paragraph(
            f"Nothing here was measured. A simulation of {cluster.num_ranks} ranks of {cluster.name} ({cluster.label}: "
            f"{cluster.source}) with the sizes of {model.name}: {model.moe_layers} expert layers{part}, {model.top_k} "
            f"of {model.experts} experts per token, hidden size {model.hidden}.",
        ),
        cards(items),
        "" if before.is_static else paragraph(f"With {after.name}:"),
        bullets(advice(found.after, cluster, model, found.memory)),
        _parts_table(step, found),
        paragraph(
            "One pipeline stage, one optimizer step; replicas are copied while other work runs. Parts add up to the "
            "step. " + " ".join([_describe_rows(step, remedy), _describe_planner_seconds(step), *found.after.notes]),
            "how",
        ),
    )


def _parts_table(step: ComparedStep, found: StepSimulation) -> str:
    """Return the parts of the step, the longest of the second plan first."""
    parts = {name: found.term(name) for name in found.after.terms if any(found.term(name))}
    bars = [
        Bar(
            name=name,
            low=0.0,
            high=after,
            kind="whole",
            cells=(seconds_in_words(before), seconds_in_words(after), percent(after / (found.after.seconds or 1.0))),
        )
        for name, (before, after) in sorted(parts.items(), key=lambda part: -part[1][1])
    ]
    longest = max((max(seconds) for seconds in parts.values()), default=1.0)
    header = ("part", step.before.name, step.after.name, "share")
    return bar_table("Parts of the step, simulated; bars from 0", header, bars, start=0.0, end=longest)


def seconds_card(
    label: str, beside: str, seconds: tuple[float, float], relocation: tuple[float, float]
) -> tuple[str, str, str]:
    """Return the card of a duration: the second plan's, with the first beside it, and both without relocation.

    Experts move once and may stay for many steps, so a step that includes the moves says nothing about the next.
    """

    def beside_first(first: float, second: float) -> str:
        return f"{beside} {seconds_in_words(first)}, {first / second if second else 1.0:.2f}×"

    note = f"{beside_first(*seconds)} as fast"
    if any(moved > MIN_RELOCATION_SHARE * total for total, moved in zip(seconds, relocation, strict=True)):
        first, second = (total - moved for total, moved in zip(seconds, relocation, strict=True))
        note += f"; without relocation, which is paid once: {seconds_in_words(second)}, {beside_first(first, second)}"
    return label, seconds_in_words(seconds[1]), note


def _overlap_cards(step: ComparedStep) -> list[tuple[str, str, str]]:
    sustained = sustained_overlap_ratios(step.cluster, step.model.expert)
    return [
        (
            f"Overlap ratio {where}",
            f"{ratio:.2f}",
            "seconds that a token computes in an expert / seconds that it travels to it and back, at peak flops; "
            f"{sustained[where]:.2f} at sustained flops",
        )
        for where, ratio in overlap_ratios(step.cluster, step.model.expert).items()
    ]


def _describe_rows(step: ComparedStep, remedy: str) -> str:
    if step.distinct_rows is not None:
        return "Rows between ranks are counted token by token."
    end = f"; {remedy}." if remedy else "."
    if step.after.demand.pairs_LEE is None:
        return f"Rows between ranks: one for every choice, an upper bound, because tokens were not counted{end}"
    return f"Rows between ranks are a lower bound from pairs of experts{end}"


def _describe_planner_seconds(step: ComparedStep) -> str:
    """Return the planner's own seconds for the expert layers, and why they are others than simulated ones."""
    after = step.after
    predicted = predict(after.plan, after.demand, step.cluster, step.model.expert)
    rows = "a row for every choice" if after.demand.pairs_LEE is None else "a lower bound of rows from pairs of experts"
    return (
        f"The planner’s own model gives {seconds_in_words(predicted.total - predicted.attention - predicted.host)} for "
        f"the expert layers with {after.name}: it uses {rows}, no gate weights, and hides copies behind projections "
        "only."
    )
