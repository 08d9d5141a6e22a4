"""Resident slots: replicas stay over micro-batches, gradients come home when a stay ends; weights equal dense ones."""

from dataclasses import replace
from itertools import product
from unittest import mock

import numpy as np
import pytest

from relibra.planning.costs.copies import pushed_copies
from tests.parallel import ranks_at_work
from tests.parallel.against_dense import (
    assert_equals_dense,
    assert_only_experts_are_frozen,
    assert_same_bits_of_training,
    assert_same_training,
    relative_error,
    rounded,
)
from tests.parallel.faults import Fault, survivors_of
from tests.parallel.ranks_at_work import dense_step, on_ranks, step_on_rank
from tests.parallel.refusals import logged
from tests.parallel.residents import groups_of, misuse_residents, train_dense, train_on_rank
from tests.parallel.steps import resident_step, step
from tests.parallel.test_faults import assert_all_say_where
from tests.parallel.test_refusals import with_other_routes
from tests.parallel.test_training import BYTES_OF_EXPERT, assert_slots_are_right, of
from tests.parallel.trainings import moved, noted_timelines, plans_of, step_with_frozen_experts, watched_step

pytestmark = pytest.mark.slow

REPLICAS = [(1, 0, 0, 0.5), (1, 1, 3, 0.5), (0, 0, 6, 0.5)]


def trained(case, num_steps=2, others=()):
    """Train with this plan and others in turn, all in the groups of this one."""
    plans = tuple(replace(plan, group_M=case.plan.group_M) for plan in plans_of(case, *others))
    return replace(case, num_steps=num_steps, plans=plans)


def by_hand(num_ranks=2, replicas=REPLICAS, *, resident=True, **settings):
    """Replicas in the same slots of all micro-batches and layers."""
    case = step(num_ranks, replicas=replicas, **settings)
    return replace(case, plan=replace(case.plan, resident=resident))


def test_several_steps_in_one_plan_give_the_dense_weights(tmp_path):
    cases = {f"seed {seed}": trained(resident_step(seed, 2)) for seed in range(3)}
    two = resident_step(3, 2, slots=2)
    cases |= {
        "moving homes": trained(two, 3, [moved(two, 1), two]),
        "checkpointed": trained(resident_step(4, 2, checkpointing=True)),
        "two in flight": trained(resident_step(5, 2, in_flight=True)),
        "two in flight, checkpointed": trained(resident_step(6, 2, in_flight=True, checkpointing=True)),
        "rows without routes": trained(resident_step(7, 2, unrouted_last=True)),
        "gpt-oss": trained(resident_step(8, 2, family="gpt_oss")),
        "mixtral, canonical": trained(resident_step(9, 2, family="mixtral", sums="canonical")),
    }
    for name, results_R in on_ranks(2, cases, tmp_path, train_on_rank).items():
        assert_same_training(train_dense(cases[name]), results_R, name)


@pytest.mark.parametrize("num_ranks", [4, 8])
def test_on_more_ranks_some_of_them_without_samples(tmp_path, num_ranks):
    cases = {f"seed {seed}": trained(resident_step(seed, num_ranks, micro_batches=3)) for seed in range(20, 22)}
    idle = resident_step(22, num_ranks, samples=3, micro_batches=3, checkpointing=True)
    assert len(set(idle.plan.rank_S.tolist())) < num_ranks
    cases["ranks without samples"] = trained(idle)
    for name, results_R in on_ranks(num_ranks, cases, tmp_path, train_on_rank).items():
        assert_same_training(train_dense(cases[name]), results_R, name)


def test_canonical_sums_of_resident_slots_have_the_same_bits(tmp_path):
    lengths, schedule = [360, 280, 480, 300, 240, 320], ([0, 0, 1, 1, 2, 2], [0, 1] * 3)
    planner = step(2, slots=2, lengths=lengths, schedule=schedule)
    plan = replace(planner.plan, group_M=np.array([0, 0, 1], np.int32))
    of_slots = {A: replace(planner, plan=replace(plan, resident=A)) for A in (False, True)}
    everything = step(2, lengths=lengths, schedule=schedule, replicas=[(0, s, 4 + s, 1.0) for s in range(4)]).plan
    everything = replace(everything, group_M=plan.group_M, resident=True)
    cases = {f"resident {A}": trained(case) for A, case in of_slots.items()}
    cases["checkpointed"] = replace(cases["resident True"], checkpointing=True)
    cases["in flight"] = replace(cases["resident True"], in_flight=True)
    cases["everything on rank 0"] = trained(replace(planner, plan=everything))
    for A in (False, True):
        cases[f"resident {A}, at home once"] = with_other_routes(cases[f"resident {A}"], 2)
    cases = {name: replace(case, sums="canonical") for name, case in cases.items()}
    found = on_ranks(2, cases, tmp_path, train_on_rank)
    for name, results_R in found.items():
        expected_R = found["resident False" + ", at home once" * ("home" in name)]
        assert_same_bits_of_training(expected_R, results_R, name)


