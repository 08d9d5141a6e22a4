"""The rows of a comparison against slow counts, and what happens when a balancer fails."""

from dataclasses import replace

import numpy as np
import pytest

from relibra import Demand, PlanError
from relibra.cluster import cluster_preset
from relibra.planning.analysis.bounds import any_homes_bound
from relibra.planning.analysis.levers import lever_bounds, lever_gaps
from relibra.planning.balancer import Balancer
from relibra.planning.budget import Budget
from relibra.planning.costs.expert_shape import expert_shape
from relibra.planning.planner import plan_step
from relibra.planning.registry import BALANCERS
from relibra.reporting.data import comparison
from relibra.reporting.data.comparison import iterate_comparison, measure
from tests.reporting.planned import compare

EXPERT = expert_shape("mixtral-8x7b")
CLUSTER = cluster_preset("h100x8", 4, 2)
BUDGET = Budget(slots=1)
TOKENS = "relibra_paper_anywhere"


@pytest.fixture
def demand():
    """Six micro-batches of eight samples on two nodes of two ranks, 8 experts, one of them hot."""
    rng = np.random.default_rng(3)
    counts_SLE = rng.poisson(rng.lognormal(2, 1, (48, 3, 8))).astype(np.int32)
    whole = Demand(counts_SLE=counts_SLE, layer_ids=np.array([1, 2, 5]), sample_ids=np.arange(48))
    return whole.with_schedule(np.arange(48) % 6, np.arange(48) // 6 % 4, 4)


def test_figures_are_those_of_a_slow_count(demand):
    [(row, plan)] = iterate_comparison(demand, CLUSTER, BUDGET, [TOKENS], expert=EXPERT)
    load_MLR = np.zeros((6, 3, 4), dtype=int)
    copies = away = 0
    for m, layer in np.ndindex(6, 3):
        load_E = demand.counts_SLE[plan.micro_batch_S == m, layer].sum(axis=0)
        for e in range(8):
            load_MLR[m, layer, plan.home_LE[layer, e]] += load_E[e]
        for r in range(4):
            e, quota = plan.replica_MLRB[m, layer, r, 0], plan.quota_MLRB[m, layer, r, 0]
            if e >= 0:
                load_MLR[m, layer, r] += quota
                load_MLR[m, layer, plan.home_LE[layer, e]] -= quota
                copies += 1
                away += plan.home_LE[layer, e] // 2 != r // 2
    top, mean = load_MLR.max(axis=2), load_MLR.mean(axis=2)
    assert row.skew == pytest.approx(top.sum() / mean.sum())
    assert row.worst == pytest.approx((top / mean).max())
    assert (row.copies, row.cross_node_copies) == (copies, away)
    assert row.copies_per_micro_batch_layer == pytest.approx(copies / 18)
    moved = (plan.home_LE != np.repeat(np.arange(4), 2)).sum()
    assert (row.moved_experts, row.bytes.moves.total) == (moved, moved * EXPERT.state_bytes)
    assert row.gap == pytest.approx(row.skew / row.bound - 1)
    lowest_ML = any_homes_bound(plan.scheduled(demand).load_MLE, 4, 2, 1, "cluster")
    assert row.bound_any_homes == pytest.approx(lowest_ML.sum() / mean.sum())
    assert row.scope == "cluster"
    assert row.valid
    assert (row.predicted_seconds, row.exposed_seconds) == (plan.predicted["total"], plan.predicted["copies"])
    assert (row.slots, row.slots_used) == (1, 1)
    assert row.slot_bytes == EXPERT.weight_bytes + EXPERT.gradient_bytes
    of_layer_ML = (plan.replica_MLRB >= 0).sum(axis=(2, 3))
    still_there = sum(of_layer[of_layer > 0][-1] for of_layer in of_layer_ML if of_layer.any())
    assert row.bytes.weights.total == (2 * copies - still_there) * EXPERT.weight_bytes
    assert row.bytes.gradients.total == copies * EXPERT.weight_bytes
    assert row.bytes.gradients.between == away * EXPERT.weight_bytes
    assert row.cross_node_share == row.cross_node_token_slots / load_MLR.sum()


def test_every_balancer_gives_a_valid_row(demand):
    history_MLE = demand.load_MLE[:2]
    rows = {
        row.balancer: row for row in compare(demand, CLUSTER, BUDGET, BALANCERS, expert=EXPERT, history_MLE=history_MLE)
    }
    assert list(rows) == list(BALANCERS)
    assert [row.message for row in rows.values() if not row.valid] == []
    assert all(row.skew >= row.bound >= row.bound_any_homes >= 1 - 1e-12 for row in rows.values())
    paper = rows["relibra_paper_tokens"]
    assert rows["static"].scope == paper.scope == "node"
    assert rows["eplb"].scope == "cluster"
    assert rows["static"].copies == rows["static"].bytes.moves.total == 0
    assert paper.cross_node_copies == 0
    assert paper.skew <= min(rows[name].skew for name in ("ultraep", "feplb", "moonep_node"))  # inside the node too
    assert rows[TOKENS].skew <= min(paper.skew, 1.01)
    assert rows["relibra"].predicted_seconds <= min(row.predicted_seconds for row in rows.values()) * (1 + 1e-9)


def test_a_failing_balancer_has_a_row_with_its_message(demand, monkeypatch):
    def refuses(request):
        raise PlanError("this balancer wants 7 ranks")

    def takes_too_much(request):
        decision = BALANCERS["static"].decide(request)
        decision.replica_MLRB[0, 0, 3, 0], decision.quota_MLRB[0, 0, 3, 0] = 0, 1_000_000
        return replace(decision, scope="cluster")

    for name, decide in (("refuses", refuses), ("takes", takes_too_much)):
        monkeypatch.setitem(BALANCERS, name, Balancer(decide=decide, sees="nothing", based_on="a test"))
    refused, taken, static = compare(demand, CLUSTER, BUDGET, ["refuses", "takes", "static"], expert=EXPERT)
    assert (refused.valid, refused.skew, refused.message) == (False, None, "this balancer wants 7 ranks")
    assert not taken.valid
    assert taken.message
    assert static.valid


def test_an_unknown_name_is_refused_before_planning(demand, monkeypatch):
    monkeypatch.setattr(comparison, "plan_step", lambda *_, **__: pytest.fail("planned"))
    with pytest.raises(PlanError, match="balancer 'nonsense' is unknown: allowed are static"):
        compare(demand, CLUSTER, BUDGET, ["static", "nonsense"], expert=EXPERT)


def test_levers_go_from_static_to_the_plan_and_its_bound(demand):
    plan = plan_step(demand, CLUSTER, BUDGET, TOKENS, expert=EXPERT, never_worse=False)
    assert plan.num_cross_node_copies > 0
    levers = lever_gaps(plan, demand)
    assert [name for name, _ in levers] == ["static", "schedule", "homes", "replicas", "cross-node copies", "bound"]
    skews = dict(levers)
    static = plan_step(demand, CLUSTER, BUDGET, "static", expert=EXPERT)
    assert skews["static"] == pytest.approx(static.skew(demand))
    assert skews["cross-node copies"] == plan.skew(plan.scheduled(demand))
    assert skews["bound"] <= skews["cross-node copies"] <= skews["replicas"] < skews["homes"]


def test_homes_get_credit_for_what_they_make_possible(demand):
    plan = plan_step(demand, CLUSTER, BUDGET, "relibra_paper_tokens", expert=EXPERT, never_worse=False)
    bounds, gaps = dict(lever_bounds(plan, demand)), dict(lever_gaps(plan, demand))
    assert list(bounds) == list(gaps)
    static = plan_step(demand, CLUSTER, BUDGET, "static", expert=EXPERT)
    assert bounds["static"] == pytest.approx(static.bound(demand))
    assert bounds["static"] > bounds["homes"] == bounds["bound"]
    assert all(bounds[lever] <= gaps[lever] for lever in gaps)


def test_an_invalid_plan_has_no_figures(demand):
    plan = plan_step(demand, CLUSTER, BUDGET, "ultraep", expert=EXPERT, never_worse=False)
    broken = replace(plan, quota_MLRB=plan.quota_MLRB + 1_000_000)
    row = measure(broken, demand, CLUSTER, EXPERT, balancer="broken", sees="")
    assert (row.valid, row.skew, row.predicted_seconds) == (False, None, None)
    assert row.message


def test_levers_that_are_not_used_change_nothing(demand):
    plan = plan_step(demand, CLUSTER, replace(BUDGET, slots=0), "static", expert=EXPERT)
    assert len({value for _, value in lever_gaps(plan, demand)}) == 1
