"""The page and the figures about a plan."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from relibra.cluster import cluster_preset
from relibra.errors import ConfigError
from relibra.planning.budget import Budget
from relibra.planning.comparison import ComparisonRow, compare
from relibra.planning.levers import lever_bounds, lever_gaps
from relibra.planning.loads import home_rank_load
from relibra.planning.objective import expert_shape
from relibra.planning.plan import StepPlan
from relibra.planning.step import plan_step
from relibra.reporting import plan_pictures
from relibra.reporting.plan_page import render_plan_page, write_plan_page
from relibra.routing.demand import Demand
from relibra.routing.statistics import contiguous_homes

from .test_report_in_browser import Tab, tab

pytest.importorskip("plotly", reason="the page needs plotly: pip install 'relibra[report]'")

__all__ = ["tab"]  # the fixture

CLUSTER = cluster_preset("h100x8", 4, 2)
EXPERT = expert_shape("qwen3-30b-a3b")


def _step(layers: int = 3) -> tuple[StepPlan, Demand]:
    rng = np.random.default_rng(0)
    counts_SLE = rng.poisson(rng.lognormal(2, 1, (40, layers, 16))).astype(np.int32)
    demand = Demand(counts_SLE=counts_SLE, layer_ids=np.arange(1, layers + 1), sample_ids=np.arange(40))
    demand = demand.with_schedule(np.arange(40) % 5, np.arange(40) // 5 % 4, 4)
    return plan_step(demand, CLUSTER, Budget(slots=1, objective="tokens"), expert=EXPERT), demand


def test_the_page_says_what_the_plan_says() -> None:
    plan, demand = _step()
    rows = compare(demand, CLUSTER, Budget(slots=1), ["static", "ultraep", "relibra"], expert=EXPERT)
    rows.append(ComparisonRow(balancer="<b>late</b>", sees="live", valid=False, message="no <i>plan</i>"))
    page = render_plan_page(plan, demand, rows, datetime(2026, 1, 2, tzinfo=UTC))
    static, skew = (dict(lever_gaps(plan, demand))[name] for name in ("static", "cross-node copies"))
    assert f"compute {static:.2f}× the mean; with this plan {skew:.3f}×" in page
    assert plan.digest()[:16] in page
    assert "&lt;b&gt;late&lt;/b&gt;: no &lt;i&gt;plan&lt;/i&gt;" in page
    assert "<b>late" not in page
    assert f">{rows[1].skew:.3f}</td>" in page
    reachable = dict(lever_bounds(plan, demand))["static"]
    assert f'static</td><td class="number">{static:.3f}</td><td class="number">{reachable:.3f}</td>' in page
    assert "inside the node: static, ultraep, relibra" in page
    assert page == render_plan_page(plan, demand, rows, datetime(2026, 1, 2, tzinfo=UTC))


def test_heatmaps_show_loads_over_mean_before_and_after_on_one_scale() -> None:
    plan, demand = _step()
    before_MLR = home_rank_load(demand.load_MLE, np.tile(contiguous_homes(16, 4), (3, 1)), 4)
    after_MLR = plan.rank_load(plan.scheduled(demand))
    figure = plan_pictures.rank_heatmaps(before_MLR, after_MLR, plan.layer_ids)
    layers = plan_pictures.heatmap_layers(before_MLR, after_MLR)
    assert sorted(layers) == [0, 1, 2]
    gain_L = (before_MLR.max(axis=2) - after_MLR.max(axis=2)).sum(axis=0)
    assert gain_L[layers[0]] == gain_L.max()
    assert [(trace.meta, trace.visible, trace.yaxis) for trace in figure.data[:3]] == [
        (0, True, "y"), (0, True, "y2"), (1, False, "y"),
    ]  # fmt: skip
    expected = before_MLR[:, layers[0]] / before_MLR[:, layers[0]].mean(axis=1, keepdims=True)
    np.testing.assert_allclose(figure.data[0].z, expected.T, atol=0.006)
    assert {trace.coloraxis for trace in figure.data} == {"coloraxis"}


def test_waterfall_bars_join_and_end_at_the_plan() -> None:
    levers = [
        ("static", 2.0),
        ("schedule", 1.8),
        ("homes", 1.9),
        ("replicas", 1.1),
        ("cross-node copies", 1.1),
        ("bound", 1.05),
    ]
    figure = plan_pictures.lever_waterfall(levers)
    bars = {bar.y[0]: (bar.base[0], bar.base[0] + bar.x[0], bar.text[0]) for bar in figure.data}
    expected = {
        "static": (1.0, 2.0, "2.000"),
        "schedule": (1.8, 2.0, "-0.200"),
        "homes": (1.8, 1.9, "+0.100"),
        "replicas": (1.1, 1.9, "-0.800"),
        "cross-node copies": (1.1, 1.1, "+0.000"),
        "the plan": (1.0, 1.1, "1.100"),
        "its bound": (1.0, 1.05, "1.050"),
    }
    assert list(bars) == list(expected)
    for name, (low, high, text) in expected.items():
        assert bars[name] == (pytest.approx(low), pytest.approx(high), text)


def test_large_steps_show_some_layers_and_micro_batches() -> None:
    before_MLR = np.random.default_rng(0).integers(1, 9, (1000, 40, 64))
    layers = plan_pictures.heatmap_layers(before_MLR, before_MLR - 1)
    figure = plan_pictures.rank_heatmaps(before_MLR, before_MLR - 1, np.arange(40))
    assert sum(np.asarray(trace.z).size for trace in figure.data) <= plan_pictures.MAX_CELLS
    assert len(figure.data) == 2 * len(layers) >= 2


def test_a_step_without_tokens_has_a_page() -> None:
    counts_SLE = np.zeros((2, 1, 4), dtype=np.int32)
    demand = Demand(counts_SLE=counts_SLE, layer_ids=np.arange(1), sample_ids=np.arange(2))
    demand = demand.with_schedule(np.arange(2), np.arange(2), 2)
    plan = plan_step(demand, cluster_preset("h100x8", 2), Budget(slots=1), expert=EXPERT)
    assert "1.000×, exactly the bound" in render_plan_page(plan, demand, (), datetime(2026, 1, 2, tzinfo=UTC))


def test_a_folder_is_no_place_for_a_page(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"name an \.html file"):
        write_plan_page(tmp_path, *_step(1))


@pytest.mark.slow
def test_the_page_draws_without_a_complaint_and_the_selector_shows_both_heatmaps(tab: Tab, tmp_path: Path) -> None:
    plan, demand = _step()
    rows = compare(demand, CLUSTER, Budget(slots=1), ["static", "relibra+packing+cross-node"], expert=EXPERT)
    page = write_plan_page(tmp_path / "plan.html", plan, demand, rows)
    for width, phone, dark in ((1280, False, False), (390, True, True)):
        tab.open(page, width=width, phone=phone, dark=dark)
        assert tab.complaints() == []
        assert {url.split(":")[0] for url in tab.requests()} <= {"file", "data"}
        assert tab.evaluate("document.documentElement.scrollWidth") <= width, "the page scrolls sideways"
    choose = "const box = document.querySelector('select'); box.value = '1'; box.dispatchEvent(new Event('change'))"
    tab.evaluate(choose)
    visible = "document.getElementById('ranks-plot').data.map((trace) => trace.visible)"
    assert tab.evaluate(visible) == [False, False, True, True, False, False]
