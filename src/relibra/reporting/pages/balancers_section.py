"""The section that compares balancers on one step."""

from __future__ import annotations

from collections.abc import Sequence

from relibra.reporting.data.comparison import ComparisonRow, describe_scopes
from relibra.reporting.html.html import paragraph, section, table
from relibra.reporting.html.html_bars import Bar, bar_table
from relibra.reporting.pages.limits_section import MIN_RELOCATION_SHARE


def balancers_section(rows: Sequence[ComparisonRow]) -> str:
    """Return bars of skew and bound by balancer, lowest skew first, a table of all figures, and errors."""
    if not rows:
        return ""
    made = [row for row in rows if row.skew is not None]
    failed = [f"{row.balancer}: {row.message}" for row in rows if row.message]
    header = (
        *("balancer", "sees", "step s (model)", "skew", "gap", "replicas", "pushed GB", "exposed s (model)"),
        *("across nodes", "slots", "slots GB", "moved GB", "plan s"),
    )
    return section(
        "balancers",
        "Comparison of balancers",
        _bars(made),
        table("Comparison of balancers", header, [_cells(row) for row in made], text_columns=(0, 1)),
        paragraph(
            "Sees: what the balancer may know of the step. Skew: busiest / mean load of ranks, over all micro-batches "
            "and layers. Gap: skew / bound − 1. Replicas: temporary copies of experts per micro-batch and layer. "
            "Pushed: weights sent to replicas before forward and again before backward. Exposed: seconds of copies "
            "that nothing hides. Across nodes: share of token-slots computed on another node than they come from. "
            "Slots: spare slots per rank, in brackets the most that are filled if fewer; their memory with gradients. "
            "Plan s: measured on the machine that planned. Step s: predicted by the planner’s model of attention and "
            "experts; it differs from simulated seconds, because its rows are a bound from pairs of experts. In "
            "brackets: without moves of experts, which happen once.",
            "how",
        ),
        paragraph(
            f"Bounds compare only between balancers whose replicas may be on the same nodes: {describe_scopes(made)}.",
            "how",
        )
        if any(row.copies for row in made)
        else "",
        *(paragraph(text, "notice") for text in failed),
    )


def balancers_headline(rows: Sequence[ComparisonRow]) -> str:
    """Return the balancer of fewest seconds by the planner's model, and the most even one."""
    made = [row for row in rows if row.skew is not None and row.predicted_seconds is not None]
    if not made:
        return "No balancer made a valid plan."
    fastest = min(made, key=lambda row: (row.predicted_seconds or 0.0, row.balancer))
    evenest = min(made, key=lambda row: (row.skew or 0.0, row.balancer))
    seconds = f"fewest seconds by the planner’s model: {fastest.balancer}, {fastest.predicted_seconds:.3g} s"
    return f"{seconds} · lowest skew: {evenest.balancer}, {evenest.skew:.3f}"


def _bars(made: Sequence[ComparisonRow]) -> str:
    bars = []
    for row in sorted(made, key=lambda row: (row.skew or 0.0, row.balancer)):
        assert row.skew is not None, "only balancers that made a plan"
        assert row.bound is not None, "a balancer with a skew has a bound"
        cells = (f"{row.skew:.3f}", f"{row.bound:.3f}")
        bars.append(Bar(name=row.balancer, low=1.0, high=row.skew, kind="whole", cells=cells, mark=row.bound))
    if not bars:
        return ""
    caption = "Skew of each balancer; bars begin at 1, which is even, and a line marks the bound"
    return bar_table(
        caption, ("balancer", "skew", "bound"), bars, start=1.0, end=max(1.01, *(bar.high for bar in bars))
    )


def _cells(row: ComparisonRow) -> list[str]:
    assert row.bytes is not None, "only balancers that made a plan"
    return [
        row.balancer,
        row.sees,
        _seconds(row),
        f"{row.skew:.3f}",
        f"{row.gap:.1%}",
        f"{row.copies_per_micro_batch_layer:.1f}",
        f"{row.bytes.weights.total / 1e9:.1f}",
        f"{row.exposed_seconds or 0.0:.3g}",
        f"{row.cross_node_share or 0.0:.1%}",
        f"{row.slots}" if row.slots == row.slots_used else f"{row.slots} ({row.slots_used})",
        f"{(row.slot_bytes or 0) / 1e9:.2f}",
        f"{row.bytes.moves.total / 1e9:.1f}",
        f"{row.plan_seconds:.2f}",
    ]


def _seconds(row: ComparisonRow) -> str:
    total, moved = row.predicted_seconds or 0.0, row.relocation_seconds or 0.0
    return f"{total:.3g} ({total - moved:.3g})" if moved > MIN_RELOCATION_SHARE * total else f"{total:.3g}"
