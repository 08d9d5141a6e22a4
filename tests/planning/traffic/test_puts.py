"""Puts per expert against a walk over the split, and against the formula and counts of Perseus' pattern."""

import numpy as np
import pytest
from hypothesis import given

from relibra.planning.traffic.puts import expert_puts
from relibra.planning.traffic.split import split_tokens
from relibra.routing.readers import open_trace
from tests.planning.cases import DATA
from tests.planning.plans import planned_steps


def arrays_of(plan, demand, m):
    """Return the arguments of `expert_puts` for all layers of a micro-batch."""
    return demand.tokens_MLRE[m], plan.home_LE, plan.replica_MLRB[m], plan.quota_MLRB[m], plan.ranks_per_node


@given(planned_steps())
def test_puts_are_the_instances_that_get_rows(step):
    plan, demand = step
    for m in range(len(demand.tokens_MLRE)):
        puts_LRR = expert_puts(*arrays_of(plan, demand, m))
        for layer, found_RR in enumerate(puts_LRR):
            at = (m, layer)
            arrays = (demand.tokens_MLRE[at], plan.home_LE[layer], plan.replica_MLRB[at], plan.quota_MLRB[at])
            split, expected_RR = split_tokens(*arrays, plan.ranks_per_node), np.zeros_like(found_RR)
            for source, instance in np.argwhere(split.tokens_RI > 0):
                expected_RR[source, split.rank_I[instance]] += 1
            np.testing.assert_array_equal(found_RR, expected_RR)


def puts_to_other_nodes(tokens_RE, per_node):
    """Return the puts of each source between nodes, experts at home by number."""
    R, E = tokens_RE.shape
    nothing_LRB, home_LE = np.zeros((1, R, 0), np.int32), np.repeat(np.arange(R), E // R)[None]
    [puts_RR] = expert_puts(tokens_RE[None], home_LE, nothing_LRB, nothing_LRB, per_node)
    node_R = np.arange(R) // per_node
    return (puts_RR * (node_R[:, None] != node_R)).sum(axis=1)


@pytest.mark.parametrize(("R", "G", "E"), [(16, 4, 64), (16, 4, 32), (32, 8, 128), (8, 8, 64)])
def test_full_batches_put_to_every_expert_elsewhere(R, G, E):
    assert puts_to_other_nodes(np.ones((R, E), np.int32), G).tolist() == [(R - G) * E // R] * R


@pytest.mark.skipif(not DATA.is_dir(), reason=f"recorded routes of real models are not there ({DATA})")
@pytest.mark.parametrize(
    ("file", "E", "recorded"),
    [
        ("deepseek_v2_lite_esft_topk.npz", 64, (19.8, 35.6, 45.7, 47.8)),
        ("gpt_oss_20b_decode_topk.npz", 32, (9.7, 15.0, 17.3, 21.4)),
    ],
)
def test_recorded_routes_put_less_in_small_batches(file, E, recorded):
    """8, 32, 128 and 512 tokens of a source on 16 ranks, 4 per node: 600 draws, where the figures had 50."""
    trace, rng = open_trace(DATA / file, E), np.random.default_rng(1)
    found = []
    for tokens in (8, 32, 128, 512):
        puts = []
        for _ in range(600):
            first, layer = rng.integers(trace.num_rows - tokens), rng.integers(trace.num_layers)
            tokens_RE = np.zeros((16, E), np.int32)
            tokens_RE[rng.integers(16)] = np.bincount(
                np.asarray(trace.experts_TLK[first : first + tokens, layer]).ravel(), minlength=E
            )
            puts.append(puts_to_other_nodes(tokens_RE, 4).sum())
        found.append(np.mean(puts))
    assert found == sorted(found)
    assert found == pytest.approx(recorded, rel=0.05)
    assert found[-1] <= 12 * E / 16