def test_micro_batches_at_home_lose_no_gradients(tmp_path):
    cases = {}
    for kind, settings in {
        "": {},
        ", checkpointed": {"checkpointing": True},
        ", in flight": {"in_flight": True},
        ", canonical": {"sums": "canonical"},
    }.items():
        for seed, m in ((30, 0), (31, 1), (32, 2), (33, 3)):  # first, middle, last of a group; a group of its own
            case = resident_step(seed, 2, **settings)
            sample = int(np.flatnonzero(case.plan.micro_batch_S == m)[0])
            cases[f"micro-batch {m}{kind}"] = trained(with_other_routes(case, sample))
    for name, results_R in on_ranks(2, cases, tmp_path, train_with_log).items():
        assert_same_training(train_dense(cases[name]), results_R, name)
        assert sum(len(result["lines"]) for result in results_R) >= 2, name


def train_with_log(case, folder):
    with logged() as lines:
        return train_on_rank(case, folder) | {"lines": lines}


def test_experts_that_fsdp_shards_over_two_groups(tmp_path):
    schedule = ([0, 0, 1, 1, 2, 2, 3, 3], [0, 1] * 4)
    case = by_hand(lengths=range(5, 13), schedule=schedule)
    case = replace(case, num_ranks=4, plan=replace(case.plan, group_M=np.array([0, 0, 1, 1], np.int32)))
    cases = {
        "plain": case,
        "checkpointed": replace(case, checkpointing=True),
        "in flight": replace(case, in_flight=True),
        "at home": with_other_routes(case, 2),
    }
    for name, results_R in on_ranks(4, cases, tmp_path, step_on_rank).items():
        assert_equals_dense(cases[name], results_R)


def test_resident_weights_come_once_and_gradients_go_once(tmp_path):
    schedule = ([0, 0, 1, 1, 2, 2], [0, 1] * 3)
    lengths = (9, 12, 7, 10, 8, 11)
    cases = {A: by_hand(resident=A, lengths=lengths, schedule=schedule) for A in (False, True)}
    cases[2] = replace(cases[True], checkpointing=True)
    found = on_ranks(2, {str(A): case for A, case in cases.items()}, tmp_path, watched_step)
    for A, case in cases.items():
        used_MLRB = (case.plan.quota_MLRB > 0) | case.plan.resident  # an idle replica for one pass needs no weights
        comes_MLRB, again_MLRB, leaves_MLRB = (copied & used_MLRB for copied in pushed_copies(case.plan))
        assert_equals_dense(case, found[str(A)])
        for result in found[str(A)]:
            assert_slots_are_right(result, of_layers=case.plan.resident)
        for m, layer in np.ndindex(3, 3):
            pushes, returns = (
                [e for result in found[str(A)] for e in of(result["timeline"], stage, m, layer)]
                for stage in ("push", "return")
            )
            again = again_MLRB[m, layer].sum() * (layer < 2)  # the last layer's weights are still there
            assert sum(e.bytes for e in pushes) == (comes_MLRB[m, layer].sum() + again) * BYTES_OF_EXPERT
            assert sum(e.bytes for e in returns) == leaves_MLRB[m, layer].sum() * BYTES_OF_EXPERT


def test_a_pass_without_gradients_pushes_arrivals_only(tmp_path):
    schedule = ([0, 0, 1, 1, 2, 2], [0, 1] * 3)
    case = by_hand(lengths=(9, 12, 7, 10, 8, 11), schedule=schedule)
    case = trained(replace(case, plan=replace(case.plan, group_M=np.array([0, 0, 1], np.int32))), num_steps=1)
    results_R = on_ranks(2, {"case": case}, tmp_path, train_on_rank)["case"]
    assert groups_of(case.plan) == [[0, 1], [2]]
    for number, visits in ((0, 2), (1, 1)):  # log-probabilities of all micro-batches twice, then the update
        timelines = [result["timelines"][number] for result in results_R]
        pushed_M = [sum(len(of(t, "push", m, layer)) for t in timelines for layer in range(3)) for m in range(3)]
        assert pushed_M == [visits * 6, 0, visits * 6], "each of two ranks takes part in each layer"


