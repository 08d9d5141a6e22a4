"""Chunks are whole and consecutive, nobody's token-slots get lost, and quotas are met as closely as chunks allow."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from relibra.planning.traffic.rank_tables import chunked_split
from relibra.planning.traffic.split import split_tokens
from tests.planning.plans import planned_steps

chunks = st.sampled_from([1, 2, 3, 5, 16])


def splits(plan, demand, chunk):
    """Yield (the split of the plan, the same in chunks) for each micro-batch and layer."""
    for m, layer in np.ndindex(plan.replica_MLRB.shape[:2]):
        replica_RB, quota_RB = plan.replica_MLRB[m, layer], plan.quota_MLRB[m, layer]
        tokens_RE = demand.tokens_MLRE[m, layer]
        split = split_tokens(tokens_RE, plan.home_LE[layer], replica_RB, quota_RB, plan.ranks_per_node)
        yield tokens_RE, split, chunked_split(split, chunk)


def slow_split(supply_R, quota_I, chunk):
    """Number the token-slots by source, cut them into chunks, and deal these out one by one."""
    sources = [rank for rank, supply in enumerate(supply_R) for _ in range(supply)]
    pieces = [sources[begin : begin + chunk] for begin in range(0, len(sources), chunk)]
    shares = [quota // chunk for quota in quota_I]
    while sum(shares) < len(pieces):
        short = [quota - share * chunk for quota, share in zip(quota_I, shares, strict=True)]
        shares[short.index(max(short))] += 1
    result = np.zeros((len(supply_R), len(quota_I)), dtype=int)
    for instance, share in enumerate(shares):
        for piece in pieces[:share]:
            for source in piece:
                result[source, instance] += 1
        pieces = pieces[share:]
    return result.tolist()


@given(planned_steps(max_slots=3), chunks)
def test_each_expert_is_split_as_the_slow_reference_does(step, chunk):
    for _, split, chunked in splits(*step, chunk):
        for expert in np.unique(split.expert_I):
            own = split.expert_I == expert
            tokens_RI = split.tokens_RI[:, own]
            expected = slow_split(tokens_RI.sum(axis=1).tolist(), tokens_RI.sum(axis=0).tolist(), chunk)
            assert chunked.tokens_RI[:, own].tolist() == expected


@given(planned_steps(max_slots=3), chunks)
def test_no_token_slot_is_lost_and_the_last_chunk_is_short(step, chunk):
    for tokens_RE, split, chunked in splits(*step, chunk):
        assert (chunked.tokens_RI >= 0).all()
        for expert in range(tokens_RE.shape[1]):
            own = np.flatnonzero(split.expert_I == expert)
            assert chunked.tokens_RI[:, own].sum(axis=1).tolist() == tokens_RE[:, expert].tolist()
            busy_I = [quota for quota in chunked.tokens_RI[:, own].sum(axis=0).tolist() if quota]
            assert all(quota % chunk == 0 for quota in busy_I[:-1])
            planned_I = split.tokens_RI[:, own].sum(axis=0)
            assert (abs(chunked.tokens_RI[:, own].sum(axis=0) - planned_I) < 2 * chunk).all()


@given(planned_steps(max_slots=3), chunks)
def test_an_instance_takes_consecutive_token_slots(step, chunk):
    """In the order of (source, position), the instances of an expert take one stretch after another."""
    for _, split, chunked in splits(*step, chunk):
        for expert in np.unique(split.expert_I):
            tokens_RI = chunked.tokens_RI[:, split.expert_I == expert]
            owner = np.repeat(np.tile(np.arange(tokens_RI.shape[1]), len(tokens_RI)), tokens_RI.ravel())
            assert (np.diff(owner) >= 0).all()


@given(planned_steps(max_slots=3))
def test_chunks_of_one_meet_the_quotas(step):
    for _, split, chunked in splits(*step, 1):
        assert (chunked.tokens_RI.sum(axis=0) == split.tokens_RI.sum(axis=0)).all()
        assert (chunked.expert_I == split.expert_I).all()
        assert (chunked.rank_I == split.rank_I).all()


@given(planned_steps(max_slots=3))
def test_one_big_chunk_stays_together(step):
    for _, split, chunked in splits(*step, 1 << 20):
        for expert in np.unique(split.expert_I):
            assert (chunked.tokens_RI[:, split.expert_I == expert].sum(axis=0) > 0).sum() <= 1
