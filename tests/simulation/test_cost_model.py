"""Formulas by hand: what no other test adds up."""

from dataclasses import replace

import numpy as np
import pytest

from relibra import ClusterError, cluster_preset
from relibra.cluster import Link
from relibra.planning.costs.layer_costs import decision_seconds
from relibra.simulation import ParallelLayout, model_shape
from relibra.simulation.cost_model import (
    gradient_reduction_seconds,
    handover_seconds,
    optimizer_seconds,
    owned_parameters,
    rows_and_scores,
    spread_seconds,
    weight_sync_seconds,
)
from tests.simulation.steps import random_step


def test_rows_count_tokens_and_the_squares_of_samples():
    plan, demand, _, model = random_step(0, nodes=1, per_node=1, micro_batches=1, layers=1)
    model = replace(model, top_k=2)
    demand = replace(demand, counts_SLE=np.array([[[6, 0]], [[4, 4]], [[9, 9]]], np.int32)[:, :, : plan.num_experts])
    plan = replace(plan, micro_batch_S=np.array([0, 0, -1], np.int32), rank_S=np.zeros(3, np.int32))
    rows_MR, flops_MR = rows_and_scores(plan, demand, model)
    lengths = demand.counts_SLE[:2, 0].sum(axis=1) // 2
    assert rows_MR.tolist() == [[lengths.sum()]]
    assert flops_MR[0, 0] == sum(16 * n * (n + 1) / 2 for n in lengths)


def test_many_ranks_sum_few_bytes_in_a_tree():
    cluster = replace(cluster_preset("h100x8", 512, 1), inter_send=Link(latency_seconds=1, bytes_per_second=10))
    layout = ParallelLayout(expert_parallel=512)
    assert gradient_reduction_seconds(cluster, layout, 5, 0) == 2 * 9 + 2 * 5 * 4 / 10
    many = 10_000_000
    assert gradient_reduction_seconds(cluster, layout, many, 0) == pytest.approx(
        2 * 511 + 2 * 511 / 512 * many * 4 / 10
    )


def test_gradients_are_summed_by_rings_over_their_holders():
    cluster = replace(
        cluster_preset("h100x8"),
        intra=Link(latency_seconds=0, bytes_per_second=100),
        inter_send=Link(latency_seconds=1, bytes_per_second=10),
    )
    alone, twice = ParallelLayout(expert_parallel=8), ParallelLayout(expert_parallel=8, data_parallel=2)
    assert gradient_reduction_seconds(cluster, alone, 80, 1000) == 2 * 7 / 8 * 80 * 4 / 100
    shared, experts = 2 + 2 * 1 / 2 * 80 * 4 / 8 / 10, 2 + 2 * 1 / 2 * 1000 * 4 / 10  # links of the node are faster
    assert gradient_reduction_seconds(cluster, twice, 80, 1000) == shared + experts
    one = replace(cluster, ranks_per_node=1)
    assert gradient_reduction_seconds(one, ParallelLayout(expert_parallel=1), 80, 1000) == 0


def test_sharded_gradients_are_scattered_then_summed():
    cluster = replace(
        cluster_preset("h100x8", 16),
        intra=Link(latency_seconds=1, bytes_per_second=100),
        inter_send=Link(latency_seconds=2, bytes_per_second=10),
    )
    assert spread_seconds(cluster, 1600.0) == max(3 + 7 / 8 * 1600 / 100, 2 + 1 / 2 * 1600 / 8 / 10)
    twice = ParallelLayout(expert_parallel=16, data_parallel=2)
    over_groups = 4 + 2 * 1 / 2 * 400 * 4 / 16 / 10
    assert gradient_reduction_seconds(cluster, twice, 400, 0, sharded=True) == 17 + over_groups


def test_a_live_decision_gathers_counts_and_solves():
    cluster = replace(cluster_preset("h100x8", 32), solve_seconds=1.0)
    gathered = 3 * 2e-6 + 7 * 4 * 64 / 450e9 + 2 * 4e-6 + 3 * 8 * 4 * 64 / 50e9
    assert decision_seconds(cluster, 64) == pytest.approx(1 + gathered)


def test_the_optimizer_touches_30_bytes_of_each_weight_once():
    cluster = replace(cluster_preset("h100x8"), memory_bytes_per_second=10.0)
    layout = ParallelLayout(expert_parallel=8, data_parallel=2)
    assert optimizer_seconds(cluster, layout, 1600, 40) == (100 + 20) * 30 / 10
    with pytest.raises(ClusterError, match="'h100x8' has no memory_bytes_per_second"):
        optimizer_seconds(replace(cluster, memory_bytes_per_second=0.0), layout, 1, 1)


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "deepseek-v3"])
def test_stages_and_ranks_together_own_every_weight_once(name):
    model, stages, R = model_shape(name), 4, 8
    layout = ParallelLayout(expert_parallel=R, pipeline_stages=stages)
    owned = [
        owned_parameters(model, layout, cut.stop - cut.start, first=s == 0, last=s == stages - 1)
        for s, cut in enumerate(layout.stage_layers(model.moe_layers))
    ]
    assert sum(shared for shared, _ in owned) == model.shared_parameters
    assert R * sum(experts for _, experts in owned) == model.routed_parameters


def test_tied_embeddings_of_one_stage_are_one_matrix():
    model = replace(model_shape("qwen3-30b-a3b"), tied_embeddings=True)
    shared, _ = owned_parameters(model, ParallelLayout(expert_parallel=8), 48, first=True, last=True)
    assert shared == model.shared_parameters


def test_handover_and_weight_sync_take_the_network():
    model, cluster = model_shape("qwen3-30b-a3b"), cluster_preset("h100x8", 16)
    rows_MR = np.array([[0.0, 500.0]])
    assert handover_seconds(model, cluster, rows_MR)[0] == pytest.approx(4e-6 + 500 * 4096 / 50e9)
    assert weight_sync_seconds(model, cluster, 8) == pytest.approx(4e-6 + model.parameters * 2 / 8 / 50e9)
