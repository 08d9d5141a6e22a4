"""Every control of the pages about plans, by keyboard, in a real browser. Skipped where there is no Chromium."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from relibra.planning.budget import Budget
from relibra.reporting.data.comparison import compare
from relibra.reporting.pages.load_facts import load_facts
from relibra.reporting.pages.plan_page import write_plan_page
from tests.reporting.planned import CLUSTER, EXPERT, compared_step, planned_step
from tests.reporting.test_report_in_browser import Tab, tab

__all__ = ["tab"]  # the fixture

PICTURES = "[...document.querySelectorAll('canvas[tabindex]')].map((canvas) => canvas.toDataURL())"
FOCUS = (
    "document.activeElement.id || document.activeElement.dataset.axis || document.activeElement.dataset.timeline || ''"
)


@pytest.fixture
def page(tmp_path: Path) -> Path:
    _, demand = planned_step()
    rows = compare(demand, CLUSTER, Budget(slots=1), ["static", "relibra_paper_anywhere"], expert=EXPERT)
    return write_plan_page(tmp_path / "plan.html", compared_step(), balancers=rows)


@pytest.mark.slow
def test_the_page_draws_without_a_complaint_at_any_width_and_theme(tab: Tab, page: Path) -> None:
    for width, phone, dark in ((1280, False, False), (390, True, False), (390, True, True)):
        tab.open(page, width=width, phone=phone, dark=dark)
        assert tab.complaints() == []
        assert {url.split(":")[0] for url in tab.requests()} <= {"file", "data"}
        assert tab.evaluate("document.documentElement.scrollWidth") <= width, "the page scrolls sideways"
        wide = (
            "[...document.querySelectorAll('table.bars, canvas, svg, input')]"
            f".filter((one) => one.getBoundingClientRect().right > {width}).length"
        )
        assert tab.evaluate(wide) == 0
        blank = (
            "[...document.querySelectorAll('canvas[tabindex]')].filter((canvas) => {"
            "const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;"
            "return new Set(new Uint32Array(data.buffer)).size < 5; }).length"
        )
        assert tab.evaluate(blank) == 0, "a picture is empty"


@pytest.mark.slow
def test_tab_reaches_every_control_and_shows_where_it_is(tab: Tab, page: Path) -> None:
    tab.open(page, width=1280)
    reached = []
    for _ in range(40):
        tab.press("Tab")
        reached.append(tab.evaluate(FOCUS))
        outline = tab.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert reached[-1] == "" or outline != "none", f"{reached[-1]} has no visible focus"
        if reached[-1] == "1":
            break
    controls = ["load-rows", "load-layer", "load-micro-batch", "timeline-layer", "timeline-zoom", "timeline-move"]
    assert [one for one in reached if one in controls] == controls
    assert [one for one in reached if one in ("m", "l", "0", "1")] == ["m", "m", "l", "l", "0", "1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("control", "key"),
    [
        ("load-rows", "ArrowDown"),
        ("load-layer", "ArrowLeft"),
        ("load-micro-batch", "ArrowLeft"),
        ("timeline-layer", "ArrowLeft"),
        ("timeline-zoom", "ArrowRight"),
        ("timeline-move", "ArrowRight"),
    ],
)
def test_each_control_moves_by_keyboard_and_changes_the_pictures(tab: Tab, page: Path, control: str, key: str) -> None:
    tab.open(page, width=1280)
    settle = "one.value = 1; one.dispatchEvent(new Event('input'));"
    names = "['load-layer', 'load-micro-batch', 'timeline-layer']"
    tab.evaluate(f"{names}.forEach((id) => {{ const one = document.getElementById(id); {settle} }})")
    before = tab.evaluate(PICTURES)
    tab.evaluate(f"document.getElementById('{control}').focus()")
    for _ in range(8 if control == "timeline-move" else 1):
        tab.press(key)
    after = tab.evaluate(PICTURES)
    own = slice(0, 4) if control.startswith("load") else slice(4, 6)
    assert all(one != other for one, other in zip(before[own], after[own], strict=True))
    assert tab.complaints() == []


@pytest.mark.slow
def test_arrow_keys_in_a_picture_move_the_cell_that_is_read_out(tab: Tab, page: Path) -> None:
    tab.open(page, width=390, phone=True)
    read = "document.getElementById('load-readout').textContent"
    tab.evaluate("document.querySelector('canvas[data-axis=\"l\"]').focus()")
    before, layer = tab.evaluate(read), tab.evaluate("Number(document.getElementById('load-layer').value)")
    tab.press("ArrowLeft" if layer else "ArrowRight")
    assert tab.evaluate("Number(document.getElementById('load-layer').value)") == (layer - 1 if layer else 1)
    assert tab.evaluate(read) != before
    tab.evaluate("document.querySelector('canvas[data-timeline=\"1\"]').focus()")
    tab.press("ArrowDown")
    said = tab.evaluate("document.getElementById('timeline-readout').textContent")
    assert "(simulated), rank " in said
    assert "micro-batch" in said


@pytest.mark.slow
def test_experts_have_a_scale_of_their_own_and_their_loads_are_not_cut_off(tab: Tab, page: Path) -> None:
    tab.open(page, width=390, phone=True)
    text = "document.getElementById('{}').textContent".format
    ranks = tab.evaluate(text("load-scale")), tab.evaluate(text("load-beyond"))
    tab.evaluate("document.getElementById('load-rows').focus()")
    tab.press("ArrowDown")
    experts = tab.evaluate(text("load-scale")), tab.evaluate(text("load-beyond"))
    scales = load_facts(compared_step())["scales"]
    for (scale, beyond), found, what in ((ranks, scales["ranks"], "rank"), (experts, scales["experts"], "instance")):
        assert scale.endswith(f"{found['end']:.2f}× mean")
        assert beyond.startswith(f"The largest load of one {what}")
        assert f"{found['largest']:.2f}× the mean" in beyond
        assert ("hatched" in beyond) is (found["largest"] > found["end"])
    busiest = load_facts(compared_step())["first"]
    load_E = compared_step().before.demand.load_MLE[busiest[1], busiest[0]]
    said = tab.evaluate(text("load-readout"))
    assert f"busiest expert {load_E.max() / load_E.mean():.2f}× → " in said
    assert f"expert {load_E.argmax()} {load_E.max() / load_E.mean():.2f}× → " in said
    assert "over" not in said
    ticks = "[...document.querySelectorAll('#load-scale span')].map((one) => one.getBoundingClientRect().toJSON())"
    boxes = tab.evaluate(ticks)
    assert all(left["right"] < right["left"] for left, right in pairwise(boxes)), "ticks overlap"
    assert boxes[-1]["right"] <= 390
    assert tab.complaints() == []
