"""The page about a plan, and about two."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import pytest
from plotly.offline import get_plotlyjs

from relibra.cluster import cluster_preset
from relibra.errors import ConfigError
from relibra.planning.analysis.levers import lever_bounds, lever_gaps
from relibra.planning.budget import Budget
from relibra.planning.costs.prediction import predict
from relibra.planning.planner import plan_step
from relibra.planning.traffic.distinct_rows import distinct_rows_of_step
from relibra.reporting.data.byte_ledger import byte_ledger
from relibra.reporting.data.compared_plans import ComparedStep, compare_plan, compare_static
from relibra.reporting.data.comparison import ComparisonRow
from relibra.reporting.data.number_format import percent
from relibra.reporting.data.ways_to_send import ways_to_send
from relibra.reporting.html.page import templates
from relibra.reporting.pages.plan_page import balancer_values, render_plan_page
from relibra.reporting.pages.step_values import duration_rows, step_headline, waterfall
from relibra.routing.demand import Demand
from relibra.simulation import model_shape, overlap_ratio, simulate_step
from relibra.simulation.units import format_seconds
from relibra.timeline import Event, Timeline
from tests.reporting.planned import CLUSTER, EXPERT, compare, compared_plans, compared_step, planned_step

MADE = datetime(2026, 1, 2, tzinfo=UTC)


def rendered(*values, **others) -> str:
    """The page in one line: where a template breaks its lines is of no importance."""
    return re.sub(r"[ \n]+", " ", render_plan_page(*values, **others))


def _sections(page: str) -> list[str]:
    return re.findall(r'<section id="([a-z0-9-]+)"', page)


def test_the_page_says_what_the_plan_says() -> None:
    plan, demand = planned_step()
    rows = compare(demand, CLUSTER, Budget(slots=1), ["static", "ultraep", "relibra"], expert=EXPERT)
    rows.append(ComparisonRow(balancer="<b>late</b>", sees="live", valid=False, message="no <i>plan</i>"))
    page = rendered(compared_step(), MADE, rows)
    static, skew = (dict(lever_gaps(plan, demand))[name] for name in ("static", "cross-node copies"))
    assert f"static layout: skew {static:.3f}, " in page
    assert f"the plan: skew {skew:.3f}, " in page
    assert plan.digest()[:16] in page
    assert "&lt;b&gt;late&lt;/b&gt;: no &lt;i&gt;plan&lt;/i&gt;" in page
    assert "<b>late" not in page
    assert f">{rows[1].skew:.3f}</td>" in page
    assert f">{rows[1].predicted_seconds:.3g}</td>" in page, "nothing moves"
    moving = replace(rows[1], predicted_seconds=0.4, relocation_seconds=0.1)
    shown = balancer_values([moving])
    cells = dict(zip((column.name for column in shown["columns"]), shown["rows"][0][2:], strict=True))
    assert (cells["step s model"], cells["moves s"]) == ("0.4", "0.1")
    reachable = dict(lever_bounds(plan, demand))["static"]
    cells = (f"{static:.3f}", "", f"{reachable:.3f}")
    assert ">static</th>" + "".join(f'<td class="number">{cell}</td>' for cell in cells) in page
    places = [column.name for column in balancer_values(rows[:3])["columns"]].index("copies within") + 2
    assert [row[places] for row in balancer_values(rows[:3])["rows"]] == [row.scope for row in rows[:3]]
    assert page == rendered(compared_step(), MADE, rows)


def _row(page: str, name: str) -> list[str]:
    """Return the cells behind a name, of the first table that has it."""
    row = page[page.index(f'<td class="name">{name}</td>') :]
    return re.findall(r'<td class="number">([^<]*)</td>', row[: row.index("</tr>")])


def traced_step() -> ComparedStep:
    """A step whose tokens are known one by one: 2 layers, 16 experts, 4 ranks on 2 nodes."""
    rng = np.random.default_rng(1)
    T, L, K, S = 800, 2, 4, 20
    weight_LE = rng.dirichlet(np.full(16, 0.4), L)
    experts_TLK = np.argsort(rng.gumbel(size=(T, L, 16)) + np.log(weight_LE), axis=2)[..., -K:].astype(np.int16)
    sample_T = np.arange(T) // (T // S)
    counts_SLE = np.zeros((S, L, 16), np.int32)
    pairs_LEE = np.zeros((L, 16, 16), np.int64)
    for layer in range(L):
        np.add.at(counts_SLE[:, layer], (sample_T[:, None], experts_TLK[:, layer]), 1)
        picked_TE = np.zeros((T, 16), np.int64)
        np.put_along_axis(picked_TE, experts_TLK[:, layer].astype(np.int64), 1, axis=1)
        pairs_LEE[layer] = picked_TE.T @ picked_TE
    demand = Demand(
        counts_SLE=counts_SLE, layer_ids=np.arange(L), sample_ids=np.arange(S), top_k=K, pairs_LEE=pairs_LEE
    ).with_schedule(np.arange(S) % 5, np.arange(S) // 5, 4)
    plan = plan_step(demand, CLUSTER, Budget(slots=1), "relibra_paper_tokens", expert=EXPERT, never_worse=False)
    before, after = compare_static(plan, demand), compare_plan("the plan", plan, demand)
    plans = (before, after)
    counted = (distinct_rows_of_step(one.plan, one.demand, experts_TLK, sample_T) for one in plans)
    return compared_step(*(replace(one, rows=rows) for one, rows in zip(plans, counted, strict=True)))


def test_seconds_of_expert_layers_are_the_sum_of_their_parts() -> None:
    compared = traced_step()
    after, model = compared.after, compared.model
    page = rendered(compared, MADE)
    shown = _row(page, "expert layers, simulated")
    for one in compared.plans:
        step = simulate_step(one.plan, one.demand, CLUSTER, model, distinct=one.rows)
        total = sum(step.terms[name] for name in ("compute", "exchange", "gates", "copies", "relocation"))
        assert format_seconds(total) in shown
        assert f">{format_seconds(step.terms['exchange'])}</td>" in page
        bound = simulate_step(one.plan, one.demand, CLUSTER, model)
        assert format_seconds(bound.terms["exchange"]) != format_seconds(step.terms["exchange"])
    assert "Rows between ranks are counted token by token." in page
    predicted = predict(after.plan, after.demand, CLUSTER, model.expert)
    planner = predicted.total - predicted.attention - predicted.host
    assert f"{format_seconds(planner)} for the expert layers with the plan: it uses a lower bound of rows" in page


def test_bytes_by_kind_are_those_of_the_simulated_step() -> None:
    compared = traced_step()
    page = rendered(compared, MADE)
    words = page[page.index('aria-label="Bytes by kind"') :]
    words = words[: words.index("</table>")]
    for one in compared.plans:
        sent = simulate_step(one.plan, one.demand, CLUSTER, compared.model, distinct=one.rows).bytes
        for links in sent.as_dict().values():
            assert all(f">{size / 1e9:.3g}<" in words for size in links.values() if size)
    assert sent.weights.inside > 0
    assert "rows, between nodes" in words
    assert "moves, between nodes" in words


def test_seconds_without_relocation_stand_beside_those_with_it() -> None:
    compared = compared_step()
    before, after = compared.plans
    step, static = (simulate_step(one.plan, one.demand, CLUSTER, compared.model) for one in (after, before))
    moved = step.terms["relocation"]
    assert moved > 0.01 * step.seconds
    page = rendered(compared, MADE)
    whole, alone = [format_seconds(seconds) for seconds in (step.seconds, step.seconds - moved)]
    assert _row(page, "step")[:2] == [format_seconds(static.seconds), whole]
    ratio = f"{static.seconds / (step.seconds - moved):.2f}×"
    assert _row(page, "step, without relocation") == [format_seconds(static.seconds), alone, ratio]
    assert _row(page, "expert layers, simulated, without relocation")
    other = plan_step(before.given, CLUSTER, Budget(slots=1), "ultraep", expert=EXPERT)
    page = rendered(compared_step(after, compare_plan("plan two", other, before.given)), MADE)
    second = simulate_step(other, before.given, CLUSTER, compared.model)
    assert second.terms["relocation"] == 0
    assert _row(page, "step")[:2] == [whole, format_seconds(second.seconds)]
    ratio = f"{(step.seconds - moved) / second.seconds:.2f}×"
    assert _row(page, "step, without relocation") == [alone, format_seconds(second.seconds), ratio]
    assert duration_rows("step", (2.0, 1.0), (0.0, 0.009)) == [["step", "2 s", "1 s", "2.00×"]]


def test_the_ledger_speaks_of_what_is_sent() -> None:
    step = traced_step()
    after = step.after
    ledgers = [
        byte_ledger(after.plan, after.demand, CLUSTER, EXPERT.row_bytes, distinct=after.rows, send_once=once).total()
        for once in (True, False)
    ]
    assert ledgers[1].data_factor_L[0] < 0.95
    page = rendered(step, MADE)
    words = page[page.index('id="bytes-title"') :]
    row = words[words.index("efficiency: useful / capacity") :]
    after_once, each = (percent(float(one.efficiency_L[0])) for one in ledgers)
    assert re.findall(r"[\d.]+\u202f%(?=</td>)", row)[1:3] == [after_once, each]
    header = words[words.index("all layers together") :]
    assert re.findall(r">([^<>]+)</th>", header)[:3] == ["static layout", "the plan", "the plan, per choice"]
    duplicate = re.findall(r"[\d.]+(?=</td>)", header[header.index("duplicate, GB") :])[:3]
    assert duplicate[:2] == ["0", "0"]
    assert float(duplicate[2]) > 0


def test_ways_to_send_have_a_row_each() -> None:
    step = traced_step()
    after, expert = step.after, step.model.expert
    page = rendered(step, MADE)
    ways = ways_to_send(after.plan, after.demand, CLUSTER, expert, step.model.top_k, after.rows)
    for way in ways:
        cells = _row(page, f"{way.way} (the plan)" if way.used else way.way)
        assert cells[:3] == [f"{size / 1e9:.3g}" for size in way[2:5]]
        assert cells[3:5] == [f"{way.messages:,}", "0"]
        assert cells[5:8] == [percent(factor) for factor in way[7:10]]
        assert cells[8:] == [format_seconds(way.seconds), format_seconds(way.seconds_counting)]
    assert sum(way.used for way in ways) == 1


def test_limits_are_those_of_the_simulator() -> None:
    compared = compared_step()
    page = rendered(compared, MADE)
    assert _sections(page) == ["plan", "levers-1", "loads", "cover", "bytes", "limits", "timeline", "glossary"]
    ratio = overlap_ratio(EXPERT, CLUSTER.intra.bytes_per_second, CLUSTER.peak_flops_per_second)
    limits = page[page.index('id="limits"') : page.index('id="timeline"')]
    assert f'<td class="number">{ratio:.2f}</td>' in limits
    assert compared.model.name in limits
    step = simulate_step(compared.after.plan, compared.after.demand, CLUSTER, compared.model)
    straggler = step.straggler_seconds()
    assert format_seconds(step.terms["compute"] - straggler) in limits
    assert format_seconds(straggler) in limits
    assert "memory of the fullest rank with the plan" in limits


def test_figures_of_two_plans_stand_below_their_names() -> None:
    plan, demand = planned_step()
    other = plan_step(demand, CLUSTER, Budget(slots=1), "ultraep", expert=EXPERT)
    first, second = compare_plan("plan <one>", other, demand), compare_plan("plan two", plan, demand)
    step = compared_step(first, second)
    page = rendered(step, MADE)
    assert "<one>" not in page
    names = re.findall(r'<th scope="col"[^>]*>([^<]*)</th>', page)[1:3]
    assert names == ["plan &lt;one&gt;", "plan two"]
    assert {"levers-0", "levers-1"} <= set(_sections(page))
    assert all(one.digest()[:16] in page for one in (other, plan))
    for one, part in zip(step.plans, step_headline(step).split(" · "), strict=True):
        assert part.startswith(one.name)
        assert percent(1 - 1 / one.skew) in part
    assert _row(page, "skew")[:2] == [f"{other.skew(first.demand):.3f}", f"{plan.skew(second.demand):.3f}"]
    assert _row(page, "replicas")[:2] == [str(other.num_copies), str(plan.num_copies)]
    moved = f"experts moved before the step, of {plan.home_LE.size}"
    assert _row(page, moved)[:2] == [str(other.num_moved), str(plan.num_moved)]
    assert "memory of the fullest rank with plan two" in page


def test_plans_of_other_sizes_are_refused() -> None:
    small = compare_plan("small", *planned_step(2))
    with pytest.raises(ConfigError, match="small is for 2 layers, the plan for 3"):
        compared_step(small, compared_plans()[1])


def test_a_recorded_timeline_is_drawn_beside_the_simulated_ones() -> None:
    events = tuple(
        Event(stage, layer, 0, rank, 0.1 * layer + 0.01 * rank, 0.02, 5, "")
        for layer in (1, 2)
        for rank in range(2)
        for stage in ("dispatch", "</script>odd")
    )
    measured = Timeline(events=events, num_ranks=4, label="measured")
    page = rendered(compared_step(), MADE, timelines=[("run", measured)])
    assert "run (measured), events 8 of 8" in page
    assert "</script>odd" not in page


def test_waterfall_bars_join_and_end_at_the_plan() -> None:
    values = {"static": 2.0, "schedule": 1.8, "homes": 1.9, "replicas": 1.1, "cross-node copies": 1.1, "bound": 1.05}
    levers = list(values.items())
    rows = waterfall(levers, [("static", 1.2)])
    html = templates().globals["bar_table"]("levers", ("lever", "skew"), rows, 1.0, 2.0)
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
    before, after = compare_static(plan, demand), compare_plan("the plan", plan, demand)
    page = rendered(ComparedStep(before=before, after=after, cluster=cluster, model=model), MADE)
    assert "the plan: skew 1.000, 0\u202f% of the expert time" in page


def large_step() -> ComparedStep:
    """94 layers x 32 micro-batches x 64 ranks, 128 experts, with power-law loads."""
    M, L, R, E = 32, 94, 64, 128
    rng = np.random.default_rng(0)
    popularity_LE = rng.dirichlet(np.full(E, 0.7), L)
    counts_SLE = np.stack([rng.multinomial(512, popularity_LE[layer], M * R) for layer in range(L)], axis=1)
    places = np.arange(M * R)
    demand = Demand(counts_SLE=counts_SLE.astype(np.int32), layer_ids=np.arange(L), sample_ids=places, top_k=8)
    demand = demand.with_schedule(places // R, places % R, R)
    cluster = cluster_preset("h100x8", R)
    plan = plan_step(demand, cluster, Budget(slots=2), "foremoe", expert=EXPERT)
    model = replace(model_shape("qwen3-30b-a3b"), moe_layers=L)
    before, after = compare_static(plan, demand), compare_plan("the plan", plan, demand)
    return ComparedStep(before=before, after=after, cluster=cluster, model=model)


@pytest.mark.slow
def test_a_large_step_makes_a_page_of_a_few_megabytes_in_seconds() -> None:
    step = large_step()
    start = time.perf_counter()
    page = render_plan_page(step, MADE)
    assert time.perf_counter() - start < 20
    assert len(page.encode()) - len(get_plotlyjs().encode()) < 3_500_000, "beside plotly's own script"
