"""`render_plan_page`: a self-contained HTML page that compares a plan with the static layout or with another plan."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from relibra.printable import plural
from relibra.reporting.data.compared_plans import ComparedStep
from relibra.reporting.data.comparison import COLUMNS, ComparisonRow
from relibra.reporting.html.page import render_page
from relibra.reporting.pages.step_values import Bar, end_of_skews, step_headline, step_values
from relibra.timeline import Timeline


def render_plan_page(
    step: ComparedStep,
    made: datetime,
    balancers: Sequence[ComparisonRow] = (),
    timelines: Sequence[tuple[str, Timeline]] = (),
    remedy: str = "",
) -> str:
    """Return the page of a plan as text; the same values give the same bytes.

    balancers   figures of balancers on the same step: the page compares them first, then shows the plan of one
    timelines, remedy   as `step_values`
    """
    plan = step.after.plan
    M, L, R, _ = plan.replica_MLRB.shape
    planned = [item for item in step.plans if not item.is_static]
    return render_page(
        "plan.html",
        title=f"{plan.num_experts} experts on {R} ranks"
        + f": {step.before.name} and {step.after.name}" * (len(planned) > 1),
        kind="comparison of balancers" if balancers else "plan of a step",
        headline=balancers_headline(balancers) if balancers else step_headline(step),
        facts=[
            f"{made:%Y-%m-%d %H:%M} UTC",
            *(f"plan {item.plan.digest()[:16]} by {item.plan.balancer}" for item in planned),
            f"{plural(M, 'micro-batch')}, {plural(L, 'layer')}, {plural(plan.num_experts, 'expert')}",
            f"{plural(R, 'rank')} on {plural(plan.num_nodes, 'node')}, {plural(plan.slots, 'spare slot')} per rank",
        ],
        balancers=balancer_values(balancers) if balancers else None,
        step=step_values(step, timelines, remedy),
        step_headline=step_headline(step),
        words=("plans",),
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


def balancer_values(rows: Sequence[ComparisonRow]) -> dict[str, Any]:
    """Return the values of balancers.html."""
    made = [row for row in rows if row.skew is not None]
    bars = [
        Bar(row.balancer, 1.0, row.skew or 1.0, (f"{row.skew:.3f}", f"{row.bound:.3f}"), mark=row.bound)
        for row in sorted(made, key=lambda row: (row.skew or 0.0, row.balancer))
    ]
    return {
        "bars": bars,
        "end": end_of_skews(bars),
        "columns": COLUMNS,
        "rows": [[row.balancer, row.sees, *(column.cell(row) for column in COLUMNS)] for row in made],
        "failed": [(row.balancer, row.message) for row in rows if row.message],
    }
