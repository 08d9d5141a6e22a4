"""Experts with a new home: ranks, loads and origins against sums written out."""

import pytest

from relibra import Budget, plan_step
from relibra.reporting.data.moved_experts import moved_experts
from tests.planning.cases import cluster, make_demand


def test_moved_experts_name_ranks_loads_and_local_share():
    demand = make_demand(24, 3, 16, 4, 4, 0)
    plan = plan_step(demand, cluster(2, 2), Budget(slots=0), "relibra_paper_tokens", never_worse=False)
    scheduled = plan.scheduled(demand)
    assert plan.num_moved > 0
    for layer, (before_E, now_E) in enumerate(zip(plan.previous.home_LE, plan.home_LE, strict=True)):
        rows = moved_experts(plan, scheduled, layer)
        tokens_RE = scheduled.tokens_MLRE[:, layer].sum(axis=0)
        load_E = tokens_RE.sum(axis=0)
        assert {row.expert for row in rows} == set((before_E != now_E).nonzero()[0])
        assert [row.token_slots for row in rows] == sorted((int(load_E[row.expert]) for row in rows), reverse=True)
        for row in rows:
            e, mean = row.expert, load_E.sum() / 4
            assert (row.from_rank, row.to_rank) == (before_E[e], now_E[e])
            assert row.from_load == pytest.approx(load_E[before_E == before_E[e]].sum() / mean)
            assert row.to_load_now == pytest.approx(load_E[now_E == now_E[e]].sum() / mean)
            node = now_E[e] // 2
            assert row.local_now == pytest.approx(tokens_RE[2 * node : 2 * node + 2, e].sum() / load_E[e])
