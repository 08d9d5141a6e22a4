"""Pages about plans, for the verbs that have a plan at hand or in a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from relibra.cli.inputs import simulated, workload
from relibra.cli.trace import visible

if TYPE_CHECKING:
    from relibra.cluster import Cluster
    from relibra.planning.analysis.comparison import ComparisonRow
    from relibra.planning.plan import StepPlan
    from relibra.routing.demand import Demand

About = tuple["Cluster", str | None, Path, int | None]
"""Machine, name of the model (None: the default), trace, and experts per layer where the trace does not say."""


def write_page_of_plan(
    html: Path | None, plan: StepPlan, demand: Demand, about: About, rows: Sequence[ComparisonRow] = ()
) -> None:
    """Write the page of a plan beside the static layout, if somebody wants one, and say where it is."""
    if html is None:
        return
    from relibra.reporting.data.compared_plans import side_of, static_side
    from relibra.reporting.data.planned_step import distinct_of
    from relibra.reporting.pages.plan_page import Question, write_plan_page
    from relibra.routing.readers import open_trace
    from relibra.simulation import cut_model

    machine, model, trace, num_experts = about
    before, after = static_side(plan, demand), side_of("the plan", plan, demand)
    with workload.progress(f"simulating and drawing {html}"):
        question = Question(
            cluster=machine,
            model=cut_model(simulated.open_model(model or workload.DEFAULT_MODEL), demand),
            rows=rows,
            distinct=distinct_of(open_trace(trace, num_experts), before, after),
        )
        page = write_plan_page(html, before, after, question)
    typer.echo(f"page: {visible(str(page))}", err=True)
