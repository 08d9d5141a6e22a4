from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relibra import ConfigError, Demand, PlanError, RoutingTrace
from relibra.cluster import Cluster, Link, cluster_preset
from relibra.planning.costs.expert_shape import EXPERT_SHAPES, ExpertShape, expert_shape
from relibra.planning.costs.prediction import (
    compute_seconds,
    copy_seconds,
    copy_seconds_of_links,
    predict,
    pushed_copies,
)
from relibra.planning.traffic.split import split_tokens
from relibra.planning.traffic.traffic import link_rows, link_rows_reference, send_once_share
from relibra.routing.statistics import co_activation
from tests.planning.plans import planned_step, planned_steps

EXPERT = ExpertShape(hidden=2, width=5)  # 30 parameters, 60 flops per token-slot, rows of 4 bytes


def cluster_for(plan, **changes):
    """Return a machine whose costs are easy to add up by hand: no latencies, round rates."""
    values = {
        "name": "by hand",
        "num_nodes": plan.num_nodes,
        "ranks_per_node": plan.ranks_per_node,
        "intra": Link(latency_seconds=0, bytes_per_second=10),
        "inter_send": Link(latency_seconds=0, bytes_per_second=2),
        "inter_receive": Link(latency_seconds=0, bytes_per_second=1),
        "host": Link(latency_seconds=0, bytes_per_second=5),
        "memory_bytes": 10**9,
        "peak_flops_per_second": 360.0,
        "efficiency": 0.5,
        "source": "made up",
        "label": "model",
    }
    return Cluster(**{**values, **changes})


def test_sizes_of_known_experts():
    shape = expert_shape("qwen3-30b-a3b")
    assert shape.parameters == 3 * 2048 * 768
    assert shape.weight_bytes == 9_437_184
    assert shape.gradient_bytes == 18_874_368
    assert shape.state_bytes == 14 * shape.parameters
    assert shape.flops_per_token_slot == 2 * shape.parameters
    assert shape.row_bytes == 4096
    assert EXPERT_SHAPES["deepseek-v3"].parameters == 44_040_192
    with pytest.raises(ConfigError, match=r"'gpt-5' is unknown: allowed are qwen3-30b-a3b, .* ExpertShape"):
        expert_shape("gpt-5")
    with pytest.raises(ConfigError, match="expert width is 0"):
        ExpertShape(hidden=1, width=0)


def predict_reference(plan, demand, cluster, expert):
    """Walk over every micro-batch, layer, source and instance, in plain Python."""
    M, L, R, _ = demand.tokens_MLRE.shape
    G, flops, slots = plan.ranks_per_node, 3 * expert.flops_per_token_slot, 0
    compute = exchange = sent = 0.0
    for m, layer in np.ndindex(M, L):
        split = split_tokens(
            demand.tokens_MLRE[m, layer],
            plan.home_LE[layer],
            plan.replica_MLRB[m, layer],
            plan.quota_MLRB[m, layer],
            G,
        )
        rows_R = [0] * R
        inside, between = [[0, 0] for _ in range(R)], [[0, 0] for _ in range(R)]
        for source in range(R):
            for rank, tokens in zip(split.rank_I, split.tokens_RI[source], strict=True):
                rows_R[rank] += int(tokens)
                if source != rank:
                    link = inside if source // G == rank // G else between
                    slots += int(tokens) if source // G != rank // G else 0
                    link[source][0] += int(tokens)
                    link[rank][1] += int(tokens)
                    sent += 4 * int(tokens) * expert.row_bytes
        compute += max(rows_R) * flops / cluster.flops_per_second
        for away, back in ((0, 1), (1, 0)):  # along the traffic, against it
            nvlink = max(max(x) for x in inside) * expert.row_bytes / cluster.intra.bytes_per_second
            out = max(x[away] for x in between) * expert.row_bytes / cluster.inter_send.bytes_per_second
            into = max(x[back] for x in between) * expert.row_bytes / cluster.inter_receive.bytes_per_second
            exchange += 2 * max(nvlink, out, into)
    return compute, exchange, slots, sent


@given(planned_steps())
def test_prediction_equals_its_reference(step):
    plan, demand = step
    cluster = cluster_for(plan)
    prediction = predict(plan, demand, cluster, EXPERT)
    compute, exchange, slots, sent = predict_reference(plan, demand, cluster, EXPERT)
    assert prediction.compute == pytest.approx(compute)
    assert prediction.exchange == pytest.approx(exchange)
    assert prediction.cross_node_token_slots == slots
    assert prediction.sent_bytes == pytest.approx(sent)
    assert prediction.moved_bytes == plan.num_moved * 14 * 30
    assert prediction.as_dict()["total"] == prediction.total
    assert prediction.total == pytest.approx(compute + exchange + prediction.copies + prediction.relocation)


