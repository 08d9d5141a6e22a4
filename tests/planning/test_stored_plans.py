"""Plans of commit 0ec039d (fixtures/README.md): figures counted again with numpy alone, and a plan file."""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from relibra import PlanError, read_plan
from tests.planning.cases import DATA

FOLDER = Path(__file__).parent / "fixtures"
PLANS = sorted(file.stem for file in FOLDER.glob("*_ranks_*.npz"))
RECORDINGS = {
    "gpt_oss": ("gpt_oss_20b_decode_topk.npz", 32),
    "v2_lite": ("deepseek_v2_lite_esft_topk.npz", 64),
}
FIGURES = {  # other ranks that a token is sent to, mean; sum of busiest ranks / sum of mean ranks
    "gpt_oss_8_ranks_static": (3.13, 1.655),
    "gpt_oss_8_ranks_tokens": (3.06, 1.001),
    "gpt_oss_8_ranks_seconds": (3.21, 1.258),
    "gpt_oss_8_ranks_tokens_nodes_of_2": (3.11, 1.070),
    "gpt_oss_8_ranks_seconds_nodes_of_2": (3.16, 1.362),
    "v2_lite_8_ranks_static": (3.98, 1.483),
    "v2_lite_8_ranks_tokens": (4.10, 1.000),
    "v2_lite_8_ranks_seconds": (4.13, 1.125),
    "v2_lite_8_ranks_tokens_nodes_of_2": (4.10, 1.014),
    "v2_lite_8_ranks_seconds_nodes_of_2": (3.99, 1.439),
    "gpt_oss_16_ranks_static": (3.61, 2.197),
    "gpt_oss_16_ranks_default": (3.15, 1.059),
}
HIDDEN = WIDTH = 2880
"""Sizes of an expert of gpt-oss-20b: three matrices."""


@cache
def _load(name):
    """Return the arrays of a file, counts as int64, and its facts."""
    with np.load(FOLDER / f"{name}.npz", allow_pickle=False) as file:
        arrays = {key: file[key] for key in file.files if key != "facts"}
        facts = json.loads(str(file["facts"])) if "facts" in file.files else {}
    return {key: array.astype(np.int64) for key, array in arrays.items()}, facts


def _demand(name):
    return _load(f"{'_'.join(name.split('_')[:2])}_demand")[0]


def _home_LE(plan, num_ranks):
    slots_LP = plan["physical_to_logical_map"]
    return np.argsort(slots_LP, axis=1) // (slots_LP.shape[1] // num_ranks)


def _rank_load(plan, demand):
    """Return the token-slots of every rank, [M, L, R], in plain loops."""
    M, L, R, _ = plan["replica_MLRB"].shape
    home_LE, load_MLR = _home_LE(plan, R), np.zeros((M, L, R), np.int64)
    for sample, m in enumerate(plan["micro_batch_S"]):
        for layer in range(L):
            np.add.at(load_MLR[m, layer], home_LE[layer], demand["counts_SLE"][sample, layer])
    for m, layer, rank, slot in np.argwhere(plan["replica_MLRB"] >= 0):
        quota = plan["quota_MLRB"][m, layer, rank, slot]
        load_MLR[m, layer, rank] += quota
        load_MLR[m, layer, home_LE[layer, plan["replica_MLRB"][m, layer, rank, slot]]] -= quota
    return load_MLR


def _pushed(plan, resident):
    """Return (home, rank) of every push: experts enter a resident slot once and others before each of two passes."""
    home_LE, pushes = _home_LE(plan, plan["replica_MLRB"].shape[2]), []
    for m, layer, rank, slot in np.argwhere(plan["replica_MLRB"] >= 0):
        expert = plan["replica_MLRB"][m, layer, rank, slot]
        stayed = m > 0 and slot < resident and expert in plan["replica_MLRB"][m - 1, layer, rank, :resident]
        pushes += [(home_LE[layer, expert], rank)] * (0 if stayed else 1 if slot < resident else 2)
    return np.array(pushes).reshape(-1, 2)


def test_every_stored_plan_has_its_figures():
    assert sorted(FIGURES) == PLANS


