"""Static rows: ranks compute as many rows of a layer in every micro-batch; results are those of the dense model."""

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from relibra import Budget, plan_step
from relibra.parallel import balanced
from relibra.parallel.balanced import BalancedEP
from tests.parallel import ranks_at_work
from tests.parallel.ranks_at_work import dense_step, on_ranks, run_batch, step_on_rank
from tests.parallel.refusals import logged, message_of
from tests.parallel.residents import train_on_rank
from tests.parallel.steps import random_step, resident_step, step
from tests.parallel.test_balanced import assert_equals_dense
from tests.parallel.test_refusals import with_other_routes
from tests.parallel.test_residents import assert_weights_of_dense, trained
from tests.parallel.trainings import step_with_frozen_experts
from tests.planning.cases import cluster

EVERYTHING_TO_RANK_0 = [(0, slot, 4 + slot, 1.0) for slot in range(4)]


def static(case, resident=0):
    """Return the case with static rows, and some of its slots resident."""
    change = {"static_rows": True, "resident_slots": min(resident, case.plan.slots)}
    plans = tuple(replace(plan, static_rows=True) for plan in case.plans)
    return replace(case, plan=replace(case.plan, **(change if resident else {"static_rows": True})), plans=plans)


def watched_step(case, folder):
    """Do a step; return too what the experts of each layer saw."""
    seen, own = {}, BalancedEP.run_rows

    def run_rows(layer, rows_YH, rows, weight_Y1):
        weights = {name: tuple(getattr(layer.experts, name).shape) for name in layer.parameter_names}
        shapes = (tuple(rows_YH.shape), tuple(rows.ends_P.shape), *weights.items())
        seen.setdefault(id(layer), []).append(shapes)
        return own(layer, rows_YH, rows, weight_Y1)

    with mock.patch.object(BalancedEP, "run_rows", run_rows):
        return step_on_rank(case, folder) | {"shapes_L": list(seen.values())}


def compiled_step(case, folder):
    """Do a step whose experts are compiled; return too how many graphs there are after each micro-batch."""
    compiled, graphs = CompileCounterWithBackend("aot_eager"), []

    def counted(*batch, **settings):
        found = run_batch(*batch, **settings)
        graphs.append(compiled.frame_count)
        return found

    product = torch.compile(balanced.run_sorted, backend=compiled, dynamic=False)
    with mock.patch.object(balanced, "run_sorted", product), mock.patch.object(ranks_at_work, "run_batch", counted):
        return step_on_rank(case, folder) | {"graphs_M": graphs}


def cases_of_different_loads():
    """Return a case with static rows and one without, whose ranks compute other numbers of rows in each batch."""
    schedule = ([0, 0, 1, 1, 2, 2], [0, 1] * 3)
    case = step(lengths=(9, 12, 7, 10, 15, 4), schedule=schedule, slots=2, ahead=True)
    plan = case.plan
    assert len(np.unique(plan.rank_load(plan.scheduled(case.demand))[:, 0])) > 2, "loads differ"
    assert (plan.replica_MLRB >= 0).any()
    return {"static": static(case, resident=1), "as planned": case}


def test_experts_see_the_same_shapes_in_every_micro_batch(tmp_path):
    cases = cases_of_different_loads()
    found = on_ranks(2, cases, tmp_path, watched_step)
    for name, results_R in found.items():
        assert_equals_dense(cases[name], results_R)
    for layer in range(3):
        of_layer = {shapes for result in found["static"] for shapes in result["shapes_L"][layer]}
        assert len(of_layer) == 1, "one shape on all ranks, in all micro-batches"
        assert len({shapes for result in found["as planned"] for shapes in result["shapes_L"][layer]}) > 3
    computed = {
        name: sum(shapes[0][0] for result in results_R for of_layer in result["shapes_L"] for shapes in of_layer)
        for name, results_R in found.items()
    }
    plan = cases["static"].plan
    factor = plan.padding_factor(plan.scheduled(cases["static"].demand))
    assert factor == pytest.approx(computed["static"] / computed["as planned"]), "as relibra plan says it"
    for result in found["static"]:
        assert [len(shapes) for shapes in result["shapes_L"]] == [3, 3, 3], "one product for each micro-batch"


@pytest.mark.slow
def test_compiled_experts_with_static_rows_are_compiled_once(tmp_path):
    cases = cases_of_different_loads()
    found = on_ranks(2, cases, tmp_path, compiled_step)
    for name, results_R in found.items():
        assert_equals_dense(cases[name], results_R)
    for result in found["static"]:
        assert len(set(result["graphs_M"])) == 1, "nothing is compiled after the first micro-batch"
        assert result["graphs_M"][0] > 0
    as_planned = found["as planned"][0]["graphs_M"]
    assert as_planned[-1] > as_planned[0], "other rows are compiled anew"


