from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from relibra import Demand, PlanError
from relibra.cluster import Link, cluster_preset
from relibra.planning.costs.copies import pushed_copies
from relibra.planning.costs.prediction import predict
from relibra.planning.traffic.split import split_tokens
from tests.planning.costs.by_hand import EXPERT, cluster_for
from tests.planning.plans import planned_step, planned_steps


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
            exchange += (2 + expert.bytes_per_value / expert.row_bytes) * max(nvlink, out, into)  # rows, gate weights
    return compute, exchange, slots, sent


def attention_reference(plan, demand, cluster, expert):
    """Walk over every micro-batch, rank, sample, token and layer, in plain Python."""
    seconds = 0.0
    for m in range(len(demand.tokens_MLRE)):
        flops_R = [0.0] * plan.num_ranks
        for s in np.flatnonzero(plan.micro_batch_S == m):
            for position in range(int(demand.counts_SLE[s, 0].sum()) // demand.top_k):
                flops_R[plan.rank_S[s]] += 2 * 4 * expert.hidden**2 + 4 * expert.hidden * (position + 1)
        seconds += 3 * len(plan.layer_ids) * max(flops_R) / cluster.flops_per_second
    return seconds


@given(planned_steps())
def test_prediction_equals_its_reference(step):
    plan, demand = step[0], replace(step[1], top_k=2)
    cluster = cluster_for(plan)
    prediction = predict(plan, demand, cluster, EXPERT)
    compute, exchange, slots, sent = predict_reference(plan, demand, cluster, EXPERT)
    assert prediction.compute == pytest.approx(compute)
    assert prediction.exchange == pytest.approx(exchange)
    assert prediction.cross_node_token_slots == slots
    assert prediction.bytes.rows.total == pytest.approx(sent)
    assert prediction.bytes.moves.total == plan.num_moved * 14 * 30
    assert prediction.as_dict()["total"] == prediction.total
    attention = attention_reference(plan, demand, cluster, EXPERT)
    assert prediction.attention == pytest.approx(attention)
    assert prediction.total == pytest.approx(compute + attention + exchange + prediction.copies + prediction.relocation)


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
        group_M=None,
        bound_ML=np.ones((micro_batches, 1), np.int64),
    )
    return plan, plan.scheduled(demand)


def test_a_case_by_hand():
    plan, demand = two_nodes()
    prediction = predict(plan, demand, cluster_for(plan), EXPERT)
    assert prediction.compute == 30 * 3 * 60 / 180
    # Inside: 20 rows of 4 bytes at 10 B/s, 8 s. Between: 30 rows, 60 s to send at 2 B/s, 120 s to receive at 1 B/s.
    # Rows go four times, gate weights of 2 bytes twice.
    assert prediction.exchange == 4 * 120 + 2 * 60
    assert prediction.cross_node_token_slots == 30
    sent = prediction.bytes
    assert sent.rows == (4 * 20 * 4, 4 * 30 * 4)
    assert (prediction.copies, prediction.relocation) == (0, 0)
    assert (sent.weights.total, sent.gradients.total, sent.moves.total) == (0, 0, 0)
    slow = cluster_for(plan, intra=Link(latency_seconds=7, bytes_per_second=0.5))
    assert predict(plan, demand, slow, EXPERT).exchange == 4 * (7 + 160) + 2 * (7 + 80)


def test_homes_send_weights_and_receive_gradients():
    plan, demand = two_nodes(replica=(1, 0), quota=4)  # expert 0 copied to rank 1, on the node of its home
    sent = predict(plan, demand, cluster_for(plan), EXPERT).bytes  # weights of the last layer are not pushed again
    assert (sent.weights, sent.gradients) == ((60, 0), (60, 0))
    assert predict(plan, demand, cluster_for(plan), EXPERT).copies == 0  # rows take longer, on other links
    waits = cluster_for(plan, hides_copies=False)
    assert predict(plan, demand, waits, EXPERT, attention_seconds=100.0).copies == (60 + 60 + 60) / 10
    plan, demand = two_nodes(replica=(1, 2), quota=4)  # expert 2 lives on the other node
    sent = predict(plan, demand, cluster_for(plan), EXPERT).bytes
    assert (sent.weights, sent.gradients) == ((0, 60), (0, 60))
    # In through the replica's NIC at 1 B/s, and the gradient in through the home's; sending takes half as long.
    assert predict(plan, demand, waits, EXPERT).copies == (60 + 60 + 60) / 1
    fast_in = cluster_for(plan, inter_receive=Link(latency_seconds=0, bytes_per_second=1e9), hides_copies=False)
    assert predict(plan, demand, fast_in, EXPERT).copies == (60 + 60 + 60) / 2
    assert predict(plan, demand, cluster_for(plan), EXPERT).cross_node_token_slots == 26


