"""Random schedules within a limit, and slow checks of schedules."""

import numpy as np
from hypothesis import strategies as st

from relibra import Demand
from relibra.planning.levers.limits import ScheduleLimits


def draw_lengths(rng, samples, limit):
    """Draw lengths of one of several kinds; some kinds exceed the limit."""
    kind = rng.integers(5)
    if kind == 0:
        return rng.integers(1, limit + 1, samples)
    if kind == 1:
        return np.full(samples, rng.integers(1, limit + 1))
    if kind == 2:
        return np.maximum(1, limit * rng.lognormal(-1.5, 1.0, samples)).astype(np.int64)
    if kind == 3:
        return rng.integers(max(1, limit // 2), 2 * limit + 1, samples)
    return np.maximum(1, limit * rng.pareto(1.5, samples) / 4).astype(np.int64)


def draw_schedule(rng, length_S, limit, num_ranks):
    """Put samples, in random order, on any rank with room in any micro-batch so far, else in a new micro-batch."""
    micro_batch_S, rank_S = np.full((2, len(length_S)), -1, dtype=np.int32)
    tokens = [[0] * num_ranks]
    for s in rng.permutation(len(length_S)):
        room = [
            (m, r)
            for m, row in enumerate(tokens)
            for r, filled in enumerate(row)
            if filled == 0 or filled + length_S[s] <= limit
        ]
        if not room:
            tokens.append([0] * num_ranks)
            room = [(len(tokens) - 1, r) for r in range(num_ranks)]
        m, r = room[rng.integers(len(room))]
        micro_batch_S[s], rank_S[s] = m, r
        tokens[m][r] += int(length_S[s])
    return micro_batch_S, rank_S, len(tokens)


@st.composite
def scheduled_demands(draw):
    """A demand under a schedule within a limit of tokens per rank, the limit, and the ranks of a node."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    nodes, per_node = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    samples, layers, limit = draw(st.integers(1, 40)), draw(st.integers(1, 3)), draw(st.integers(1, 300))
    length_S = draw_lengths(rng, samples, limit)
    micro_batch_S, rank_S, M = draw_schedule(rng, length_S, limit, nodes * per_node)
    weight_SLE = rng.lognormal(0, 1, (samples, layers, 2 * nodes * per_node))
    counts_SLE = np.stack(
        [rng.multinomial(2 * length_S, (w / w.sum(axis=1, keepdims=True))) for w in np.swapaxes(weight_SLE, 0, 1)],
        axis=1,
    )
    if draw(st.booleans()):
        micro_batch_S[rng.integers(samples)] = -1
    demand = Demand(
        counts_SLE=counts_SLE.astype(np.int32),
        layer_ids=np.arange(layers, dtype=np.int32),
        sample_ids=np.arange(samples),
        top_k=2,
    )
    return demand.with_schedule(micro_batch_S, rank_S, nodes * per_node, M), limit, per_node


def bins_of(micro_batch_S, rank_S, length_S):
    """Return the lengths of each (micro-batch, rank) by hand."""
    bins = {}
    for s, (m, r) in enumerate(zip(micro_batch_S.tolist(), rank_S.tolist(), strict=True)):
        if m >= 0:
            bins.setdefault((m, r), []).append(int(length_S[s]))
    return bins


def assert_within_limits(bins, most_tokens, most_squares=None):
    """Only a sample that is alone on its rank may exceed the limits."""
    for where, lengths in bins.items():
        assert len(lengths) == 1 or sum(lengths) <= most_tokens, where
        assert most_squares is None or len(lengths) == 1 or sum(n * n for n in lengths) <= most_squares, where


def most_squares(bins, most_tokens):
    """Return the attention of the given rank with most, of those within the limit of tokens."""
    return max((sum(n * n for n in lengths) for lengths in bins.values() if sum(lengths) <= most_tokens), default=0)


def no_limits():
    return ScheduleLimits(rank_tokens=1 << 40, rank_attention=1 << 50, micro_batch_tokens=np.inf)
