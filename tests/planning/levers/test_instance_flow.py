"""Split over given instances: the optimum of a linear program, and its proof."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from relibra.planning.levers.instance_flow import (
    assign_tokens,
    empty_instances,
    list_instances,
    lower_busiest_rank,
)
from tests.planning.splits import lowest_busiest_rank


@st.composite
def placements(draw):
    nodes, per_node, per_rank, slots = (draw(st.integers(1, most)) for most in (3, 3, 3, 2))
    R, E = nodes * per_node, nodes * per_node * per_rank
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    source_NE = rng.poisson(rng.lognormal(2, draw(st.sampled_from([0.0, 1.5, 3.0])), E), (nodes, E)).astype(np.int64)
    home_E = rng.permutation(np.repeat(np.arange(R), per_rank))
    held_RB = np.full((R, slots), -1)
    for r in range(R):
        away = np.flatnonzero(home_E != r)
        number = min(len(away), rng.integers(slots + 1))
        held_RB[r, :number] = rng.choice(away, number, replace=False)
    return source_NE, home_E, held_RB, per_node


@given(placements(), st.booleans(), st.sampled_from([1.0, 1.1, 2.0]))
def test_the_busiest_rank_is_at_the_ceiling_or_at_the_optimum(case, local, share):
    source_NE, home_E, held_RB, per_node = case
    load_E = source_NE.sum(axis=0)
    ceiling = int(np.ceil(share * load_E.sum() / len(held_RB)))
    instances = empty_instances(len(load_E), len(held_RB))
    list_instances(home_E, held_RB, instances)
    assign_tokens(load_E, source_NE if local else source_NE[:0], home_E, instances)
    before = instances.load_R.max()
    top = lower_busiest_rank(instances, ceiling, per_node)
    assert (instances.tokens_ER.sum(axis=1) == load_E).all()
    assert (instances.tokens_ER >= 0).all()
    assert (instances.tokens_ER.sum(axis=0) == instances.load_R).all()
    holds_ER = np.zeros(instances.tokens_ER.shape, dtype=bool)
    holds_ER[np.arange(len(load_E)), home_E] = True
    for r, held_B in enumerate(held_RB):
        holds_ER[held_B[held_B >= 0], r] = True
    assert (instances.tokens_ER[~holds_ER] == 0).all()
    assert top == instances.load_R.max() <= before
    if top > ceiling:
        lowest = lowest_busiest_rank(load_E, home_E, held_RB)
        assert top <= np.ceil(lowest - 1e-6)
        closed = np.flatnonzero(instances.closed_R)  # the proof: what is there has no instance anywhere else
        assert not instances.tokens_ER[holds_ER[:, ~instances.closed_R].any(axis=1)][:, closed].any()
        assert top == -(-instances.load_R[closed].sum() // len(closed))


def test_tokens_stay_on_their_node_where_an_instance_is():
    source_NE = np.array([[10, 0], [20, 5]])
    instances = empty_instances(2, 4)
    home_E, held_RB = np.array([0, 3]), np.array([[-1], [-1], [0], [0]])
    list_instances(home_E, held_RB, instances)
    assign_tokens(source_NE.sum(axis=0), source_NE, home_E, instances)
    assert instances.tokens_ER.tolist() == [[10, 0, 20, 0], [0, 0, 0, 5]]
    assert lower_busiest_rank(instances, 15, 2) == 15
    assert instances.tokens_ER.tolist() == [[10, 0, 15, 5], [0, 0, 0, 5]]
