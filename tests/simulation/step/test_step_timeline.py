"""Timelines of simulated steps: causes before effects, the same sums as the step, and the order of a real executor."""

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulation.timeline_difference import diff_timelines
from relibra import ConfigError
from relibra.planning.traffic.distinct_rows import DistinctRows
from relibra.simulation import Execution, model_shape, simulate_step, simulated_timeline
from tests.simulation.steps import random_step, without_idle_replicas

SEEDS = st.integers(0, 2**32 - 1)


@given(SEEDS, st.booleans(), st.booleans())
@settings(max_examples=25, deadline=None)
def test_no_event_comes_before_its_cause(seed, overlap, recompute):
    plan, demand, cluster, model = random_step(seed)
    stages = 1 + seed % len(plan.layer_ids)
    how = Execution(overlap=overlap, recompute_activations=recompute, pipeline_stages=stages)
    timeline = simulated_timeline(plan, demand, cluster, model, how)
    timeline.validate()
    own = defaultdict(list)
    for event in timeline.events:
        own[event.rank].append(event)
    together = defaultdict(list)
    for rank, events in own.items():
        in_turn = [event for event in events if event.stage not in ("push", "return")]
        for before, after in pairwise(in_turn):
            assert after.start >= before.start + before.seconds - 1e-9, (before, after)
        counts = defaultdict(int)
        for event in events:
            if event.stage in ("dispatch", "combine"):
                place = (
                    event.stage,
                    event.layer,
                    event.micro_batch,
                    counts[event.stage, event.layer, event.micro_batch],
                )
                counts[event.stage, event.layer, event.micro_batch] += 1
                together[rank // plan.num_ranks, place].append(event)
            if event.stage in ("push", "return"):  # a rank has seen its end before it goes on
                waited = [one for one in events if one.stage == f"wait {event.stage}" and one.layer == event.layer]
                assert any(np.isclose(one.start + one.seconds, event.start + event.seconds) for one in waited)
    for events in together.values():
        assert len(events) == plan.num_ranks
        ends = [event.start + event.seconds for event in events]
        assert max(ends) - min(ends) < 1e-9
        assert max(event.start for event in events) <= min(ends) + 1e-9  # nobody is done before the last has come


@given(SEEDS, st.booleans(), st.booleans(), st.sampled_from(["flat", "hierarchical"]))
@settings(max_examples=15, deadline=None)
def test_timeline_and_step_add_up_to_the_same(seed, overlap, counted, dispatch):
    plan, demand, cluster, model = random_step(seed)
    plan = replace(plan, dispatch=dispatch)
    how = Execution(overlap=overlap, mini_batches=1 + seed % len(plan.replica_MLRB))
    rows = None
    if counted:
        M, L, R, _ = demand.tokens_MLRE.shape
        rows_MLRR = np.random.default_rng(seed).integers(0, 5, (M, L, R, R))
        nodes_MLRN = rows_MLRR.reshape(M, L, R, plan.num_nodes, -1).max(axis=-1)
        rows = DistinctRows(ranks_MLRR=rows_MLRR, nodes_MLRN=nodes_MLRN)
    step = simulate_step(plan, demand, cluster, model, how, distinct=rows)
    timeline = simulated_timeline(plan, demand, cluster, model, how, distinct=rows)
    for stage, seconds_R in step.stage_seconds.items():
        np.testing.assert_allclose(timeline.seconds(stage), seconds_R, rtol=1e-9, atol=1e-9, err_msg=stage)
    end = max((event.start + event.seconds for event in timeline.events), default=0.0)
    assert end == pytest.approx(step.seconds - step.terms["relocation"], abs=1e-9)
    for kind in ("push", "return"):
        moved = sum(event.bytes for event in timeline.events if event.stage == kind)
        assert moved == step.sent_bytes[kind].sum()


def test_stages_of_hierarchical_dispatch_are_events_in_turn():
    plan, demand, cluster, model = random_step(4, micro_batches=1, layers=1, nodes=2, per_node=2)
    timeline = simulated_timeline(replace(plan, dispatch="hierarchical"), demand, cluster, model)
    own = [(event.stage, event.label) for event in timeline.events if event.rank == 0]
    exchanges = [(stage, label) for stage, label in own if stage.startswith(("dispatch", "combine"))]
    there = [("dispatch", "rows"), ("dispatch in node", "rows")]
    back = [("combine in node", "rows"), ("combine", "rows")]
    assert exchanges == [*there, ("dispatch", "gate weights"), *back, *there, ("combine", "gate weights"), *back]


def test_chosen_ranks_and_layers_are_a_part_of_the_whole():
    plan, demand, cluster, model = random_step(4, micro_batches=3, layers=2, nodes=2, per_node=2)
    demand = replace(demand, group_M=np.array([0, 1, 0], np.int32))
    how = Execution(pipeline_stages=2)
    whole = simulated_timeline(plan, demand, cluster, model, how)
    assert {event.rank for event in whole.events} == set(range(16))
    part = simulated_timeline(plan, demand, cluster, model, how, ranks=[9, 2], micro_batches=[2], layers=[1, 3])
    chosen = [
        event for event in whole.events if event.rank in (2, 9) and event.micro_batch == 2 and event.layer in (1, 3)
    ]
    assert list(part.events) == chosen
    assert chosen
    assert {(event.rank, event.layer) for event in part.events} == {(2, 1), (9, 3)}


def test_too_many_events_and_foreign_ranks_are_refused(monkeypatch):
    plan, demand, cluster, model = random_step(4, micro_batches=3, layers=2, nodes=2, per_node=2)
    with pytest.raises(ConfigError, match="a timeline of ranks 0 to 4: the step has ranks 0 to 3"):
        simulated_timeline(plan, demand, cluster, model, ranks=[0, 4])
    monkeypatch.setattr("relibra.simulation.step.step_timeline.MAX_EVENTS", 100)
    with pytest.raises(ConfigError, match=r"up to 864 events, where 100 are allowed: choose fewer ranks"):
        simulated_timeline(plan, demand, cluster, model)


def _record(case, folder):
    """Run one step on this rank; return its timeline, and that of log-probabilities."""
    import torch
    import torch.distributed as dist

    from relibra.parallel import execute_plan
    from relibra.replay.batch import BatchRoutes
    from tests.parallel.ranks_at_work import load, run_batch

    model = load(case, folder)
    with torch.no_grad(), execute_plan(model, case.plan, case.demand) as forward:
        for m in range(len(case.plan.replica_MLRB)):
            samples, tokens_BN, mask_BN = case.batch(m, dist.get_rank())
            routes = BatchRoutes.padded(case.trace.select(samples), mask_BN) if samples else None
            with forward.micro_batch(m, routes):
                attention = mask_BN if samples else torch.ones_like(mask_BN)
                model(tokens_BN, attention_mask=attention, use_cache=False)
    with execute_plan(model, case.plan, case.demand) as step:
        for m in range(len(case.plan.replica_MLRB)):
            run_batch(model, case, m, dist.get_rank(), 1.0, step)
    assert not step.ran_at_home
    assert not forward.ran_at_home
    return step.timeline(), forward.timeline()


@pytest.mark.slow
def test_the_executor_does_the_same_things_in_the_same_order(tmp_path):
    """Also with activation checkpointing, in every layer with and without replicas."""
    from relibra.timeline import merged
    from tests.parallel.ranks_at_work import on_ranks
    from tests.parallel.steps import random_step as random_case
    from tests.parallel.steps import step
    from tests.planning.cases import cluster

    cases = {
        "planned": step(slots=2),
        "by hand": step(replicas=[(1, 0, 0, 0.5), (0, 0, 5, 0.4), (0, 1, 6, 0.3)]),
        "one way": step(replicas=[(1, 0, 1, 0.5)]),
        "no replicas": step(slots=0),
        "checkpointing": step(slots=2, checkpointing=True),
        "last tokens without routes": step(slots=2, unrouted_last=True),
    }
    # Ranks without samples, padding, any slots; in the last two cases some rows have no routes.
    cases |= {f"drawn {seed}": replace(random_case(seed, 2), in_flight=False) for seed in (0, 1, 2, 3, 6, 8)}
    recorded = on_ranks(2, cases, tmp_path, _record)
    for name, case in cases.items():
        plan = without_idle_replicas(case.plan)
        model = replace(
            model_shape("qwen3-30b-a3b"), moe_layers=plan.home_LE.shape[0], experts=plan.num_experts, top_k=2
        )
        how = Execution(recompute_activations=case.checkpointing)
        simulated = simulated_timeline(plan, plan.scheduled(case.demand), cluster(1, 2), model, how)
        trained, forward = zip(*recorded[name], strict=True)
        found = diff_timelines(merged(trained), simulated)
        assert found.same_order, (name, found.first_difference)
        apart = not np.asarray(case.trace.valid_T).all()  # too many to travel with the planned rows
        prepared = (*("at home",) * apart, "prepare", "wait prepare")
        assert found.only_first == prepared, name
        assert found.only_second == ("attention", "experts", "gradients", "optimizer")
        assert {"dispatch", "combine"} <= set(found.compared)
        assert ("push" in found.compared) == (plan.num_copies > 0)
        how = Execution(forward_only=True)
        simulated = simulated_timeline(plan, plan.scheduled(case.demand), cluster(1, 2), model, how)
        found = diff_timelines(merged(forward), simulated)
        assert found.same_order, (name, found.first_difference)
        assert found.only_first == prepared, name
        assert found.only_second == ("attention", "experts")
        assert ("push" in found.compared) == (plan.num_copies > 0)