@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(1, 3))
def test_link_rows_equal_their_reference(seed, num_nodes, per_node):
    rng = np.random.default_rng(seed)
    R = num_nodes * per_node
    traffic_LRR, share_LR = rng.integers(0, 5, (2, R, R)), rng.random((2, R))
    fast = link_rows(traffic_LRR, share_LR, per_node)
    slow = link_rows_reference(traffic_LRR, share_LR, per_node)
    np.testing.assert_allclose(fast[0], slow[0])
    np.testing.assert_allclose(fast[1], slow[1])
    assert fast[2] == slow[2]


def two_nodes(replica=None, quota=0, resident=False, micro_batches=1):
    """2 nodes x 2 ranks, one expert each; rank 0 sends 10 rows to expert 0, 20 to 1, 30 to 2 in each micro-batch."""
    demand = Demand(
        counts_SLE=np.tile(np.array([[[10, 20, 30, 0]]], np.int32), (micro_batches, 1, 1)),
        layer_ids=np.array([0], np.int32),
        sample_ids=np.arange(micro_batches),
    )
    plan, _ = planned_step(np.random.default_rng(0), experts_per_rank=1, micro_batches=1, layers=1, slots=1)
    replica_MLRB = np.full((micro_batches, 1, 4, 1), -1, np.int16)
    quota_MLRB = np.zeros((micro_batches, 1, 4, 1), np.int32)
    if replica is not None:
        rank, expert = replica
        replica_MLRB[:, 0, rank, 0], quota_MLRB[:, 0, rank, 0] = expert, quota
    plan = replace(
        plan,
        physical_to_logical_map=plan.previous_map,
        micro_batch_S=np.arange(micro_batches, dtype=np.int32),
        rank_S=np.zeros(micro_batches, np.int32),
        replica_MLRB=replica_MLRB,
        quota_MLRB=quota_MLRB,
        resident=resident,
        bound_ML=np.ones((micro_batches, 1), np.int64),
    )
    return plan, plan.scheduled(demand)


def test_a_case_by_hand():
    plan, demand = two_nodes()
    prediction = predict(plan, demand, cluster_for(plan), EXPERT)
    assert prediction.compute == 30 * 3 * 60 / 180
    # Inside: 20 rows of 4 bytes at 10 B/s, 8 s. Between: 30 rows, 60 s to send at 2 B/s, 120 s to receive at 1 B/s.
    assert prediction.exchange == 4 * 120
    assert prediction.cross_node_token_slots == 30
    assert prediction.sent_bytes == 4 * 50 * 4
    assert (prediction.copies, prediction.relocation, prediction.copy_bytes, prediction.moved_bytes) == (0, 0, 0, 0)
    slow = cluster_for(plan, intra=Link(latency_seconds=7, bytes_per_second=0.5))
    assert predict(plan, demand, slow, EXPERT).exchange == 4 * (7 + 160)


def test_homes_send_weights_and_receive_gradients_inside_the_node_and_across_the_network():
    plan, demand = two_nodes(replica=(1, 0), quota=4)  # expert 0 copied to rank 1, on the node of its home
    assert predict(plan, demand, cluster_for(plan), EXPERT).copies == (60 + 60 + 120) / 10
    assert predict(plan, demand, cluster_for(plan), EXPERT).copy_bytes == 240
    # 2 s of attention hide 2 of 6 s forward and 4 of 18 s backward
    assert predict(plan, demand, cluster_for(plan), EXPERT, attention_seconds=2.0).copies == 4 + 14
    assert predict(plan, demand, cluster_for(plan), EXPERT, attention_seconds=100.0).copies == 0
    plan, demand = two_nodes(replica=(1, 2), quota=4)  # expert 2 lives on the other node
    # In through the replica's NIC at 1 B/s, and the gradient in through the home's; sending takes half as long.
    assert predict(plan, demand, cluster_for(plan), EXPERT).copies == (60 + 60) / 1 + 120 / 1
    fast_in = cluster_for(plan, inter_receive=Link(latency_seconds=0, bytes_per_second=1e9))
    assert predict(plan, demand, fast_in, EXPERT).copies == (60 + 60) / 2 + 120 / 2
    assert predict(plan, demand, cluster_for(plan), EXPERT).cross_node_token_slots == 26


def test_a_home_that_feeds_several_replicas_sends_to_one_after_the_other():
    plan, demand = planned_step(np.random.default_rng(0), nodes=1, per_node=4, experts_per_rank=1, micro_batches=1)
    replica_MLRB = np.full_like(plan.replica_MLRB, -1)
    for rank in set(range(4)) - {plan.home_LE[0, 0]}:
        replica_MLRB[0, 0, rank, 0] = 0
    plan = replace(plan, replica_MLRB=replica_MLRB, quota_MLRB=np.zeros_like(plan.quota_MLRB))
    assert predict(plan, demand, cluster_for(plan), EXPERT).copies == 3 * (60 + 60 + 120) / 10


