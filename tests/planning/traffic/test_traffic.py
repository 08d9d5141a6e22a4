import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from relibra import RoutingTrace
from relibra.planning.traffic.traffic import link_rows, send_once_share
from relibra.routing.statistics import co_activation


def link_rows_reference(traffic_LRR, share_LR, ranks_per_node):
    """Do the same as `link_rows` with whole arrays, for the rows."""
    R = traffic_LRR.shape[1]
    node_R = np.arange(R) // ranks_per_node
    same_RR = node_R[:, None] == node_R[None, :]
    rows_LRR = traffic_LRR * share_LR[:, None, :]
    links = (rows_LRR * (same_RR & ~np.eye(R, dtype=bool)), rows_LRR * ~same_RR)
    return np.stack([np.stack([rows.sum(axis=2), rows.sum(axis=1)], axis=1) for rows in links])


@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(1, 3))
def test_link_rows_equal_their_reference(seed, num_nodes, per_node):
    rng = np.random.default_rng(seed)
    R = num_nodes * per_node
    traffic_LRR, share_LR = rng.integers(0, 5, (2, R, R)), rng.random((2, R))
    rows_2L2R, slots_2L2R, peers_2L2R = link_rows(traffic_LRR, share_LR, per_node)
    ones_LR = np.ones((2, R))
    np.testing.assert_array_equal(peers_2L2R, link_rows_reference(np.sign(traffic_LRR), ones_LR, per_node))
    np.testing.assert_allclose(rows_2L2R, link_rows_reference(traffic_LRR, share_LR, per_node))
    np.testing.assert_array_equal(slots_2L2R, link_rows_reference(traffic_LRR, np.ones((2, R)), per_node))


@given(st.integers(0, 2**32 - 1), st.integers(1, 4))
def test_send_once_share_is_a_lower_bound(seed, top_k):
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
