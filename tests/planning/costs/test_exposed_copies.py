"""Waits for copies in the objective, against the walk of the simulator over every rank and event."""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relibra.cluster import Link
from relibra.planning.costs.layer_costs import LayerCosts, layer_costs
from relibra.simulation.cost_model import Gathers
from relibra.simulation.step.passes import backward_pass, forward_pass
from relibra.simulation.step.stage_costs import StageCosts
from tests.planning.costs.by_hand import EXPERT, cluster_for
from tests.planning.plans import planned_step, planned_steps


def simulated_waits(costs, attention_M, overlap=True):
    """Return the seconds that ranks wait for copies, forward and backward, in the simulator; the same on every rank."""
    M, L, R = costs.home_MLR.shape
    zeros_MR, none = np.zeros((M, R)), Gathers(0.0, 0.0, 0.0)
    stage = StageCosts(
        **{field.name: getattr(costs, field.name) for field in fields(LayerCosts)},
        layer_ids=np.arange(L),
        rows_MR=zeros_MR,
        attention_MR=np.repeat(attention_M[:, None], R, axis=1),
        first_MR=zeros_MR,
        last_MR=zeros_MR,
        gather_seconds=none,
        gather_bytes=none,
        handover_M=np.zeros(M),
        load_MLR=np.zeros((M, L, R), dtype=np.int64),
        flops=0.0,
        row_bytes=4,
        gate_bytes=2,
    )
    passes = forward_pass(stage, overlap=overlap), backward_pass(stage, overlap=overlap)
    return [float(one.terms["copies"].sum()) for one in passes]


def without_last_push_again(costs):
    """Return the costs without pushes again in the last layer that has any: the simulator leaves them out too."""
    again, L = costs.push_again, costs.push_again.seconds_ML.shape[1]
    last_M = L - 1 - np.argmax(again.takes_part_MLR.any(axis=2)[:, ::-1], axis=1)
    pushed_ML = np.arange(L) != last_M[:, None]
    left = {"seconds_ML": again.seconds_ML * pushed_ML, "network_ML": again.network_ML * pushed_ML}
    return replace(costs, push_again=replace(again, **left, takes_part_MLR=again.takes_part_MLR & pushed_ML[..., None]))


def predicted_waits(costs, attention_M):
    backward_ML = costs.exposed_copies_ML(attention_M, without_queue=True)
    return [float((costs.exposed_copies_ML(attention_M) - backward_ML).sum()), float(backward_ML.sum())]


@given(
    planned_steps(max_slots=3),
    st.sampled_from(["flat", "hierarchical"]),
    st.sampled_from([0.0, 3.0, 30.0, 200.0]),
    st.sampled_from([0.2, 2.0, 50.0]),
)
def test_waits_are_those_of_the_simulator(step, dispatch, attention, network):
    plan, demand = step
    links = {
        name: Link(latency_seconds=0.1, bytes_per_second=network * share)
        for name, share in (("inter_send", 2), ("inter_receive", 1))
    }
    machine = replace(cluster_for(plan, **links), layer_seconds=1.0, dispatch=dispatch)
    costs = without_last_push_again(layer_costs(replace(plan, dispatch=dispatch), demand, machine, EXPERT))
    attention_M = np.full(len(demand.tokens_MLRE), attention)
    forward, backward = predicted_waits(costs, attention_M)
    simulated = simulated_waits(costs, attention_M)
    assert forward == pytest.approx(simulated[0], rel=1e-9, abs=1e-6)
    above = costs.gradients.seconds_ML[:, 1:] >= 2 * costs.home_MLR[:, 1:].max(axis=2)
    if (costs.push_again.takes_part_MLR.any(axis=2)[:, :-1].all() and above.all()) or costs.resident:
        assert backward == pytest.approx(simulated[1], rel=1e-9, abs=1e-6)
    else:  # a push again begins earlier than the objective takes it to: below a layer without copies, or while experts
        # at home still run
        copies = float((costs.push.seconds_ML + costs.push_again.seconds_ML + costs.gradients.seconds_ML).sum())
        assert simulated[1] - 1e-6 <= backward <= simulated[1] + 0.2 * copies


def test_without_overlap_ranks_wait_for_every_copy():
    plan, demand = planned_step(np.random.default_rng(0), slots=2)
    costs = layer_costs(plan, demand, cluster_for(plan, hides_copies=False), EXPERT)
    attention_M = np.full(len(demand.tokens_MLRE), 5.0)
    assert sum(simulated_waits(costs, attention_M, overlap=False)) == pytest.approx(
        costs.exposed_copies_ML(attention_M).sum()
    )
