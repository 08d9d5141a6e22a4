"""The page about a plan, and about two."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from relibra.cluster import cluster_preset
from relibra.errors import ConfigError
from relibra.planning.budget import Budget
from relibra.planning.comparison import ComparisonRow, compare
from relibra.planning.levers import lever_bounds, lever_gaps
from relibra.planning.objective import predict
from relibra.planning.step import plan_step
from relibra.reporting.bars import waterfall
from relibra.reporting.plan_page import Question, render_plan_page, write_plan_page
from relibra.reporting.sides import Side, side_of, static_side
from relibra.routing.demand import Demand
from relibra.simulation import model_shape, overlap_ratio, simulate_step
from relibra.simulation.quantities import seconds_in_words
from relibra.timeline import Event, Timeline

from .planned import CLUSTER, EXPERT, planned_step, question, sides

MADE = datetime(2026, 1, 2, tzinfo=UTC)


def _sections(page: str) -> list[str]:
    return re.findall(r'<section id="([a-z0-9-]+)"', page)


def test_the_page_says_what_the_plan_says() -> None:
    plan, demand = planned_step()
    rows = compare(demand, CLUSTER, Budget(slots=1), ["static", "ultraep", "relibra"], expert=EXPERT)
    rows.append(ComparisonRow(balancer="<b>late</b>", sees="live", valid=False, message="no <i>plan</i>"))
    page = render_plan_page(*sides(), question(rows=rows), MADE)
    static, skew = (dict(lever_gaps(plan, demand))[name] for name in ("static", "cross-node copies"))
    assert f"compute {static:.2f}× the mean, with the plan {skew:.3f}×" in page
    assert plan.digest()[:16] in page
    assert "&lt;b&gt;late&lt;/b&gt;: no &lt;i&gt;plan&lt;/i&gt;" in page
    assert "<b>late" not in page
    assert f">{rows[1].skew:.3f}</td>" in page
    reachable = dict(lever_bounds(plan, demand))["static"]
    cells = (f"{static:.3f}", "", f"{reachable:.3f}")
    assert ">static</th>" + "".join(f'<td class="number">{cell}</td>' for cell in cells) in page
    assert "inside the node: static, ultraep, relibra" in page
    assert page == render_plan_page(*sides(), question(rows=rows), MADE)


def test_the_card_of_the_moe_layers_shows_what_the_plan_predicts() -> None:
    _, demand = planned_step()
    pairs_LEE = np.einsum("sle,slf->lef", demand.counts_SLE, demand.counts_SLE).astype(np.int64)
    demand = replace(demand, pairs_LEE=pairs_LEE)
    budget = Budget(slots=2, objective="tokens", cross_node_copies=True)
    plan = plan_step(demand, CLUSTER, budget, expert=EXPERT, never_worse=False)
    static = plan_step(demand, CLUSTER, budget, "static", expert=EXPERT)
    page = render_plan_page(static_side(plan, demand), side_of("the plan", plan, demand), question(), MADE)
    card = page[page.index("MoE layers") :]
    card = card[: card.index("model, not measured")]
    assert seconds_in_words(plan.predicted["total"]) in card
    assert seconds_in_words(static.predicted["total"]) in card
    bare = predict(plan, plan.scheduled(demand), CLUSTER, EXPERT)
    assert seconds_in_words(bare.total) not in card  # without pairs, and with all copies in the open


def test_what_limits_the_model_comes_first_and_is_what_the_simulator_says() -> None:
    before, after = sides()
    asked = question()
    page = render_plan_page(before, after, asked, MADE)
    assert _sections(page) == ["limits", "levers-1", "loads", "timeline", "bytes", "cover", "glossary"]
    ratio = overlap_ratio(EXPERT, CLUSTER.intra.bytes_per_second, CLUSTER.peak_flops_per_second)
    assert page.index(f'<dd class="value">{ratio:.2f}</dd>') < page.index('id="levers-1"')
    step = simulate_step(after.plan, after.demand, CLUSTER, asked.model)
    assert seconds_in_words(step.terms["compute"]) in page
    first = page[page.index('<ul class="">') :]
    assert first.startswith('<ul class=""><li>Overlap ratio')


def test_two_plans_stand_side_by_side() -> None:
    plan, demand = planned_step()
    other = plan_step(demand, CLUSTER, Budget(slots=0, objective="tokens"), expert=EXPERT)
    first, second = side_of("plan <one>", other, demand), side_of("plan two", plan, demand)
    page = render_plan_page(first, second, question(), MADE)
    assert "<one>" not in page
    assert "With plan &lt;one&gt; the busiest ranks compute" in page
    assert {"levers-0", "levers-1"} <= set(_sections(page))
    assert other.digest()[:16] in page
    assert plan.digest()[:16] in page


def test_plans_of_other_sizes_are_refused(tmp_path: Path) -> None:
    small = side_of("small", *planned_step(2))
    with pytest.raises(ConfigError, match="small is for 2 layers, the plan for 3"):
        write_plan_page(tmp_path / "page.html", small, sides()[1], question())


def test_a_recorded_timeline_is_drawn_beside_the_simulated_ones() -> None:
    events = tuple(
        Event(stage, layer, 0, rank, 0.1 * layer + 0.01 * rank, 0.02, 5, "")
        for layer in (1, 2)
        for rank in range(2)
        for stage in ("dispatch", "</script>odd")
    )
    measured = Timeline(events=events, num_ranks=4, label="measured")
    page = render_plan_page(*sides(), question(timelines=[("run", measured)]), MADE)
    assert "<figcaption>run (measured)</figcaption>" in page
    assert "</script>odd" not in page


def test_waterfall_bars_join_and_end_at_the_plan() -> None:
    levers = [
        ("static", 2.0),
        ("schedule", 1.8),
        ("homes", 1.9),
        ("replicas", 1.1),
        ("cross-node copies", 1.1),
        ("bound", 1.05),
    ]
    html = waterfall(levers, [("static", 1.2)])
    bars = re.findall(r'row" class="name">([^<]+)</th>.*?class="bar (\w+)" style="left:([\d.]+)%;width:([\d.]+)%', html)
    assert [(name, kind, float(left), float(left) + float(width)) for name, kind, left, width in bars] == [
        ("static", "whole", 0, 100),
        ("schedule", "saved", 80, 100),
        ("homes", "added", 80, 90),
        ("replicas", "saved", 10, 90),
        ("cross-node copies", "saved", 10, 10),
        ("the plan", "whole", 0, 10),
        ("its bound", "limit", 0, 5),
    ]
    assert "-0.200" in html
    assert "+0.100" in html


def test_a_step_without_tokens_has_a_page() -> None:
    demand = Demand(counts_SLE=np.zeros((2, 1, 4), np.int32), layer_ids=np.arange(1), sample_ids=np.arange(2), top_k=2)
    demand = demand.with_schedule(np.arange(2), np.arange(2), 2)
    cluster = cluster_preset("h100x8", 2)
    plan = plan_step(demand, cluster, Budget(slots=1), expert=EXPERT)
    model = replace(model_shape("qwen3-30b-a3b"), moe_layers=1, experts=4, top_k=2)
    asked = Question(cluster=cluster, model=model)
    page = render_plan_page(static_side(plan, demand), side_of("the plan", plan, demand), asked, MADE)
    assert "1.000×, exactly the bound" in page


def test_a_folder_is_no_place_for_a_page(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"name an \.html file"):
        write_plan_page(tmp_path, *sides(1), question(1))


def large_step() -> tuple[Side, Side, Question]:
    """94 layers x 32 micro-batches x 64 ranks, 128 experts, with power-law loads."""
    M, L, R, E = 32, 94, 64, 128
    rng = np.random.default_rng(0)
    popularity_LE = rng.dirichlet(np.full(E, 0.7), L)
    counts_SLE = np.stack([rng.multinomial(512, popularity_LE[layer], M * R) for layer in range(L)], axis=1)
    places = np.arange(M * R)
    demand = Demand(counts_SLE=counts_SLE.astype(np.int32), layer_ids=np.arange(L), sample_ids=places, top_k=8)
    demand = demand.with_schedule(places // R, places % R, R)
    cluster = cluster_preset("h100x8", R)
    plan = plan_step(demand, cluster, Budget(slots=2, objective="tokens"), "foremoe", expert=EXPERT)
    model = replace(model_shape("qwen3-30b-a3b"), moe_layers=L)
    return static_side(plan, demand), side_of("the plan", plan, demand), Question(cluster=cluster, model=model)


@pytest.mark.slow
def test_a_large_step_makes_a_page_of_a_few_megabytes_in_seconds(tmp_path: Path) -> None:
    before, after, asked = large_step()
    start = time.perf_counter()
    page = write_plan_page(tmp_path / "page.html", before, after, asked)
    seconds = time.perf_counter() - start
    assert page.stat().st_size < 8_000_000
    assert page.stat().st_size + 4_900_000 < 8_000_000, "a page about a run has plotly too"
    assert seconds < 20
