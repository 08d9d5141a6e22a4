"""`write_page`: the HTML page of a plan beside the static layout; `check_page`: whether it can be drawn."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from relibra.cli.inputs.workload import Workload
from relibra.cli.outputs.terminal import print_note, progress

if TYPE_CHECKING:
    from relibra.planning.plan import StepPlan
    from relibra.reporting.data.comparison import ComparisonRow


def check_page(path: Path | None) -> None:
    """Raise a ConfigError, before anything is planned, where a page is asked for and plotly is not installed."""
    from relibra.reporting.html.route_figures import plotly_figures

    if path is not None:
        plotly_figures()


def write_page(
    path: Path, plan: StepPlan, workload: Workload, rows: Sequence[ComparisonRow] = (), *, name: str = "the plan"
) -> None:
    """Write the page of a plan and print its path on stderr.

    rows     balancers on the same step, which the page compares first
    name     of the plan
    """
    from relibra.reporting.data.compared_plans import compare_plan, compare_static, compare_step
    from relibra.reporting.html.page import write_page as write_html
    from relibra.reporting.pages.plan_page import render_plan_page

    demand = workload.demand
    plans = compare_static(plan, demand), compare_plan(name, plan, demand)
    with progress(f"simulating and drawing {path}"):
        step = compare_step(plans, workload.machine, workload.model, workload.open_routes())
        write_html(path, render_plan_page(step, datetime.now(UTC), rows))
    print_note(f"page: {path}")
