"""Hypothesis strategies for routing traces."""

import numpy as np
from hypothesis import strategies as st

from relibra import RoutingTrace
from relibra.routing.synthetic import TraceShape


def balanced_trace(shape: TraceShape) -> RoutingTrace:
    """Return round-robin routes: every run of E / gcd(E, K) tokens loads all experts equally."""
    rows = sum(shape.rows_per_sample)
    number_TK = np.arange(rows * shape.top_k).reshape(rows, shape.top_k)
    experts_TLK = np.stack([(number_TK + layer) % shape.num_experts for layer in range(shape.num_layers)], axis=1)
    samples = np.split(experts_TLK.astype(np.uint8), np.cumsum(shape.rows_per_sample)[:-1])
    return RoutingTrace.from_samples(samples, num_experts=shape.num_experts, source="synthetic, forced balance")


@st.composite
def traces(draw, max_samples=5, max_rows=7, num_experts=None):
    """Small traces of any shape: empty samples, invalid rows with illegal ids, one expert, uint16 ids."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    E = num_experts or draw(st.sampled_from([1, 2, 5, 8, 256, 257, 300]))
    K = draw(st.integers(1, min(4, E)))
    L = draw(st.integers(1, 3))
    rows = draw(st.lists(st.integers(0, max_rows), min_size=1, max_size=max_samples))
    T = sum(rows)
    experts_TLK = rng.random((T, L, E)).argsort(-1)[..., :K].astype(np.uint8 if E <= 256 else np.uint16)
    valid_T = rng.random(T) < 0.8
    experts_TLK[~valid_T] = rng.integers(np.iinfo(experts_TLK.dtype).max + 1, size=experts_TLK[~valid_T].shape)
    S = len(rows)
    trace = RoutingTrace(
        experts_TLK=experts_TLK,
        offsets=np.concatenate([[0], np.cumsum(rows)]).astype(np.int64),
        valid_T=valid_T,
        layer_ids=np.sort(rng.choice(50, size=L, replace=False)).astype(np.int32),
        num_experts=E,
        sample_ids=rng.integers(1000, size=S),
        group_ids=rng.integers(-1, 3, size=S),
        prompt_lengths=np.array([rng.integers(n + 1) for n in rows], dtype=np.int64),
        weight_versions=rng.integers(5, size=S),
        token_hash_T=rng.integers(1 << 16, size=T).astype(np.uint16) if draw(st.booleans()) else None,
        group_names=("a", "b", "c"),
        source="made up",
    )
    trace.validate()
    return trace


def assert_same(left, right):
    """Compare two traces field by field, bit by bit."""
    for name, value in vars(left).items():
        other = getattr(right, name)
        if isinstance(value, np.ndarray):
            assert value.dtype == other.dtype, name
            assert np.array_equal(value, other), name
        else:
            assert value == other, name
