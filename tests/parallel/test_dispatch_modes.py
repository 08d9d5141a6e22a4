"""Hierarchical dispatch: the step of the dense model, the bits of a flat one, planned bytes between nodes."""

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from relibra import Budget, plan_step
from relibra.planning.costs.expert_shape import ExpertShape
from relibra.planning.costs.prediction import predict
from relibra.planning.traffic.distinct_rows import distinct_rows_of_step
from relibra.planning.traffic.rank_tables import rank_tables
from relibra.routing.demand_rows import sample_of_rows
from relibra.simulation import model_shape, simulate_step
from tests.parallel import ranks_at_work
from tests.parallel.against_dense import assert_equals_dense, assert_same_bits, relative_error, rounded
from tests.parallel.lives import live_step
from tests.parallel.ranks_at_work import dense_step, on_ranks, step_on_rank
from tests.parallel.steps import on_nodes, random_step, resident_step, step
from tests.parallel.trainings import noted_timelines
from tests.planning.cases import cluster

slow = pytest.mark.slow

ROW_BYTES = 32 * 4
TINY = ExpertShape(hidden=32, width=16, bytes_per_value=4)
OF_FOUR = ([0] * 4 + [1] * 4, [0, 1, 2, 3] * 2)


def timed_step(case, folder):
    """Do a planned step, or a live one if the case follows no plan; return its timeline too."""
    if not case.follow_plan:
        return live_step(case, folder)
    with noted_timelines() as timelines:
        return step_on_rank(case, folder) | {"timeline": timelines[0]}


def both_ways(cases, num_nodes=2):
    return {
        f"{name}, {dispatch}": on_nodes(case, num_nodes, dispatch)
        for name, case in cases.items()
        for dispatch in ("flat", "hierarchical")
    }


def assert_dense_both_ways(cases, tmp_path, num_ranks, num_nodes=2, work=step_on_rank):
    all_cases = both_ways(cases, num_nodes)
    found = on_ranks(num_ranks, all_cases, tmp_path, work)
    for name, results_R in found.items():
        assert_equals_dense(all_cases[name], results_R)
    for name in cases:
        assert_same_bits(found[f"{name}, flat"], found[f"{name}, hierarchical"], name)
    return found