def test_resident_replicas_are_pushed_once_and_return_once():
    plan, demand = two_nodes(replica=(1, 0), quota=4, resident=True, micro_batches=3)
    sent = predict(plan, demand, cluster_for(plan), EXPERT).bytes
    assert (sent.weights.total, sent.gradients.total) == (60, 60)
    shared = replace(plan, resident=False)
    sent = predict(shared, demand, cluster_for(plan), EXPERT).bytes
    assert (sent.weights.total, sent.gradients.total) == (3 * 60, 3 * 60)
    replica_MLRB = plan.replica_MLRB.copy()
    replica_MLRB[1, 0, 1, 0] = 3
    forward, backward, gradients = pushed_copies(replace(plan, replica_MLRB=replica_MLRB))
    assert forward[:, 0, 1, 0].tolist() == [True, True, True]
    assert gradients[:, 0, 1, 0].tolist() == [True, True, True]
    assert not backward.any()
    in_groups = replace(plan, group_M=np.array([0, 1, 1], np.int32))  # an optimizer step after the first micro-batch
    forward, _, gradients = pushed_copies(in_groups)
    assert forward[:, 0, 1, 0].tolist() == [True, True, False]
    assert gradients[:, 0, 1, 0].tolist() == [True, False, True]


def test_relocation_takes_the_busiest_rank():
    plan, demand = two_nodes()
    swapped = plan.previous.with_home_ranks(np.array([[1, 0, 2, 3]], np.int16)).physical_to_logical_map
    inside = predict(replace(plan, physical_to_logical_map=swapped), demand, cluster_for(plan), EXPERT)
    assert inside.relocation == 420 / 10
    assert inside.bytes.moves == (2 * 420, 0)
    elsewhere = plan.previous.with_home_ranks(np.array([[2, 1, 0, 3]], np.int16))
    crossed = replace(plan, physical_to_logical_map=elsewhere.physical_to_logical_map)
    assert predict(crossed, demand, cluster_for(plan), EXPERT).relocation == 420 / 1  # receiving is the slower side
    waiting = cluster_for(plan, inter_receive=Link(latency_seconds=3, bytes_per_second=1))
    assert predict(crossed, demand, waiting, EXPERT).relocation == 423


def test_traffic_is_held_in_bounded_pieces(monkeypatch):
    plan, demand = planned_step(np.random.default_rng(3), layers=3)
    whole = predict(plan, demand, cluster_for(plan), EXPERT)
    monkeypatch.setattr("relibra.planning.traffic.traffic._TRAFFIC_BYTES", 1)
    assert predict(plan, demand, cluster_for(plan), EXPERT) == whole


def test_pairs_of_disjoint_choices_change_nothing():
    plan, demand = two_nodes()
    once = replace(demand, pairs_LEE=np.diag([10, 20, 30, 0])[None])
    assert predict(plan, once, cluster_for(plan), EXPERT) == predict(plan, demand, cluster_for(plan), EXPERT)


def test_what_does_not_fit_is_refused():
    plan, demand = two_nodes()
    with pytest.raises(PlanError, match="a plan for 2 x 2 ranks does not fit cluster 'h100x8' of 1 x 8"):
        predict(plan, demand, cluster_preset("h100x8"), EXPERT)
    with pytest.raises(PlanError, match=r"\(1, 1, 1, 4, 4\) does not fit a demand of \(2, 2, 1, 4, 4\)"):
        predict(plan, two_nodes(micro_batches=2)[1], cluster_for(plan), EXPERT)


def test_gathered_long_samples_cost_attention():
    """Same tokens on every rank; one rank has them in one sample: its attention alone takes longer."""
    plan, demand = two_nodes(micro_batches=5)
    counts_SLE = np.zeros((5, 1, 4), np.int32)
    counts_SLE[:, 0, 0] = [40, 10, 10, 10, 10]
    demand = replace(demand, counts_SLE=counts_SLE, top_k=1)
    seconds = {}
    for name, rank_S in {"long alone": [0, 1, 1, 1, 1], "mixed": [0, 0, 1, 1, 1]}.items():
        scheduled = demand.with_schedule(np.zeros(5, int), np.array(rank_S), 4, 5)
        made = replace(plan, micro_batch_S=scheduled.micro_batch_S, rank_S=scheduled.rank_S)
        seconds[name] = predict(made, scheduled, cluster_for(plan), EXPERT).attention
    # 180 flops per second; 32 flops per token in projections, 8 per pair in scores, times 3 with the backward pass
    assert seconds["long alone"] == pytest.approx(3 * (32 * 40 + 8 * 820) / 180)
    assert seconds["mixed"] == pytest.approx(3 * (32 * 50 + 8 * (820 + 55)) / 180)