def test_a_home_that_feeds_several_nodes_sends_to_one_after_the_other_and_a_pool_relieves_it():
    plan, _ = planned_step(
        np.random.default_rng(0), nodes=4, per_node=1, experts_per_rank=1, micro_batches=1, layers=1, slots=1
    )
    replica_MLRB = np.full_like(plan.replica_MLRB, -1)
    for rank in set(range(4)) - {plan.home_LE[0, 0]}:
        replica_MLRB[0, 0, rank, 0] = 0
    plan, machine = replace(plan, replica_MLRB=replica_MLRB), cluster_for(plan)
    used_MLRB = replica_MLRB >= 0
    assert copy_seconds(plan, used_MLRB, machine, 60) == 3 * 60 / 2  # fan-out at 2 B/s; each replica takes 60 s
    assert copy_seconds(plan, used_MLRB, machine, 60, to_home=True) == 3 * 60 / 1
    assert copy_seconds(plan, used_MLRB, machine, 60, from_pool=True) == 60 / 5
    with pytest.raises(AssertionError, match="never into a pool"):
        copy_seconds(plan, used_MLRB, machine, 60, to_home=True, from_pool=True)


@given(planned_steps(), st.booleans())
def test_copies_take_as_long_as_the_busiest_port_of_any_rank(case, to_home):
    """Slow and obvious: one copy at a time, out of one rank and into another."""
    plan, _ = case
    machine = cluster_for(plan, intra=Link(latency_seconds=3, bytes_per_second=10))
    inside_ML, network_ML = copy_seconds_of_links(plan, plan.replica_MLRB >= 0, machine, 60, to_home=to_home)
    pool_ML, nothing_ML = copy_seconds_of_links(plan, plan.replica_MLRB >= 0, machine, 60, from_pool=True)
    assert not nothing_ML.any()
    for m, layer in np.ndindex(*plan.replica_MLRB.shape[:2]):
        copies = Counter()
        for rank, expert in zip(*np.nonzero(plan.replica_MLRB[m, layer] >= 0), strict=True):
            home = int(plan.home_LE[layer, plan.replica_MLRB[m, layer, rank, expert]])
            kind = "intra" if home // plan.ranks_per_node == rank // plan.ranks_per_node else "inter"
            source, target = (rank, home) if to_home else (home, rank)
            copies[kind, "send", source] += 1
            copies[kind, "receive", target] += 1
            copies["host", "receive", rank] += 1

        def slowest(kind, copies=copies):
            links = {"intra": (machine.intra,) * 2, "inter": (machine.inter_send, machine.inter_receive)}
            send, receive = links.get(kind, (machine.host,) * 2)
            port = {"send": send, "receive": receive}
            return max((port[way].seconds(60.0 * n) for (k, way, _), n in copies.items() if k == kind), default=0.0)

        assert inside_ML[m, layer] == pytest.approx(slowest("intra"))
        assert network_ML[m, layer] == pytest.approx(slowest("inter"))
        assert pool_ML[m, layer] == pytest.approx(slowest("host"))


def test_resident_replicas_are_pushed_when_they_arrive_and_return_gradients_when_they_leave():
    plan, demand = two_nodes(replica=(1, 0), quota=4, resident=True, micro_batches=3)
    assert predict(plan, demand, cluster_for(plan), EXPERT).copy_bytes == 60 + 120
    shared = replace(plan, resident=False)
    assert predict(shared, demand, cluster_for(plan), EXPERT).copy_bytes == 3 * (60 + 60 + 120)
    replica_MLRB = plan.replica_MLRB.copy()
    replica_MLRB[1, 0, 1, 0] = 3
    forward, backward, gradients = pushed_copies(replace(plan, replica_MLRB=replica_MLRB))
    assert forward[:, 0, 1, 0].tolist() == [True, True, True]
    assert gradients[:, 0, 1, 0].tolist() == [True, True, True]
    assert not backward.any()


def test_a_resident_replica_that_changes_its_slot_is_still_there():
    plan, _ = planned_step(np.random.default_rng(0), nodes=1, per_node=2, micro_batches=2, layers=1, slots=2)
    replica_MLRB = np.full_like(plan.replica_MLRB, -1)
    replica_MLRB[:, 0, 0] = [[2, 3], [1, 2]]
    plan = replace(plan, resident=True, replica_MLRB=replica_MLRB)
    forward, _, gradients = pushed_copies(plan)
    assert forward[:, 0, 0].tolist() == [[True, True], [True, False]]
    assert gradients[:, 0, 0].tolist() == [[False, True], [True, True]]