def crossing_rows(case, rank, m, layer):
    """Count by hand the rows of a rank that cross between nodes: flat, and once per node."""
    tables, trace = rank_tables(case.plan, case.demand, rank, m, layer), case.trace.select(case.batch(m, rank)[0])
    experts_TK = trace.experts_TLK[:, layer]
    choice_X = np.argsort(experts_TK, axis=None, kind="stable")[tables.send_order_X]
    target_X = np.repeat(np.arange(case.plan.num_ranks), tables.send_RP.sum(axis=1))
    G = case.plan.ranks_per_node
    pairs = {(x // experts_TK.shape[1], d) for x, d in zip(choice_X.tolist(), target_X.tolist(), strict=True)}
    flat = sum(d // G != rank // G for _, d in pairs)
    return flat, len({(t, d // G) for t, d in pairs if d // G != rank // G})


def of_rows(result, stage, m, layer):
    events = result["timeline"].events
    return [e for e in events if (e.stage, e.label, e.micro_batch, e.layer) == (stage, "rows", m, layer)]


def assert_bytes_as_planned(case, results_R):
    """All exchanges of rows between nodes: to the experts, back, and both with gradients."""
    total_2 = np.zeros(2, dtype=np.int64)
    for m, layer in np.ndindex(2, 3):
        rows_R2 = np.array([crossing_rows(case, rank, m, layer) for rank in range(4)])
        total_2 += rows_R2.sum(axis=0)
        rows_R = rows_R2[:, int(case.plan.dispatch == "hierarchical")]
        for rank, result in enumerate(results_R):
            sent = [event.bytes_between_nodes for event in of_rows(result, "dispatch", m, layer)]
            assert sent == [rows_R[rank] * ROW_BYTES] * 2
        back = [[e.bytes_between_nodes for e in of_rows(one, "combine", m, layer)] for one in results_R]
        assert np.sum(back, axis=0).tolist() == [rows_R.sum() * ROW_BYTES] * 2
        for stage in ("dispatch in node", "combine in node"):
            inside = [event for one in results_R for event in of_rows(one, stage, m, layer)]
            assert len(inside) == 8 * (case.plan.dispatch == "hierarchical")
            assert all(event.bytes_between_nodes == 0 for event in inside)
    assert 0 < total_2[1] < total_2[0]


def assert_bytes_by_kind(case, results_R):
    """Bytes of a step, in the prediction and in the simulator, are those that the ranks sent."""
    events = [event for result in results_R for event in result["timeline"].events]

    def sent(stages, label):
        found = [event for event in events if event.stage.split()[0] in stages and event.label == label]
        between = sum(event.bytes_between_nodes for event in found)
        return sum(event.bytes for event in found) - between, between

    def copied(stage):
        """Split the bytes of each event over the pushes of its rank; those of a layer are equally large."""
        links = np.zeros(2)
        for event in (one for one in events if one.stage == stage and one.bytes):
            layer = case.plan.layer_ids.tolist().index(event.layer)
            pushes = rank_tables(case.plan, case.demand, event.rank, event.micro_batch, layer).pushes
            own = [one for one in pushes if event.rank == (one.home if stage == "push" else one.replica)]
            crossing = sum(one.home // 2 != one.replica // 2 for one in own)
            links += np.array([len(own) - crossing, crossing]) * event.bytes / len(own)
        return tuple(links.tolist())

    plan, demand = case.plan, case.plan.scheduled(case.demand)
    rows = distinct_rows_of_step(plan, demand, case.trace.experts_TLK, sample_of_rows(case.trace, case.demand))
    model = replace(model_shape("qwen3-30b-a3b"), hidden=32, expert=TINY, moe_layers=3, experts=8, top_k=2)
    found = simulate_step(plan, demand, cluster(2, 2), model, distinct=rows).bytes
    assert found.rows == sent(("dispatch", "combine"), "rows")
    assert found.gates == sent(("dispatch", "combine"), "gate weights")
    assert found.weights == copied("push")
    assert found.gradients == copied("return")
    assert min(found.weights) > 0
    predicted = predict(plan, demand, cluster(2, 2), TINY).bytes
    kinds = ("gates", "weights", "gradients", "moves")
    assert [getattr(predicted, kind) for kind in kinds] == [getattr(found, kind) for kind in kinds]


def planned_both_ways():
    """Return one planned step, with hierarchical and with flat dispatch."""
    case = step(4, lengths=range(5, 13), schedule=OF_FOUR, slots=2, ahead=True)
    budget = Budget(slots=2, move_homes=False, pack_samples=False)
    machine = replace(cluster(2, 2), dispatch="hierarchical")
    plan = plan_step(case.demand, machine, budget, "relibra_paper_anywhere", expert=TINY, never_worse=False)
    assert (plan.dispatch, plan.num_nodes) == ("hierarchical", 2)
    assert plan.num_cross_node_copies
    case = replace(case, plan=plan)
    return {"hierarchical": case, "flat": replace(case, plan=replace(plan, dispatch="flat"))}


def test_rows_cross_once_with_the_bits_of_flat_dispatch(tmp_path):
    cases = planned_both_ways()
    found = on_ranks(4, cases, tmp_path, timed_step)
    assert_equals_dense(cases["hierarchical"], found["hierarchical"])
    for name, case in cases.items():
        assert_bytes_as_planned(case, found[name])
        assert_bytes_by_kind(case, found[name])
    assert_same_bits(found["hierarchical"], found["flat"], "planned")


@slow
def test_live_rows_cross_once_with_the_bits_of_flat_dispatch(tmp_path):
    cases = {name: replace(one, follow_plan=False) for name, one in planned_both_ways().items()}
    found = on_ranks(4, cases, tmp_path, timed_step)
    assert_equals_dense(cases["hierarchical"], found["hierarchical"])
    assert_same_bits(found["hierarchical"], found["flat"], "live")
    for way in ("flat", "hierarchical"):
        stages = {event.stage for one in found[way] for event in one["timeline"].events}
        assert ("dispatch in node" in stages) == (way == "hierarchical")


def steps_of_four():
    common = {"lengths": range(5, 13), "schedule": OF_FOUR}
    long = {"lengths": range(140, 148), "schedule": OF_FOUR, "unrouted_last": True}
    everywhere = [(r, 0, 0, 0.3) for r in (1, 2, 3)] + [(0, 0, 6, 0.9)]
    return {
        "checkpointed": step(4, **common, slots=2, checkpointing=True),
        "one expert everywhere": step(4, **common, replicas=everywhere),
        "in flight": step(4, **common, in_flight=True),
        "in flight, checkpointed": step(4, **common, slots=2, in_flight=True, checkpointing=True),
        "last tokens apart": step(4, **common, unrouted_last=True),
        "last tokens joined": step(4, **long, slots=2),
        "last tokens joined, gpt-oss, checkpointed": step(4, **long, family="gpt_oss", checkpointing=True),
        "deepseek-v3": step(4, **common, family="deepseek_v3", layer_ids=(1, 2), top_k=3),
    }


def steps_of_few_rows():
    on_rank_0 = {"lengths": (9, 7), "schedule": ([0, 1], [0, 0])}
    return {
        "ranks without samples": step(4, schedule=([0, 0, 1, 1], [0, 2, 3, 1])),
        "no row travels": step(4, **on_rank_0, replicas=[(0, s, 2 + s, 1.0) for s in range(6)]),
        "no row leaves its node": step(
            4, schedule=([0, 0, 1, 1], [0, 1, 1, 0]), replicas=[(s // 2, s % 2, 4 + s, 1.0) for s in range(4)]
        ),
        "no row changes its rail": step(
            4, **on_rank_0, replicas=[(0, 0, 2, 1.0), (2, 0, 3, 1.0), (0, 1, 6, 1.0), (2, 1, 7, 1.0)]
        ),
        "resident": resident_step(3, 4, slots=2),
        "resident, in flight": resident_step(4, 4, in_flight=True),
        "seed 5": random_step(5, 4),
        "seed 6": random_step(6, 4),
    }


@slow
@pytest.mark.parametrize("steps", [steps_of_four, steps_of_few_rows])
def test_hierarchical_steps_of_four_ranks_equal_the_dense_model(tmp_path, steps):
    cases = steps()
    found = assert_dense_both_ways(cases, tmp_path, 4, work=timed_step)
    for name in cases:
        timelines = [one["timeline"] for one in found[f"{name}, hierarchical"]]
        labels = {event.label for timeline in timelines for event in timeline.events}
        assert ("choices of live rows" in labels) == ("joined" in name), name
        stages = {event.stage for timeline in timelines for event in timeline.events if event.label == "rows"}
        skipped = {"dispatch": "leaves its node" in name, "dispatch in node": "changes its rail" in name}
        for stage, is_skipped in skipped.items():
            assert (stage in stages) != (is_skipped or name == "no row travels"), (name, stage)


@slow
def test_hierarchical_live_steps_equal_the_dense_model(tmp_path):
    common = {"lengths": range(5, 13), "schedule": OF_FOUR}
    cases = {
        "checkpointed": step(4, **common, slots=2, checkpointing=True),
        "last tokens": step(4, **common, unrouted_last=True),
        "ranks without samples, in flight": step(4, schedule=([0, 0, 1, 1], [0, 2, 3, 1]), in_flight=True),
    }
    assert_dense_both_ways(cases, tmp_path, 4, work=live_step)


@slow
@pytest.mark.parametrize("num_nodes", [2, 4])
def test_hierarchical_steps_of_eight_ranks_equal_the_dense_model(tmp_path, num_nodes):
    spread = [(r, 0, 0, 0.1) for r in range(1, 8)]
    cases = {
        "one expert everywhere": step(8, lengths=range(5, 13), schedule=([0] * 8, list(range(8))), replicas=spread),
        "two micro-batches": step(8, lengths=range(7, 23), schedule=([0] * 8 + [1] * 8, [*range(8)] * 2), slots=2),
        "seed 8": random_step(8, 8),
    }
    assert_dense_both_ways(cases, tmp_path, 8, num_nodes)


@slow
def test_bf16_and_canonical_steps_have_the_same_bits_both_ways(tmp_path):
    planner = step(4, lengths=range(5, 13), schedule=OF_FOUR, slots=2)
    cases = {"bf16": replace(planner, dtype="bfloat16"), "canonical": replace(planner, sums="canonical")}
    all_cases = both_ways(cases)
    all_cases["canonical, one node"] = cases["canonical"]
    all_cases["all_to_all"] = replace(cases["bf16"], follow_plan=False, implementation="all_to_all")
    found = on_ranks(4, all_cases, tmp_path)
    for name in cases:
        assert_same_bits(found[f"{name}, flat"], found[f"{name}, hierarchical"], name)
    assert_same_bits(found["canonical, one node"], found["canonical, hierarchical"], "canonical")
    with mock.patch.object(ranks_at_work, "tiny_model", rounded):
        exact = dense_step(cases["bf16"])["gradients"]
    error, theirs = (relative_error(found[name], exact) for name in ("bf16, hierarchical", "all_to_all"))
    assert 1e-4 < theirs < 0.1
    assert error <= 1.5 * theirs