def test_the_budget_says_whether_rows_are_static():
    demand = step().demand
    for static_rows in (False, True):
        plan = plan_step(demand, cluster(1, 2), Budget(slots=1, objective="tokens", static_rows=static_rows))
        assert plan.static_rows == static_rows
        assert replace(plan, static_rows=True).digest() != replace(plan, static_rows=False).digest()
    load_MLR = plan.rank_load(plan.scheduled(demand))
    assert plan.static_rows_L(plan.scheduled(demand)).tolist() == [int(load_MLR[:, layer].max()) for layer in range(3)]


@pytest.mark.slow
def test_steps_with_static_rows_equal_the_dense_model(tmp_path):
    few_live = {"lengths": (90, 61, 88, 79), "unrouted_last": True}
    cases = {
        "checkpointed, two in flight": step(checkpointing=True, in_flight=True, slots=2),
        "few last tokens without routes": step(**few_live, slots=2),
        "few last tokens, gpt-oss, checkpointed": step(family="gpt_oss", checkpointing=True, **few_live),
        "last tokens without routes": step(unrouted_last=True),
        "a rank that computes nothing": step(replicas=EVERYTHING_TO_RANK_0),
        "no row travels": step(replicas=EVERYTHING_TO_RANK_0, schedule=([0, 0, 1, 1], [0, 0, 0, 0])),
        "an idle replica": step(replicas=[(1, 0, 0, 0.0), (0, 0, 7, 0.5)]),
        "no slots": step(slots=0),
        "a rank without samples": step(schedule=([0, 0, 1, 1], [0, 0, 0, 1])),
        "autocast": step(autocast=True),
        "torch.compile": step(wrap="compiled"),
        "mixtral": step(family="mixtral", slots=2),
        "deepseek-v3": step(family="deepseek_v3", layer_ids=(1, 2), top_k=3),
        **{f"seed {seed}": random_step(seed, 2) for seed in range(6)},
    }
    ways = {
        f"{name}, {resident} resident": static(case, resident) for name, case in cases.items() for resident in (0, 1)
    }
    for name, results_R in on_ranks(2, ways, tmp_path).items():
        assert_equals_dense(ways[name], results_R)


@pytest.mark.slow
def test_trainings_with_static_rows_give_the_weights_of_the_dense_model(tmp_path):
    cases = {f"seed {seed}": trained(resident_step(seed, 2)) for seed in range(3)}
    cases["checkpointed, in flight"] = trained(resident_step(6, 2, in_flight=True, checkpointing=True))
    at_home = resident_step(31, 2, in_flight=True)
    cases["a micro-batch at home"] = trained(
        with_other_routes(at_home, int(np.flatnonzero(at_home.plan.micro_batch_S == 1)[0]))
    )
    cases = {name: static(case) for name, case in cases.items()}
    for name, results_R in on_ranks(2, cases, tmp_path, train_with_log).items():
        assert_weights_of_dense(cases[name], results_R, name)


def train_with_log(case, folder):
    with logged():
        return train_on_rank(case, folder)


@pytest.mark.slow
def test_experts_that_fsdp_shards_over_two_groups(tmp_path):
    case = step(2, lengths=range(5, 13), schedule=([0, 0, 1, 1, 2, 2, 3, 3], [0, 1] * 4), slots=2)
    case = replace(case, num_ranks=4, plan=replace(case.plan, group_M=np.array([0, 0, 1, 1], np.int32)))
    cases = {
        "shared": static(case),
        "resident": static(case, 1),
        "checkpointed": static(replace(case, checkpointing=True)),
    }
    for name, results_R in on_ranks(4, cases, tmp_path).items():
        assert_equals_dense(cases[name], results_R)


@pytest.mark.slow
def test_mixed_precision_gives_what_it_gives_without_a_plan(tmp_path):
    mixed = static(replace(step(), distributed={"fsdp_mixed_precision": True}))
    home = replace(mixed, follow_plan=False, implementation="all_to_all")
    found = on_ranks(2, {"static": mixed, "all_to_all": home}, tmp_path)
    for ours, theirs in zip(found["static"], found["all_to_all"], strict=True):
        torch.testing.assert_close(ours["gradients"], theirs["gradients"], rtol=0.05, atol=0.01)


@pytest.mark.slow
def test_frozen_experts_leave_the_gradients_of_the_rest(tmp_path):
    case = static(step(), resident=1)
    expected = dense_step(case)["gradients"]
    for result in on_ranks(2, {"frozen": case}, tmp_path, step_with_frozen_experts)["frozen"]:
        for name, gradient in result["gradients"].items():
            assert (gradient is None) == (".experts." in name), name
            if gradient is not None:
                torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.slow
def test_canonical_sums_are_refused(tmp_path):
    case = static(step(sums="canonical"))
    for message in on_ranks(2, {"case": case}, tmp_path, refused_step)["case"]:
        assert message.startswith("EngineError: the plan has static rows, and canonical sums")


def refused_step(case, folder):
    return message_of(lambda: step_on_rank(case, folder))