def test_relocation_takes_the_busiest_rank():
    plan, demand = two_nodes()
    swapped = plan.previous.with_home_ranks(np.array([[1, 0, 2, 3]], np.int16)).physical_to_logical_map
    inside = predict(replace(plan, physical_to_logical_map=swapped), demand, cluster_for(plan), EXPERT)
    assert inside.relocation == 420 / 10
    assert inside.moved_bytes == 2 * 420
    elsewhere = plan.previous.with_home_ranks(np.array([[2, 1, 0, 3]], np.int16))
    crossed = replace(plan, physical_to_logical_map=elsewhere.physical_to_logical_map)
    assert predict(crossed, demand, cluster_for(plan), EXPERT).relocation == 420 / 1  # receiving is the slower side
    waiting = cluster_for(plan, inter_receive=Link(latency_seconds=3, bytes_per_second=1))
    assert predict(crossed, demand, waiting, EXPERT).relocation == 423


def test_a_gemm_table_makes_small_pieces_expensive():
    plan, demand = planned_step(np.random.default_rng(1), nodes=1, per_node=1, experts_per_rank=2, layers=1, slots=0)
    counts_SLE = np.zeros_like(demand.counts_SLE)
    counts_SLE[0, 0], counts_SLE[1, 0] = [8, 8], [16, 0]
    demand = plan.scheduled(replace(demand, counts_SLE=counts_SLE))
    cluster = cluster_for(plan, gemm_table=((8, 60.0), (16, 180.0)))
    assert compute_seconds(plan, demand, cluster_for(plan), EXPERT)[:, 0].tolist() == [16.0, 16.0, 0.0]
    assert compute_seconds(plan, demand, cluster, EXPERT)[:, 0].tolist() == [2 * 8 * 180 / 60, 16 * 180 / 180, 0.0]


@given(st.integers(0, 2**32 - 1), st.integers(1, 4))
def test_send_once_is_a_lower_bound_of_distinct_tokens_and_above_one_kth(seed, top_k):
    experts_TLK = np.random.default_rng(seed).random((40, 2, 8)).argsort(axis=-1)[..., :top_k]
    trace = RoutingTrace.from_samples([experts_TLK], num_experts=8)
    home_LE = np.stack([np.random.default_rng(seed + i).permutation(np.repeat(np.arange(2), 4)) for i in range(2)])
    share_LR = send_once_share(co_activation(trace), home_LE.astype(np.int16), 2)
    for layer in range(2):
        ranks_TK = home_LE[layer][trace.experts_TLK[:, layer]]
        for rank in range(2):
            token_slots, distinct = (ranks_TK == rank).sum(), (ranks_TK == rank).any(axis=1).sum()
            assert 1 / top_k - 1e-9 <= share_LR[layer, rank]
            assert share_LR[layer, rank] * token_slots <= distinct + 1e-9


def test_send_once_is_exact_for_equal_and_for_disjoint_choices():
    home_LE = np.array([[0, 0, 1, 1]], np.int16)
    equal = np.zeros((1, 4, 4), np.int64)
    equal[0, :2, :2] = 6  # every token picks 0 and 1 together; nobody picks 2 or 3
    assert send_once_share(equal, home_LE, 2).tolist() == [[0.5, 1.0]]
    assert send_once_share(np.diag([6, 6, 6, 6])[None], home_LE, 2).tolist() == [[1.0, 1.0]]
    plan, demand = two_nodes()
    pairs_LEE = np.diag([10, 20, 30, 0])[None]
    once = predict(plan, demand, cluster_for(plan), EXPERT, pairs_LEE=pairs_LEE)
    assert once == predict(plan, demand, cluster_for(plan), EXPERT)


def test_what_does_not_fit_is_refused():
    plan, demand = two_nodes()
    with pytest.raises(PlanError, match="a plan for 2 x 2 ranks meets cluster 'h100x8' of 1 x 8"):
        predict(plan, demand, cluster_preset("h100x8"), EXPERT)
    with pytest.raises(PlanError, match=r"\(1, 1, 4, 4\) meets a demand of \(2, 1, 4, 4\)"):
        predict(plan, two_nodes(micro_batches=2)[1], cluster_for(plan), EXPERT)
    with pytest.raises(PlanError, match="pairs have shape"):
        predict(plan, demand, cluster_for(plan), EXPERT, pairs_LEE=np.zeros((1, 2, 2), np.int64))


def test_traffic_is_held_in_bounded_pieces(monkeypatch):
    plan, demand = planned_step(np.random.default_rng(3), layers=3)
    whole = predict(plan, demand, cluster_for(plan), EXPERT)
    monkeypatch.setattr("relibra.planning.traffic.traffic._TRAFFIC_BYTES", 1)
    assert predict(plan, demand, cluster_for(plan), EXPERT) == whole