@pytest.mark.parametrize("name", PLANS)
def test_stored_plans_have_skew_and_rows_of_0ec039d(name):
    (plan, facts), demand = _load(name), _demand(name)
    load_MLR = _rank_load(plan, demand)
    tokens = demand["counts_SLE"].sum() / demand["top_k"]
    other_ranks = plan["rows_LRR"].sum() - np.trace(plan["rows_LRR"], axis1=1, axis2=2).sum()
    assert (round(other_ranks / tokens, 2), round(load_MLR.max(axis=2).sum() / load_MLR.mean(axis=2).sum(), 3)) == (
        FIGURES[name]
    )
    assert facts["other_ranks_per_token"] == pytest.approx(other_ranks / tokens)
    assert load_MLR.sum() == demand["counts_SLE"].sum()
    assert load_MLR.min() >= 0


@pytest.mark.parametrize("recording", RECORDINGS)
def test_stored_pairs_belong_to_the_stored_counts(recording):
    demand = _load(f"{recording}_demand")[0]
    assert np.array_equal(np.diagonal(demand["pairs_LEE"], axis1=1, axis2=2), demand["counts_SLE"].sum(axis=0))
    assert np.array_equal(demand["pairs_LEE"].sum(axis=2), demand["top_k"] * demand["counts_SLE"].sum(axis=0))


def test_stored_default_sends_more_bytes_of_copies_than_rows():
    static, plan = (_load(f"gpt_oss_16_ranks_{name}")[0] for name in ("static", "default"))
    node_R = np.arange(16) // 8
    rows = [int(arrays["rows_LRR"][:, node_R[:, None] != node_R].sum()) for arrays in (static, plan)]
    passes = 4  # dispatch and combine, forward and backward
    assert [round(passes * count * 2 * HIDDEN / 1e9, 1) for count in rows] == [96.3, 7.1]
    pushes = _pushed(plan, resident=2)
    crossing = int((node_R[pushes[:, 0]] != node_R[pushes[:, 1]]).sum())
    weights, gradients = (crossing * 3 * HIDDEN * WIDTH * size / 1e9 for size in (2, 4))
    assert len(pushes) == crossing == 768
    assert (round(weights, 1), round(gradients, 1), round(weights + gradients, 1)) == (38.2, 76.4, 114.7)


def test_a_plan_file_of_0ec039d_with_two_lifetimes_is_refused():
    with pytest.raises(PlanError, match="1 resident slots of 2"):
        read_plan(FOLDER / "demo_8_ranks.safetensors")


@pytest.mark.skipif(not DATA.is_dir(), reason=f"recorded routes of real models are not there ({DATA})")
@pytest.mark.parametrize("name", PLANS)
def test_stored_rows_are_those_of_the_recording(name):
    from relibra.planning.placement import Placement
    from relibra.planning.traffic.distinct_rows import distinct_rows_of_step
    from relibra.routing.demand import Demand
    from relibra.routing.demand_rows import sample_of_rows
    from relibra.routing.readers import open_trace
    from relibra.routing.statistics import co_activation

    plan, facts = _load(name)
    file, num_experts = RECORDINGS["_".join(name.split("_")[:2])]
    trace = open_trace(DATA / file, num_experts)
    demand = Demand.from_trace(trace)
    assert np.array_equal(demand.counts_SLE, _demand(name)["counts_SLE"])
    assert np.array_equal(co_activation(trace), _demand(name)["pairs_LEE"])
    assert demand.digest() == facts["demand_digest"]
    placement = Placement(
        num_nodes=facts["num_nodes"],
        ranks_per_node=facts["ranks_per_node"],
        layer_ids=demand.layer_ids,
        **{
            key: plan[key].astype(np.int32 if key in ("micro_batch_S", "rank_S", "quota_MLRB") else np.int16)
            for key in ("physical_to_logical_map", "micro_batch_S", "rank_S", "replica_MLRB", "quota_MLRB")
        },
    )
    M, _, R, _ = plan["replica_MLRB"].shape
    scheduled = demand.with_schedule(placement.micro_batch_S, placement.rank_S, R, M)
    counted = distinct_rows_of_step(placement, scheduled, trace.experts_TLK, sample_of_rows(trace, demand))
    assert np.array_equal(counted.ranks_MLRR.sum(axis=0), plan["rows_LRR"])
