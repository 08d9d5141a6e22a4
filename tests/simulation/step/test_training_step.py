"""Simulated steps against the objective, a slow simulator, closed forms and bounds."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.harness.recorded_cuts import cut_recorded
from relibra import Budget, ConfigError, Demand, PlanError, cluster_preset, plan_step
from relibra.cluster import Link
from relibra.planning.costs.copies import pushed_copies
from relibra.planning.costs.layer_costs import decision_seconds, layer_costs
from relibra.planning.costs.prediction import predict
from relibra.planning.traffic.distinct_rows import distinct_rows_of_step
from relibra.routing.demand_rows import sample_of_rows
from relibra.routing.statistics import co_activation
from relibra.routing.synthetic import TraceShape, domain_trace
from relibra.simulation import (
    Execution,
    ParallelLayout,
    memory_use,
    model_shape,
    simulate_groups,
    simulate_step,
    with_mini_batches,
)
from relibra.simulation.cost_model import gathered_bytes, gradient_reduction_seconds, owned_parameters, spread_seconds
from relibra.simulation.step.group_run import run_group
from relibra.simulation.step.passes import backward_pass, forward_pass
from relibra.simulation.step.stage_choice import choose_stages
from relibra.simulation.step.stage_costs import stage_costs
from relibra.simulation.step.training_step import costs_of
from tests.planning.cases import make_demand
from tests.simulation.reference import gradients_after_the_end, pass_seconds
from tests.simulation.steps import FREE, free_links, machine, random_step, tiny_model

SEEDS = st.integers(0, 2**32 - 1)
DISPATCHES = st.sampled_from(["flat", "hierarchical"])
FEW = settings(max_examples=25, deadline=None)  # a step takes some 20 ms under the shape checker


@given(SEEDS, st.booleans(), DISPATCHES)
@FEW
def test_without_overlap_the_terms_are_those_of_the_objective(seed, live, dispatch):
    plan, demand, cluster, model = random_step(seed)
    plan, cluster = replace(plan, dispatch=dispatch), replace(cluster, hides_copies=False)
    step = simulate_step(plan, demand, cluster, model, Execution(live=live))
    prediction = predict(plan, demand, cluster, model.expert, attention_seconds=0.0, live=live)
    terms = {**step.terms, "exchange": step.terms["exchange"] + step.terms["gates"]}
    for term in ("compute", "exchange", "copies", "host", "relocation"):
        assert terms[term] == pytest.approx(getattr(prediction, term), rel=1e-9, abs=1e-9), term


@given(SEEDS, st.booleans(), DISPATCHES)
@FEW
def test_bytes_by_kind_are_those_of_ranks_and_of_predictions(seed, recompute, dispatch):
    plan, demand, cluster, model = random_step(seed)
    plan = replace(plan, dispatch=dispatch)
    step = simulate_step(plan, demand, cluster, model)
    assert step.bytes == predict(plan, demand, cluster, model.expert).bytes
    step = simulate_step(plan, demand, cluster, model, Execution(recompute_activations=recompute))
    of_kind = {"rows": ("dispatch", "combine"), "gates": ("gates",), "weights": ("push",), "gradients": ("return",)}
    for kind, stages in of_kind.items():
        sent = sum(float(step.sent_bytes[stage].sum()) for stage in stages)
        assert getattr(step.bytes, kind).total == pytest.approx(sent), kind
        assert min(getattr(step.bytes, kind)) >= 0
    assert step.bytes.moves.total == plan.num_moved * model.expert.state_bytes


def test_copies_between_nodes_are_counted_by_hand():
    plan, demand, cluster, model = random_step(4, micro_batches=2, layers=2, nodes=2, per_node=2)
    inside = between = 0
    for m, layer, rank, slot in np.argwhere(plan.replica_MLRB >= 0):
        home = plan.home_LE[layer, plan.replica_MLRB[m, layer, rank, slot]]
        inside, between = inside + (home // 2 == rank // 2), between + (home // 2 != rank // 2)
    found = simulate_step(replace(plan, resident=False), demand, cluster, model, Execution(overlap=False)).bytes
    weights = 2 * model.expert.weight_bytes
    assert min(inside, between) > 0
    assert found.weights == (inside * weights, between * weights)


def test_with_pairs_too_and_the_planner_s_own_plan():
    demand = make_demand(24, 3, 16, 4, 8, 0, tokens=400)
    pairs_LEE = np.einsum("sle,slf->lef", demand.counts_SLE, demand.counts_SLE).astype(np.int64)
    demand = replace(demand, pairs_LEE=pairs_LEE)
    cluster = replace(cluster_preset("h100x8", 8, 4), hides_copies=False)
    model = replace(model_shape("qwen3-30b-a3b"), moe_layers=3, experts=16, top_k=4)
    plan = plan_step(demand, cluster, Budget(slots=2), "relibra_paper_tokens", expert=model.expert, never_worse=False)
    demand = plan.scheduled(demand)
    prediction = predict(plan, demand, cluster, model.expert, attention_seconds=0.0)
    step = simulate_step(plan, demand, cluster, model)
    terms = {**step.terms, "exchange": step.terms["exchange"] + step.terms["gates"]}
    for term in ("compute", "exchange", "copies", "relocation"):
        assert terms[term] == pytest.approx(getattr(prediction, term), rel=1e-9), term
    assert step.terms["copies"] > 0


@given(SEEDS, st.booleans(), st.booleans(), st.sampled_from([1, 10]), st.booleans())
@FEW
def test_the_fast_simulator_equals_the_slow_one(seed, overlap, recompute, slower, live):
    assert_fast_equals_slow(seed, overlap, recompute, slower, live)


@pytest.mark.slow
@pytest.mark.parametrize("slower", [1, 10])
@pytest.mark.parametrize("recompute", [False, True])
def test_the_fast_simulator_equals_the_slow_one_in_many_steps(recompute, slower):
    for seed in range(500):
        assert_fast_equals_slow(seed, seed % 4 > 0, recompute, slower, seed % 3 == 0)


def assert_fast_equals_slow(seed, overlap, recompute, slower, live):
    plan, demand, cluster, model = random_step(seed)
    plan = replace(plan, dispatch="hierarchical" if seed % 5 < 2 else "flat")
    cluster = replace(cluster, inter_send=Link(latency_seconds=1, bytes_per_second=4 / slower))
    layout = ParallelLayout(expert_parallel=plan.num_ranks)
    (costs,) = stage_costs(plan, demand, cluster, model, layout, overlap=overlap, live=live)
    fast = forward_pass(costs, overlap=overlap)
    slow, waited = pass_seconds(costs, backward=False, overlap=overlap)
    np.testing.assert_allclose(fast.seconds_M, slow, rtol=1e-12)
    if overlap:
        np.testing.assert_allclose(fast.waited_MR.sum(axis=0), waited, rtol=1e-9, atol=1e-9)
    fast = backward_pass(costs, overlap=overlap, recompute_activations=recompute)
    slow, waited = pass_seconds(costs, backward=True, overlap=overlap, recompute=recompute)
    np.testing.assert_allclose(fast.seconds_M, slow, rtol=1e-12)
    if overlap:
        np.testing.assert_allclose(fast.waited_MR.sum(axis=0), waited, rtol=1e-9, atol=1e-9)


def test_a_push_to_another_node_rests_while_rows_travel():
    plan, demand, cluster, model = random_step(
        0, nodes=2, per_node=1, experts_per_rank=1, layers=2, micro_batches=1, slots=1, resident=False
    )
    counts_SLE = np.zeros_like(demand.counts_SLE)
    counts_SLE[0], counts_SLE[1] = [5, 0], [3, 0]  # all tokens of rank 0 and of rank 1 take expert 0
    demand = replace(demand, counts_SLE=counts_SLE, top_k=1).with_schedule(
        np.array([0, 0, -1], np.int32), np.array([0, 1, 0], np.int32), 2
    )
    home_LE = np.tile(np.arange(2, dtype=np.int16), (2, 1))
    replica_MLRB, quota_MLRB = np.full((1, 2, 2, 1), -1, np.int16), np.zeros((1, 2, 2, 1), np.int32)
    replica_MLRB[0, 1, 1, 0], quota_MLRB[0, 1, 1, 0] = 0, 2  # in the second layer rank 1 computes two of its three
    plan = replace(
        plan,
        physical_to_logical_map=home_LE,
        previous_map=home_LE,
        micro_batch_S=np.array([0, 0, -1], np.int32),
        rank_S=np.array([0, 1, 0], np.int32),
        replica_MLRB=replica_MLRB,
        quota_MLRB=quota_MLRB,
    )
    slow = Link(latency_seconds=0, bytes_per_second=0.01)  # an expert takes 6000 s, a row of 4 bytes 400 s
    machine_, layout = replace(cluster, inter_send=slow, inter_receive=slow), ParallelLayout(expert_parallel=2)
    (costs,) = stage_costs(plan, demand, machine_, model, layout, overlap=True)
    assert costs.push.seconds_ML.tolist() == costs.push.network_ML.tolist() == [[0, 60 / 0.01]]
    one = forward_pass(costs)
    # Three rows each way in the first layer, one in the second, and a gate weight of 2 bytes with each row.
    rows = 400 * (3 + 3 + 1 + 1)
    gates = 200 * (3 + 1)
    assert one.terms["exchange"] == pytest.approx(rows)
    assert one.terms["gates"] == pytest.approx(gates)
    # The push begins at 0 and rests for all rows but those of the last combine; what comes after it is work.
    end = 60 / 0.01 + rows + gates + costs.replica_MLR[0, 1, 1] + float(costs.last_MR.max())
    assert one.seconds_M[0] == pytest.approx(end)


@given(SEEDS)
@FEW
def test_without_gradients_replicas_are_pushed_once(seed):
    plan, demand, cluster, model = random_step(seed)
    step = simulate_step(plan, demand, cluster, model, Execution(forward_only=True))
    pushed = int(pushed_copies(plan)[0].sum()) * model.expert.weight_bytes
    assert step.sent_bytes["push"].sum() == step.bytes.weights.total == pushed


@given(SEEDS, st.booleans(), st.booleans(), st.booleans())
@FEW
def test_rows_come_back_and_every_token_slot_is_computed_once(seed, overlap, recompute, forward_only):
    plan, demand, cluster, model = random_step(seed)
    stages = 1 + seed % len(plan.layer_ids)
    how = Execution(overlap=overlap, recompute_activations=recompute, forward_only=forward_only, pipeline_stages=stages)
    step = simulate_step(plan, demand, cluster, model, how)
    assert set(step.sent_bytes) == {"dispatch", "combine", "gates", "gather", "push", "return", "handover"}
    assert step.sent_bytes["dispatch"].sum() == pytest.approx(step.sent_bytes["combine"].sum())
    assert all((sent_R >= 0).all() for sent_R in step.sent_bytes.values())
    assert step.token_slots_R.sum() == demand.tokens_MLRE.sum()
    assert step.seconds == pytest.approx(sum(step.terms.values()))
    assert min(step.terms.values()) >= -1e-9
    assert len(step.waited_R) == step.layout.num_ranks == plan.num_ranks * stages


@given(SEEDS)
@FEW
def test_no_step_is_faster_than_its_busiest_ranks(seed):
    plan, demand, cluster, model = random_step(seed)
    fast, slow = (simulate_step(plan, demand, cluster, model, Execution(overlap=how)) for how in (True, False))
    bound = layer_costs(plan, demand, cluster, model.expert).compute_ML.sum()
    assert bound - 1e-9 <= fast.seconds <= slow.seconds + 1e-9
    assert fast.terms["compute"] == pytest.approx(bound)
    assert 0 <= fast.terms["copies"] <= slow.terms["copies"] + 1e-9
    assert fast.hidden_copy_seconds >= -1e-9
    assert 0 <= fast.utilisation <= 1 + 1e-9


@given(SEEDS)
@FEW
def test_free_links_leave_compute_and_attention(seed):
    plan, demand, _, model = random_step(seed)
    cluster = free_links(plan)
    step = simulate_step(plan, demand, cluster, model)
    rows_MR, scores_MR = np.zeros((2, len(plan.replica_MLRB), plan.num_ranks))
    for s, (m, r) in enumerate(zip(plan.micro_batch_S, plan.rank_S, strict=True)):
        if m >= 0:
            rows = int(demand.counts_SLE[s, 0].sum())
            rows_MR[m, r] += rows
            # 2 heads, keys and values of 2: 2 x 2 x (2 + 2) flops per pair of a token and one before it, or itself
            scores_MR[m, r] += 16 * rows * (rows + 1) / 2
    flops_MR = len(plan.layer_ids) * (2 * model.non_expert_parameters * rows_MR + scores_MR)
    flops_MR += model.dense_layers * (2 * model.dense_layer_parameters * rows_MR + scores_MR)
    # Ranks meet after each layer, and all layers of a rank take the same share of its time: maxima add up.
    attention = 3 * (flops_MR.max(axis=1).sum() + 0) / cluster.flops_per_second
    head = 3 * 2 * model.head_parameters * rows_MR.max(axis=1).sum() / cluster.flops_per_second
    bound = layer_costs(plan, demand, cluster, model.expert).compute_ML.sum()
    expected = bound + attention + head + step.terms["optimizer"]
    if model.dense_layers == 0 or plan.num_ranks == 1:
        assert step.seconds == pytest.approx(expected)
    else:  # the first layer may have another slowest rank than the others
        assert step.seconds <= expected + 1e-9


@given(SEEDS)
@FEW
def test_without_a_gemm_table_skew_of_seconds_is_skew_of_tokens(seed):
    plan, demand, cluster, model = random_step(seed)
    step = simulate_step(plan, demand, replace(cluster, gemm_table=(), memory_bytes_per_second=0.0), model)
    assert step.expert_skew == pytest.approx(plan.skew(demand))
    assert step.attention_skew >= 1 - 1e-12


def test_same_input_same_bytes():
    found = []
    for _ in range(2):
        plan, demand, cluster, model = random_step(5)
        step = simulate_step(plan, demand, cluster, model, Execution(pipeline_stages=len(plan.layer_ids)))
        found.append((repr(step.figures()), [value_R.tobytes() for value_R in step.stage_seconds.values()]))
    assert found[0] == found[1]


def test_groups_run_side_by_side_and_meet_at_the_gradients():
    plan, demand, cluster, model = random_step(3, micro_batches=4, layers=2, nodes=1, per_node=2)
    group_M = np.array([0, 1, 0, 1], np.int32)
    step = simulate_step(plan, replace(demand, group_M=group_M), cluster, model)
    alone = [
        simulate_step(*one, cluster, model) for one in (_part(plan, demand, group_M == group) for group in range(2))
    ]
    assert step.layout == ParallelLayout(expert_parallel=2, data_parallel=2)
    own = [sum(one.terms[name] for name in ("attention", "exchange", "gates", "compute", "copies")) for one in alone]
    got = sum(step.terms[name] for name in ("attention", "exchange", "gates", "compute", "copies"))
    assert got == pytest.approx(max(own))
    assert step.terms["gradients"] > alone[0].terms["gradients"]  # twice as many ranks, over the network
    assert step.token_slots_R.sum() == demand.tokens_MLRE.sum()
    np.testing.assert_allclose(step.waited_R, np.concatenate([one.waited_R for one in alone]))


def test_mini_batches_end_at_their_borders_on_the_same_ranks():
    plan, demand, cluster, model = random_step(3, micro_batches=4, layers=2, nodes=1, per_node=2)
    uneven = np.array([0, 0, 0, 1], np.int32)
    one_group, how = with_mini_batches(replace(demand, group_M=uneven), Execution(recompute_activations=True))
    assert one_group.group_M is None
    assert how == Execution(recompute_activations=True, mini_batches=(3, 1))
    run = run_group(costs_of(plan, one_group, cluster, model, how), how)
    assert [one.number_M.tolist() for one in run.mini_batches] == [[0, 1, 2], [3]]
    assert simulate_step(plan, one_group, cluster, model, how).layout == ParallelLayout(expert_parallel=2)
    even = Execution(mini_batches=(2, 2))
    same = simulate_step(plan, demand, cluster, model, even).seconds
    assert same == simulate_step(plan, demand, cluster, model, Execution(mini_batches=2)).seconds
    assert with_mini_batches(demand, even) == (demand, even)
    with pytest.raises(ConfigError, match="mini-batches of 3 micro-batches in all, the plan has 4"):
        simulate_step(plan, demand, cluster, model, Execution(mini_batches=(2, 1)))
    with pytest.raises(ConfigError, match="at least 1"):
        Execution(mini_batches=(2, 0))


def _part(plan, demand, chosen_M):
    from relibra.simulation.step.training_step import only_micro_batches

    return only_micro_batches(plan, demand, np.flatnonzero(chosen_M))


def test_counted_rows_are_sent_and_lie_between_their_bounds():
    shape = TraceShape(rows_per_sample=[50] * 16, num_layers=2, num_experts=16, top_k=4)
    trace = domain_trace(shape, np.random.default_rng(0))
    demand, cluster = cut_recorded(trace, 200, 8), cluster_preset("h100x8", 8, 4)
    model = replace(model_shape("qwen3-30b-a3b"), moe_layers=2, experts=16, top_k=4)
    plan = plan_step(demand, cluster, Budget(slots=1), expert=model.expert)
    scheduled = plan.scheduled(demand)
    rows = distinct_rows_of_step(plan, scheduled, trace.experts_TLK, sample_of_rows(trace, demand))
    counted = simulate_step(plan, scheduled, cluster, model, distinct=rows)
    assert counted.sent_bytes["dispatch"].sum() == pytest.approx(
        2 * model.expert.row_bytes * (rows.ranks_MLRR.sum() - np.trace(rows.ranks_MLRR, axis1=2, axis2=3).sum())
    )
    bounded = simulate_step(plan, replace(scheduled, pairs_LEE=co_activation(trace)), cluster, model)
    every_slot = simulate_step(plan, replace(scheduled, pairs_LEE=None), cluster, model)
    sent = [float(step.sent_bytes["dispatch"].sum()) for step in (bounded, counted, every_slot)]
    assert sent[0] < sent[1] < sent[2]
    assert counted.sent_bytes["gates"].sum() == pytest.approx(every_slot.sent_bytes["gates"].sum())
    group_M = np.arange(len(rows.ranks_MLRR), dtype=np.int32) % 2
    grouped = simulate_step(plan, replace(scheduled, group_M=group_M), cluster, model, distinct=rows)
    assert grouped.sent_bytes["dispatch"].sum() == pytest.approx(sent[1])


def test_mini_batches_end_with_an_optimizer_step_each():
    plan, demand, cluster, model = random_step(8, micro_batches=4, layers=2, nodes=2, per_node=1)
    one = simulate_step(plan, demand, cluster, model)
    two = simulate_step(plan, demand, cluster, model, Execution(mini_batches=2))
    assert two.terms["optimizer"] == pytest.approx(2 * one.terms["optimizer"])
    assert two.terms["compute"] == pytest.approx(one.terms["compute"])
    assert two.terms["gradients"] > one.terms["gradients"]


@given(SEEDS, st.integers(1, 4))
@FEW
def test_sums_of_gradients_count_from_the_end_of_their_own_stage(seed, stages):
    plan, demand, cluster, model = random_step(seed, layers=4, micro_batches=3)
    cluster = replace(cluster, inter_send=Link(latency_seconds=0.01 * (seed % 100), bytes_per_second=100))
    how = Execution(pipeline_stages=stages, shard_dense=seed % 2 == 0)
    run = run_group(costs_of(plan, demand, cluster, model, how), how)
    (mini_batch,) = run.mini_batches
    start_D = mini_batch.start_XM[: stages - 1 : -1, -1]
    end_D = start_D + mini_batch.last_backward_D
    np.testing.assert_allclose(mini_batch.end_D, end_D)
    assert max(end_D) == pytest.approx(mini_batch.seconds)
    layout = ParallelLayout(expert_parallel=plan.num_ranks, pipeline_stages=stages)
    layers_D = [part.stop - part.start for part in layout.stage_layers(4)]
    whole_D = [
        gradient_reduction_seconds(
            cluster,
            layout,
            *owned_parameters(model, layout, layers, first=s == 0, last=s == stages - 1),
            sharded=how.shard_dense,
        )
        for s, layers in enumerate(layers_D)
    ]
    step = simulate_step(plan, demand, cluster, model, how)
    expected = gradients_after_the_end(start_D.tolist(), end_D.tolist(), whole_D, layers_D)
    assert step.terms["gradients"] == pytest.approx(expected)
    waits = simulate_step(plan, demand, cluster, model, replace(how, overlap=False))
    assert waits.terms["gradients"] == pytest.approx(max(whole_D))
    assert simulate_step(plan, demand, replace(cluster, hides_copies=False), model, how).terms == waits.terms


@given(SEEDS, st.sampled_from(["even", "best"]), st.sampled_from(["1f1b", "round"]), st.booleans())
@FEW
def test_one_stage_is_the_step_without_stages(seed, cut, pipeline, recompute):
    plan, demand, cluster, model = random_step(seed, micro_batches=4)
    plain = Execution(mini_batches=1 + seed % 3, recompute_activations=recompute)
    whole = simulate_step(plan, demand, cluster, model, plain)
    how = choose_stages(plan, demand, cluster, model, plain, cut=cut, pipeline=pipeline)
    assert (how.round_cut is not None) == (pipeline == "round")
    step = simulate_step(plan, demand, cluster, model, how)
    assert step.seconds == pytest.approx(whole.seconds, rel=1e-9)
    assert step.terms == pytest.approx(whole.terms, rel=1e-9)
    assert step.bytes == whole.bytes
    assert memory_use(plan, demand, cluster, model, how).parts == memory_use(plan, demand, cluster, model, plain).parts


@given(SEEDS, st.booleans(), st.integers(2, 3))
@FEW
def test_best_stages_end_no_later_than_even_ones(seed, recompute, stages):
    plan, demand, cluster, model = random_step(seed, layers=4, micro_batches=5)
    plain = Execution(pipeline_stages=stages, recompute_activations=recompute, mini_batches=2)
    for pipeline in ("1f1b", "round"):
        even, best = (
            simulate_step(plan, demand, cluster, model, how)
            for how in (
                choose_stages(plan, demand, cluster, model, plain, cut=cut, pipeline=pipeline)
                for cut in ("even", "best")
            )
        )
        assert best.seconds_without_relocation <= even.seconds_without_relocation * (1 + 1e-12)
        for step in (even, best):
            assert step.seconds == pytest.approx(sum(step.terms.values()))
            assert min(step.terms.values()) >= -1e-9
            assert step.token_slots_R.sum() == demand.tokens_MLRE.sum()
            assert step.sent_bytes["dispatch"].sum() == pytest.approx(step.sent_bytes["combine"].sum())
            assert step.layout.num_ranks == stages * plan.num_ranks


def test_round_robin_stages_wait_for_weights_from_the_host():
    plan, demand, cluster, model = random_step(5, layers=4, micro_batches=8)
    how = Execution(pipeline_stages=2)
    how = choose_stages(plan, demand, cluster, model, how, cut="even", pipeline="round")
    free, slow = (
        simulate_step(plan, demand, replace(cluster, host=link), model, how)
        for link in (FREE, replace(cluster.host, bytes_per_second=1e-3))
    )
    assert slow.terms["pipeline"] > free.terms["pipeline"]
    assert slow.terms["optimizer"] > free.terms["optimizer"]  # master and moments come from the host and go back
    assert slow.terms["compute"] == pytest.approx(free.terms["compute"])
    held = memory_use(plan, demand, cluster, model, how).parts
    whole = memory_use(plan, demand, cluster, model, Execution(pipeline_stages=2)).parts
    assert held["optimizer"] == 0 < whole["optimizer"]
    with pytest.raises(ConfigError, match="leave out round_cut"):
        replace(how, forward_only=True)
    with pytest.raises(ConfigError, match=r"of \(1, 2\) expert layers: give 2 sizes of at least 1 that add up to 4"):
        simulate_step(plan, demand, cluster, model, Execution(pipeline_stages=2, stage_sizes=(1, 2)))


@given(SEEDS)
@FEW
def test_a_live_balancer_pays_for_each_decision(seed):
    plan, demand, cluster, model = random_step(seed)
    planned, live = (simulate_step(plan, demand, cluster, model, Execution(live=live)) for live in (False, True))
    decisions = plan.bound_ML.size * decision_seconds(cluster, plan.num_experts)
    assert live.terms["host"] == pytest.approx(planned.terms["host"] + decisions)
    hidden = planned.terms["gathers"] - live.terms["gathers"]  # a gather may run beside a decision
    assert live.seconds >= planned.seconds + decisions - hidden - 1e-9
    assert live.terms["copies"] >= planned.terms["copies"] - 1e-9
    assert live.notes


@given(SEEDS)
@FEW
def test_gathers_cost_from_the_first_of_each_pass_to_all(seed):
    plan, demand, cluster, model = random_step(seed)
    spread, whole = (simulate_step(plan, demand, cluster, model, Execution(shard_dense=s)) for s in (True, False))
    weights, M, L = gathered_bytes(model, first=True, last=True), len(plan.bound_ML), len(plan.layer_ids)
    first, each = spread_seconds(cluster, weights.first), spread_seconds(cluster, weights.each)
    root = spread_seconds(cluster, weights.root)
    assert whole.terms["gathers"] == 0
    assert spread.terms["gathers"] >= M * (root + first) - 1e-9
    assert spread.terms["gathers"] <= M * (root + 2 * first + 2 * (L - 1) * each) + 1e-9
    expected = (1 - 1 / plan.num_ranks) * M * (weights.root + 2 * weights.first + 2 * (L - 1) * weights.each)
    assert spread.sent_bytes["gather"] == pytest.approx(np.full(plan.num_ranks, expected))


def test_log_probabilities_run_forward_only():
    plan, demand, cluster, model = random_step(8, micro_batches=2, layers=2, nodes=2, per_node=2, resident=False)
    step = simulate_step(plan, demand, cluster, model)
    forward = simulate_step(plan, demand, cluster, model, Execution(forward_only=True))
    assert forward.terms["compute"] == pytest.approx(step.terms["compute"] / 3)
    assert forward.terms["exchange"] == pytest.approx(step.terms["exchange"] / 2)
    assert forward.terms["optimizer"] == forward.terms["gradients"] == 0
    assert forward.useful_flops == pytest.approx(step.useful_flops / 3)
    again = simulate_step(plan, demand, cluster, model, Execution(recompute_activations=True))
    assert again.terms["compute"] == pytest.approx(step.terms["compute"] * 4 / 3)
    assert again.useful_flops == step.useful_flops


def test_what_does_not_fit_is_refused_with_a_sentence():
    plan, demand, cluster, model = random_step(1, nodes=2, per_node=2, layers=2, experts_per_rank=2, micro_batches=3)
    with pytest.raises(PlanError, match=r"\(7, 3, 2, 4, 8\) does not fit a demand of \(6, 3, 2, 4, 8\)"):
        simulate_step(plan, _without_first_sample(demand), cluster, model)
    with pytest.raises(ConfigError, match=r"groups of 4 ranks, cluster 'made up' has 6: .*with_ranks\(4\)"):
        simulate_step(plan, demand, replace(cluster, num_nodes=3), model)
    with pytest.raises(PlanError, match="a plan for 2 x 2 ranks does not fit cluster 'made up' of 1 x 4"):
        simulate_step(plan, demand, replace(cluster, num_nodes=1, ranks_per_node=4), model)
    with pytest.raises(ConfigError, match="a plan of 2 layers and 8 experts does not fit model 'tiny' of 5 and 8"):
        simulate_step(plan, demand, cluster, replace(model, moe_layers=5))
    with pytest.raises(ConfigError, match="2 expert layers of 'tiny' do not fill 3 pipeline stages"):
        simulate_step(plan, demand, cluster, model, Execution(pipeline_stages=3))
    with pytest.raises(ConfigError, match="picked 2 experts, those of model 'tiny' pick 1"):
        simulate_step(plan, replace(demand, top_k=2), cluster, model)
    with pytest.raises(ConfigError, match="9 mini-batches of"):
        simulate_step(plan, demand, cluster, model, Execution(mini_batches=9))
    with pytest.raises(ConfigError, match="both are at least 1"):
        Execution(mini_batches=0)
    with pytest.raises(ConfigError, match="without expert-parallel groups"):
        simulate_groups([], cluster, model)
    other = replace(plan, physical_to_logical_map=plan.physical_to_logical_map[:, ::-1].copy())
    with pytest.raises(ConfigError, match="group 1 has other homes than group 0"):
        simulate_groups([(plan, demand), (other, demand)], cluster, model)


def _without_first_sample(demand):
    per_sample = ("counts_SLE", "sample_ids", "micro_batch_S", "rank_S")
    return replace(demand, **{name: getattr(demand, name)[1:] for name in per_sample})


def test_an_unknown_memory_bandwidth_leaves_the_optimizer_out():
    plan, demand, cluster, model = random_step(1)
    step = simulate_step(plan, demand, replace(cluster, memory_bytes_per_second=0), model)
    assert step.terms["optimizer"] == 0
    assert "the optimizer is left out" in step.notes[0]
    assert simulate_step(plan, demand, cluster, model).notes == ()


def test_a_step_without_tokens_takes_the_optimizer_s_time():
    plan, demand, cluster, model = random_step(2, slots=0, layers=1)
    nothing = replace(demand, counts_SLE=np.zeros_like(demand.counts_SLE))
    nothing = plan.scheduled(nothing)
    plan = replace(plan, previous_map=plan.physical_to_logical_map)
    step = simulate_step(plan, nothing, cluster, model)
    assert step.terms["compute"] == step.terms["exchange"] == step.terms["attention"] == 0
    assert step.expert_skew == 1
    assert isinstance(nothing, Demand)
    assert machine(plan).num_ranks == plan.num_ranks
    assert tiny_model(plan).moe_layers == 1


def test_a_hierarchical_layer_has_two_stages():
    plan, demand, cluster, model = random_step(0, nodes=2, per_node=2, micro_batches=2, layers=2, slots=0)
    steps = {}
    for dispatch in ("flat", "hierarchical"):
        one = replace(plan, dispatch=dispatch)
        steps[dispatch] = simulate_step(one, demand, cluster, model)
        layout = ParallelLayout(expert_parallel=4)
        (costs,) = stage_costs(one, demand, cluster, model, layout, overlap=True)
        seconds = [float((stage.seconds_ML + stage.back_ML).sum()) for stage in costs.exchange.stages]
        assert len(seconds) == {"flat": 1, "hierarchical": 2}[dispatch]
        assert steps[dispatch].terms["exchange"] == pytest.approx(2 * sum(seconds))
    flat, hierarchical = steps["flat"], steps["hierarchical"]
    assert hierarchical.terms["gates"] == flat.terms["gates"]
    assert flat.bytes.rows.between == pytest.approx(hierarchical.bytes.rows.between), "every choice, without pairs"
    sent = [sum(step.sent_bytes[kind].sum() for kind in ("dispatch", "combine")) for step in (flat, hierarchical)]
    assert sent[0] < sent[1], "forwarded rows are sent again"