def test_bf16_gradients_are_as_good_as_those_of_all_to_all(tmp_path):
    case = replace(by_hand(), dtype="bfloat16")
    cases = {"resident": case, "all_to_all": replace(case, follow_plan=False, implementation="all_to_all")}
    found = on_ranks(2, cases, tmp_path)
    with mock.patch.object(ranks_at_work, "tiny_model", rounded):
        exact = dense_step(case)["gradients"]
    error = {name: relative_error(results_R, exact) for name, results_R in found.items()}
    assert 1e-4 < error["all_to_all"] < 0.1, error
    assert error["resident"] <= 1.5 * error["all_to_all"], error


def timed_step(case, folder):
    with noted_timelines() as timelines:
        return step_on_rank(case, folder) | {"timeline": timelines[-1]}


def test_gradient_wire_sends_its_type_and_rounds_little(tmp_path):
    """Each replica stays for three micro-batches; the shared one sends what autograd gives, which float32 keeps."""
    sizes = {"lengths": (9, 12, 7, 10, 8, 11), "schedule": ([0, 0, 1, 1, 2, 2], [0, 1] * 3)}
    case, cases = by_hand(**sizes), {}
    for resident, wire in product((True, False), ("model", "float32")):
        plan = replace(case.plan, resident=resident, gradient_wire=wire)
        cases[resident, wire] = replace(case, dtype="bfloat16", plan=plan)
    found = on_ranks(2, cases, tmp_path, timed_step)
    sent = {
        at: sum(event.bytes for one in results_R for event in one["timeline"].events if event.stage == "return")
        for at, results_R in found.items()
    }
    for resident, stays in ((True, 1), (False, 3)):
        number = int((case.plan.quota_MLRB > 0).sum()) if stays > 1 else 3 * len(REPLICAS)
        assert sent[resident, "model"] == number * BYTES_OF_EXPERT // 2
        assert sent[resident, "float32"] == number * BYTES_OF_EXPERT
        wide = {
            name: gradient.float()
            for name, gradient in found[resident, "float32"][0]["gradients"].items()
            if ".experts." in name
        }
        error = relative_error(found[resident, "model"], wide)
        assert (error < 4e-3) if resident else (error == 0), (resident, error)


def test_frozen_experts_leave_the_gradients_of_the_rest(tmp_path):
    shared = {"fast": step(slots=2), "canonical": step(slots=2, sums="canonical"), "gpt-oss": step(family="gpt_oss")}
    resident = {"fast": by_hand(), "at home": with_other_routes(by_hand(), 0), "canonical": by_hand(sums="canonical")}
    cases = {f"shared, {name}": case for name, case in shared.items()}
    cases |= {f"resident, {name}": case for name, case in resident.items()}
    for name, results_R in on_ranks(2, cases, tmp_path, step_with_frozen_experts).items():
        assert_only_experts_are_frozen(cases[name], results_R)


WAITING = "while resident replicas hold gradients that have not gone home (of expert "
EXPECTED = {
    "the last micro-batch skipped": f"EngineError: execute_plan ends {WAITING}",
    "a group left early": f"EngineError: micro-batch 2 starts another pass {WAITING}",
    "an early optimizer step": f"EngineError: the optimizer steps {WAITING}",
    "backward after the plan": "EngineError: the backward pass of micro-batch 0 comes after execute_plan",
    "an optimizer step on one rank": "ranks differ in passes",
    "another model's optimizer": "no error",
    "an error of the user": "RuntimeError: out of patience",
    "afterwards": "no error",
}


def test_whoever_loses_gradients_is_told(tmp_path):
    schedule = ([0, 0, 1, 1, 2, 2], [0, 1] * 3)
    case = by_hand(lengths=(9, 12, 7, 10, 8, 11), schedule=schedule)
    case = replace(case, plan=replace(case.plan, group_M=np.array([0, 0, 1], np.int32)))
    for messages in on_ranks(2, {"misuse": case}, tmp_path, misuse_residents)["misuse"]:
        assert messages.keys() == EXPECTED.keys()
        for name, message in messages.items():
            assert EXPECTED[name] in message, (name, message)


@pytest.mark.parametrize(
    "fault",
    [
        Fault(moment="push", rank=0, layer=1, micro_batch=0),
        Fault(moment="return", rank=1, layer=1),
        Fault(moment="exchange", rank=1, layer=1),
    ],
    ids=lambda fault: fault.moment,
)
def test_the_survivors_of_a_killed_rank_say_where(tmp_path, fault):
    case = by_hand(replicas=[(1, 0, 0, 0.5), (0, 0, 6, 0.5)])
    assert_all_say_where(fault, survivors_of(2, case, fault, tmp_path / "work"), 2)
