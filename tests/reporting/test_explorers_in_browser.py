"""Every control of the pages about plans, by keyboard, in a real browser. Skipped where there is no Chromium."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from relibra.planning.budget import Budget
from relibra.reporting.html.page import write_page
from relibra.reporting.pages.plan_page import render_plan_page
from tests.reporting.planned import CLUSTER, EXPERT, compare, compared_step, planned_step
from tests.reporting.test_report_in_browser import Tab, tab

__all__ = ["tab"]  # the fixture

SLIDERS = ["load-layers", "load-micro_batches", "timeline-layer"]
SHOWN = (
    "[...document.querySelectorAll('.plot')].map((plot) => JSON.stringify("
    "[plot.layout.xaxis.range, plot.data.map((trace) => trace.visible)]))"
)


@pytest.fixture
def page(tmp_path: Path) -> Path:
    _, demand = planned_step()
    rows = compare(demand, CLUSTER, Budget(slots=1), ["static", "relibra_paper_anywhere"], expert=EXPERT)
    return write_page(tmp_path / "plan.html", render_plan_page(compared_step(), datetime(2026, 1, 2, tzinfo=UTC), rows))


@pytest.mark.slow
def test_the_page_draws_at_any_width_and_theme(tab: Tab, page: Path) -> None:
    for width, phone, dark in ((1280, False, False), (390, True, False), (390, True, True)):
        tab.open(page, width=width, phone=phone, dark=dark)
        assert tab.complaints() == []
        assert {url.split(":")[0] for url in tab.requests()} <= {"file", "data"}
        assert tab.evaluate("document.documentElement.scrollWidth") <= width, "the page scrolls sideways"
        for id in ("loads-ranks-layers", "loads-experts-micro_batches", "timelines"):
            marks = f"document.querySelectorAll('#{id} .heatmaplayer image, #{id} .barlayer path').length"
            assert tab.evaluate(marks) > 0, f"{id} is empty"


@pytest.mark.slow
@pytest.mark.parametrize("slider", SLIDERS)
def test_sliders_move_by_keyboard_and_change_their_figures_only(tab: Tab, page: Path, slider: str) -> None:
    tab.open(page, width=1280)
    before = tab.evaluate(SHOWN)
    tab.evaluate(f"document.getElementById('{slider}').focus()")
    tab.press("ArrowLeft" if int(tab.evaluate(f"document.getElementById('{slider}').value")) else "ArrowRight")
    changed = [one != other for one, other in zip(before, tab.evaluate(SHOWN), strict=True)]
    plots = zip(SLIDERS, (2, 2, 1), strict=True)
    assert changed == [name == slider for name, number in plots for _ in range(number)]
    assert tab.complaints() == []
