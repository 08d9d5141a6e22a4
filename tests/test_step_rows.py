"""Arithmetic of `relibra bench step`: ratios, charging of moves, hidden exchange, order by prediction, samples."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.planner.step_cells import Case, Cell, draw_step, lost_once, matrix, quick, unseen
from benchmarks.planner.step_rows import (
    DEFAULT,
    OWN,
    PEERS,
    cells_behind,
    default_budget,
    hidden_seconds,
    planned_row,
    prediction_order,
    rows_of,
    slots_that_stay,
    with_ratios,
)
from relibra.cluster import cluster_preset
from relibra.routing.demand import Demand
from relibra.simulation import cut_model, model_shape

CELL = Cell(source="qwen3-30b-a3b", ranks=16, dispatch="hierarchical", tokens=512, mini_batches=2, micro_batches=4)


def made_row(plan, seconds, hidden=1.0, predicted=None, case="a"):
    return {
        "case": case,
        "plan": plan,
        "seconds": seconds,
        "seconds_in_full": seconds,
        "hidden_exchange_seconds": hidden,
        "predicted_seconds": predicted or seconds,
    }


def pool_of(samples=40, layers=2, experts=128, top_k=8):
    rng = np.random.default_rng(0)
    weight_LE = np.exp(rng.normal(size=(layers, experts)))
    length_S = rng.integers(50, 400, size=samples)
    counts_SLE = np.stack(
        [rng.multinomial(n * top_k, weight_LE / weight_LE.sum(axis=1, keepdims=True)) for n in length_S]
    )
    return Demand(
        counts_SLE=counts_SLE.astype(np.int32),
        layer_ids=np.arange(layers, dtype=np.int32),
        sample_ids=np.arange(samples),
        top_k=top_k,
    )


def case_of(cell, memory_gib):
    whole, demand = model_shape(cell.source), draw_step(pool_of(), cell)
    cluster = replace(cluster_preset("h100x8", cell.ranks), dispatch=cell.dispatch)
    model = cut_model(whole, demand)
    return Case(cell=cell, cluster=cluster, whole=whole, model=model, demand=demand, memory_gib=memory_gib)


def test_ratios_are_over_the_best_of_each_kind():
    rows = [made_row("static", 4.0, 3.0), made_row("eplb", 2.0, 1.5), made_row("ultraep", 1.6, 1.8)]
    rows += [made_row(DEFAULT, 1.0, 1.2), made_row("one slot", 1.5), made_row("no residents", 0.9, 0.6)]
    default = next(row for row in with_ratios(rows) if row["plan"] == DEFAULT)
    assert default["ratio_to_static"] == 4.0
    assert default["ratio_to_best_peer"] == 1.6
    assert default["ratio_to_best_own_setting"] == 0.9
    assert default["hidden_ratio_to_static"] == pytest.approx(2.5)
    assert default["hidden_ratio_to_best_peer"] == pytest.approx(1.25)
    assert default["hidden_ratio_to_best_own_setting"] == pytest.approx(0.5)


def test_plans_ahead_of_the_default_are_listed_by_cell():
    rows = [made_row(DEFAULT, 1.0), made_row("live", 0.8), made_row("static", 0.996), made_row("eplb", 2.0)]
    rows += [made_row(DEFAULT, 3.0, case="b"), made_row("two slots", 2.9, case="b"), made_row("live", 2.0, case="c")]
    rows.append({"case": "prediction order"})
    found = cells_behind(rows)
    assert [(row["case"], row["plan"]) for row in found] == [("a", "live"), ("b", "two slots")]
    assert found[0]["ahead"] == pytest.approx(0.25)
    assert [row["plan"] for row in cells_behind(rows, 0.003)][-1] == "static"


def test_order_by_prediction_counts_pairs_of_a_cell_that_differ():
    rows = [made_row(DEFAULT, 1.0, predicted=5.0), made_row("one slot", 2.0, predicted=6.0)]
    rows += [made_row("two slots", 1.005, predicted=7.0), made_row("live", 9.0, predicted=0.1)]
    rows.append(made_row("homes kept", 7.0, predicted=9.0, case="b"))
    found = prediction_order(rows)
    assert found["pairs"] == 2, "1.0 and 1.005 are too close, live and another cell do not count"
    assert found["share"] == 0.5
    assert prediction_order(rows[:1])["share"] is None


def test_rows_hide_behind_experts_in_each_pass():
    experts_MLR = np.array([[[1.0, 2.0], [3.0, 1.0]]])
    rows_ML = np.array([[3.0, 0.5]])
    exchange = SimpleNamespace(dispatch_ML=rows_ML / 2, combine_ML=rows_ML / 2)
    costs = SimpleNamespace(home_MLR=experts_MLR, replica_MLR=np.zeros((1, 2, 2)), exchange=exchange)
    assert hidden_seconds(costs) == (2.0 + 3.0) + (0.5 + 0.5)  # forward and backward of each layer


@pytest.mark.parametrize("full", [False, True])
def test_samples_fill_the_micro_batches_of_the_cell(full):
    cell = replace(CELL, micro_batches=8, mini_batches=4, full=full)
    demand = draw_step(pool_of(), cell)
    tokens_MR = demand.tokens_MLRE[:, 0].sum(axis=2) / demand.top_k
    assert tokens_MR.max() <= cell.tokens
    assert demand.group_M.tolist() == sorted(demand.group_M.tolist())
    assert set(demand.group_M.tolist()) == {0, 1, 2, 3}
    fill = tokens_MR.sum() / (cell.ranks * cell.tokens * cell.micro_batches)
    assert (len(tokens_MR) > 8 and fill > 0.97) if full else (len(tokens_MR) <= 8 and fill > 0.7)
    assert draw_step(pool_of(), replace(cell, mini_batches=1)).group_M is None


def test_moves_are_charged_by_the_steps_that_they_serve():
    case = case_of(CELL, memory_gib=1.0)
    budget = replace(default_budget(case), pack_samples=False)
    plan, row = planned_row(case, "eplb", "eplb", budget)
    assert plan.num_moved > 0
    moving = plan.predicted["relocation"]
    assert row["seconds_in_full"] - row["seconds"] == pytest.approx(moving * (1 - 1 / budget.steps_served))
    assert row["move_bytes"] == plan.num_moved * case.model.expert.state_bytes
    assert 0 < row["seconds"] - row["hidden_exchange_seconds"] < row["seconds"]


def test_peers_have_as_many_slots_as_the_default():
    rows = {row["plan"]: row for row in rows_of(case_of(CELL, memory_gib=1.0))}
    assert set(rows) == {"static", DEFAULT, *PEERS, *OWN}
    assert {rows[name]["slots"] for name in ("eplb", "ultraep", "live")} == {rows[DEFAULT]["slots"]}
    assert rows["one slot"]["slots"] == 1
    assert rows["no residents"]["resident"] is False
    assert rows["homes kept"]["moved"] == 0
    assert rows["static"]["ratio_to_static"] == 1
    assert rows[DEFAULT]["table"] == "default"
    for name, row in rows.items():
        behind = rows[DEFAULT]["seconds"] / row["seconds"] - 1 > 0.005
        assert (row["table"] == "ahead") == (behind and name != DEFAULT), name


def test_slots_of_eplb_fit_into_the_memory():
    case = case_of(CELL, memory_gib=0.05)
    assert slots_that_stay(case) == 0, "two layers of 28.3 MB"
    rows = {row["plan"]: row for row in rows_of(case)}
    assert rows["eplb"]["slots"] == 0
    assert rows["eplb beyond memory"]["slots"] == rows["ultraep"]["slots"] > 0
    assert rows["eplb beyond memory"]["table"] == "plans"


def test_cells_cover_the_matrix_once():
    cells = [*matrix(), *lost_once(), *unseen()]
    assert len({cell.name for cell in cells}) == len(cells)
    assert len(matrix()) == 3 * (1 + 2 * 2) * 3 * 3
    first_flat = next(place for place, cell in enumerate(matrix()) if cell.dispatch == "flat")
    assert {cell.dispatch for cell in matrix()[first_flat:]} == {"flat"}
    assert set(quick()) < set(matrix())
