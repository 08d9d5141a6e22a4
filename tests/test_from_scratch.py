"""examples/from_scratch.py counts what relibra counts, on the step that it prints."""

import ast
import sys
from functools import cache
from importlib import util
from pathlib import Path

import numpy as np
import pytest

from relibra import Budget, Demand, cluster_preset, plan_step
from relibra.planning.loads import home_rank_load, replica_load_change
from relibra.planning.placement import step_skew

FILE = Path(__file__).parent.parent / "examples" / "from_scratch.py"
PLANS = {
    "replicas change": (False, False),
    "replicas stay": (False, True),
    "new homes, replicas change": (True, False),
    "new homes, replicas stay": (True, True),
}
"""Whether homes move and whether replicas stay, of each plan that the example prints."""


@cache
def _example():
    spec = util.spec_from_file_location("from_scratch", FILE)
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, module.draw_routes(seed=0)


@cache
def _demand():
    """Return the demand of the example's routes: a sample for each micro-batch and rank."""
    example, experts_MLRTK = _example()
    experts_SLTK = experts_MLRTK.transpose(0, 2, 1, 3, 4).reshape(-1, example.L, example.T, example.K)
    counts_SLE = (experts_SLTK[..., None] == np.arange(example.E)).sum(axis=(2, 3), dtype=np.int32)
    sample_S = np.arange(len(counts_SLE))
    demand = Demand(
        counts_SLE=counts_SLE, layer_ids=np.arange(example.L, dtype=np.int32), sample_ids=sample_S, top_k=example.K
    )
    return demand.with_schedule(sample_S // example.R, sample_S % example.R, example.R)


def _plan(name):
    example, experts_MLRTK = _example()
    load_MLE, (move, keep) = example.count_demand(experts_MLRTK), PLANS[name]
    home_LE = np.tile(example.STATIC_E, (example.L, 1))
    if move:
        home_LE = np.array([example.assign_homes(load_E) for load_E in load_MLE.sum(axis=0)])
    return example.make_plan(load_MLE, home_LE, keep=keep)


def test_the_example_needs_numpy_and_at_most_250_lines():
    text = FILE.read_text()
    imported = {node.module for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)}
    imported |= {name.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import) for name in node.names}
    assert imported - set(sys.stdlib_module_names) == {"numpy"}
    assert len(text.splitlines()) <= 250


@pytest.mark.parametrize("name", PLANS)
def test_the_example_counts_the_loads_and_skew_of_relibra(name):
    (example, experts_MLRTK), demand, plan = _example(), _demand(), _plan(name)
    load_MLE = example.count_demand(experts_MLRTK)
    assert np.array_equal(load_MLE, demand.load_MLE)
    replica_MLRB, quota_MLRB = plan.replica_MLRB.astype(np.int16), plan.quota_MLRB.astype(np.int32)
    load_MLR = home_rank_load(demand.load_MLE, plan.home_LE, example.R)
    load_MLR += replica_load_change(replica_MLRB, quota_MLRB, plan.home_LE)
    for at in np.ndindex(example.M, example.L):
        arrays = load_MLE[at], plan.home_LE[at[1]], plan.replica_MLRB[at], plan.quota_MLRB[at]
        assert np.array_equal(example.rank_load(*arrays), load_MLR[at])
    price = example.price_plan(plan, experts_MLRTK)
    assert price["skew"] == pytest.approx(step_skew(load_MLR.max(axis=2), load_MLR))


@pytest.mark.parametrize("name", PLANS)
def test_plans_of_the_example_are_legal(name):
    (example, _), demand, plan = _example(), _demand(), _plan(name)
    assert (np.bincount(plan.home_LE[0], minlength=example.R) == example.E // example.R).all()
    assert plan.quota_MLRB.min() >= 0
    assert not plan.quota_MLRB[plan.replica_MLRB < 0].any()
    for m, layer, rank, slot in np.argwhere(plan.replica_MLRB >= 0):
        experts = plan.replica_MLRB[m, layer, rank]
        home = plan.home_LE[layer, experts[slot]]
        assert home != rank
        assert example.NODE_R[home] == example.NODE_R[rank]
        assert (experts == experts[slot]).sum() == 1
        taken = plan.quota_MLRB[m, layer][plan.replica_MLRB[m, layer] == experts[slot]].sum()
        assert taken <= demand.load_MLE[m, layer, experts[slot]]


def test_relibra_balances_the_step_of_the_example_further():
    (example, experts_MLRTK), demand = _example(), _demand()
    cluster = cluster_preset("h100x8", example.R, ranks_per_node=4)
    plan = plan_step(demand, cluster, Budget(slots=example.B, pack_samples=False), "relibra_paper_tokens")
    lowest = min(example.price_plan(_plan(name), experts_MLRTK)["skew"] for name in PLANS)
    assert plan.skew(demand) < lowest - 0.02
