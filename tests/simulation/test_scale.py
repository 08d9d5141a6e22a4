"""Large machines in little time: with margin for a busy test machine, well above what was measured."""

import time
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from relibra import Budget, Demand, StepPlan, cluster_preset, plan_step
from relibra.reporting.data.comparison import first_layers
from relibra.simulation import Execution, model_shape, simulate_groups, simulate_step

MODEL, RANKS, MICRO_BATCHES = model_shape("qwen3-235b-a22b"), 64, 32


@pytest.fixture(scope="module")
def planned():
    """94 layers x 32 micro-batches x 64 ranks, one sample per rank and micro-batch, eight kinds of samples."""
    rng, S = np.random.default_rng(0), MICRO_BATCHES * RANKS
    popularity_KLE = rng.dirichlet(np.full(MODEL.experts, 0.6), size=(8, MODEL.moe_layers))
    rows_S = rng.integers(1000, 8000, S)
    counts_SLE = (popularity_KLE[rng.integers(0, 8, S)] * (rows_S * MODEL.top_k)[:, None, None]).astype(np.int32)
    counts_SLE[:, :, 0] += (rows_S * MODEL.top_k)[:, None].astype(np.int32) - counts_SLE.sum(axis=2, dtype=np.int32)
    demand = Demand(
        counts_SLE=counts_SLE,
        layer_ids=np.arange(MODEL.moe_layers, dtype=np.int32),
        sample_ids=np.arange(S),
        top_k=MODEL.top_k,
    ).with_schedule((np.arange(S) // RANKS).astype(np.int32), (np.arange(S) % RANKS).astype(np.int32), RANKS)
    cluster = cluster_preset("h100x8", RANKS)
    budget = Budget(slots=2, move_homes=False, pack_samples=False)
    plan = plan_step(demand, cluster, budget, expert=MODEL.expert)
    return plan, plan.scheduled(demand), cluster


@pytest.mark.slow
def test_64_ranks_take_seconds(planned):
    plan, demand, cluster = planned
    one_layer = first_layers(demand, 1)  # its simulation compiles the kernels
    simulate_step(StepPlan.static(one_layer, cluster.topology), one_layer, cluster, replace(MODEL, moe_layers=1))
    start = time.perf_counter()
    step = simulate_step(plan, demand, cluster, MODEL)
    assert time.perf_counter() - start < 3
    assert step.token_slots_R.sum() == demand.tokens_MLRE.sum()


@pytest.mark.slow
def test_4096_ranks_take_less_than_a_minute(planned):
    plan, demand, cluster = planned
    peaks = []
    for groups in (1, 4):
        tracemalloc.start()
        start = time.perf_counter()
        step = simulate_groups(((plan, demand) for _ in range(groups)), cluster, MODEL, Execution(pipeline_stages=16))
        assert time.perf_counter() - start < 60
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert step.layout.num_ranks == 4096
    assert peaks[1] < 1.2 * peaks[0]
