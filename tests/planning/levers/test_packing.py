"""Packing: limits of every rank hold, nothing gets lost, and the cost falls."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relibra.planning.levers.limits import ScheduleLimits
from relibra.planning.levers.packing import pack_samples
from tests.examples import few_and_many
from tests.planning.levers.schedules import (
    assert_within_limits,
    bins_of,
    most_squares,
    no_limits,
    scheduled_demands,
)


def node_loads(demand, per_node):
    """Expert e is at home on rank e // 2."""
    S, L = demand.counts_SLE.shape[:2]
    return demand.counts_SLE.reshape(S, L, -1, 2 * per_node).sum(axis=3).astype(np.float32)


def packing_cost(load_SLN, attention_S, micro_batch_S, rank_S):
    """Add up the fullest node of each layer and the longest attention of a rank, micro-batch by micro-batch."""
    cost = 0.0
    for m in range(int(micro_batch_S.max(initial=-1)) + 1):
        members = np.flatnonzero(micro_batch_S == m)
        cost += load_SLN[members].sum(axis=0, dtype=np.float64).max(axis=1, initial=0).sum()
        cost += max((attention_S[members[rank_S[members] == r]].sum() for r in set(rank_S[members])), default=0.0)
    return cost


@few_and_many(200, 2000)
def test_packing_keeps_the_limits_of_every_rank(examples):
    @settings(max_examples=examples)
    @given(scheduled_demands(), st.booleans(), st.sampled_from([0.0, 0.02, 3.0]))
    def check(case, stated, price):
        demand, limit, per_node = case
        micro_batch_S, rank_S, length_S = demand.micro_batch_S, demand.rank_S, demand.length_S
        M, _, R, _ = demand.tokens_MLRE.shape
        limits = ScheduleLimits.of_demand(demand, rank_tokens=limit if stated else None)
        open_M = np.arange(M) != 1
        load_SLN, attention_S = node_loads(demand, per_node), price * length_S**1.5
        packed_S, packed_rank_S = pack_samples(
            load_SLN,
            micro_batch_S,
            rank_S,
            length_S,
            R,
            open_M,
            limits=limits,
            attention_S=attention_S,
            proposals=2000,
            seed=1,
        )
        before, after = bins_of(micro_batch_S, rank_S, length_S), bins_of(packed_S, packed_rank_S, length_S)
        most = limit if stated else max((sum(lengths) for lengths in before.values()), default=0)
        assert_within_limits(after, most, most_squares(before, most))
        assert before.keys() <= after.keys(), "a rank had samples and now waits for nothing"
        assert open_M[packed_S[packed_S != micro_batch_S]].all()
        assert ((packed_S < 0) == (micro_batch_S < 0)).all()
        assert packed_S.max(initial=-1) < M
        assert ((packed_rank_S >= 0) & (packed_rank_S < R)).all()
        kept, given_S = packed_S >= 0, micro_batch_S >= 0
        largest = np.bincount(micro_batch_S[given_S], length_S[given_S]).max(initial=0)
        assert np.bincount(packed_S[kept], length_S[kept]).max(initial=0) <= largest * 1.02 + 1e-6
        old_cost = packing_cost(load_SLN, attention_S, micro_batch_S, rank_S)
        assert packing_cost(load_SLN, attention_S, packed_S, packed_rank_S) <= old_cost * (1 + 1e-6) + 1e-3

    check()


def test_packing_mixes_what_complements_each_other():
    """Two kinds of samples, dealt pure: mixing them evens both micro-batches."""
    load_SLN = np.zeros((8, 1, 2), dtype=np.float32)
    load_SLN[:4, 0, 0] = load_SLN[4:, 0, 1] = 10
    micro_batch_S, attention_S = np.repeat([0, 1], 4).astype(np.int32), np.zeros(8)
    given_ranks, length_S = np.tile(np.arange(4), 2), np.full(8, 10)
    packed_S, rank_S = pack_samples(
        load_SLN,
        micro_batch_S,
        given_ranks,
        length_S,
        4,
        np.ones(2, dtype=bool),
        limits=ScheduleLimits(rank_tokens=10, rank_attention=100, micro_batch_tokens=40.0),
        attention_S=attention_S,
        proposals=2000,
        seed=0,
    )
    assert packing_cost(load_SLN, attention_S, micro_batch_S, given_ranks) == 80
    assert packing_cost(load_SLN, attention_S, packed_S, rank_S) == 40
    assert [sorted(rank_S[packed_S == m].tolist()) for m in (0, 1)] == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize(("price", "mixed"), [(0.0, True), (100.0, False)])
def test_packing_weighs_attention_against_even_nodes(price, mixed):
    """Long samples share a micro-batch, and all use node 0: to even the nodes is to let more ranks wait for them."""
    length_S = np.array([20] * 4 + [19] * 4)
    load_SLN = np.zeros((8, 1, 2), dtype=np.float32)
    load_SLN[:4, 0, 0], load_SLN[4:, 0, 1] = 20, 19
    attention_S = price * (length_S == 20).astype(np.float64)
    packed_S, _ = pack_samples(
        load_SLN,
        np.repeat([0, 1], 4).astype(np.int32),
        np.tile(np.arange(4), 2),
        length_S,
        4,
        np.ones(2, dtype=bool),
        limits=no_limits(),
        attention_S=attention_S,
        proposals=2000,
        seed=0,
    )
    assert (len(set(packed_S[:4].tolist())) == 2) == mixed
