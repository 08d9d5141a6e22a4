"""Whoever asks for what cannot be done gets a sentence; routes and plans that cannot be followed run at home."""

from dataclasses import replace

import pytest

from tests.parallel.against_dense import assert_equals_dense
from tests.parallel.ranks_at_work import on_ranks
from tests.parallel.refusals import fall_back, refuse_all
from tests.parallel.steps import of_experts, skewed_trace, step

pytestmark = pytest.mark.slow

EXPECTED = {
    "sums": ("sums is 'canon'", "fast, canonical"),
    "wrong micro-batch": ("EngineError: the plan has micro-batches 0 to 1, not 5",),
    "micro-batch in micro-batch": ("EngineError: micro-batch 1 begins inside micro-batch 0",),
    "plan in plan": ("EngineError: the model is executing another plan",),
    "relocate on one rank": ("moves experts (relocate): ranks [0], enters execute_plan: ranks [1]",),
    "evaluation mode on one rank": ("ranks differ in training mode (model.eval()), by rank [1, 0]",),
    "different micro-batches": ("EngineError: ", "enters micro-batch 0: ranks [0], enters micro-batch 1: ranks [1]"),
    "different sums": ("ranks differ in sums",),
    "different homes": ("ranks differ in homes of experts",),
    "gradients on one rank": ("EngineError: rank ", "ranks differ in gradients (torch.no_grad), by rank [0, 1]"),
    "a state dict of moved experts": (
        "EngineError: a state dict is requested while experts are not in logical order",
        "logical_order(",
    ),
    "moved homes": ("EngineError: the plan has other homes than the model in layers [0, 1, 2]", "relocate(model"),
    "other layers": ("EngineError: the plan is for layers [1, 2, 3], the model has [0, 1, 2]",),
    "experts of different shapes": (
        "EngineError: the plan has replicas, and the model has experts of different shapes",
        "Budget(slots=0)",
    ),
    "different shapes without replicas": ("no error",),
    "routes of another batch": ("TraceError: layer 0: its router sees ", " rows, the routes have 1"),
    "all_to_all": ("EngineError: no experts of ", "relibra.parallel.register()"),
    "tensor parallelism": ("EngineError: ep_implementation 'relibra' does not run under tensor parallelism",),
    "recompute outside": ("EngineError: ", "recomputes a forward pass that was replayed", "the same BatchRoutes"),
    "recompute filler outside": (
        "EngineError: layer 2: activation checkpointing recomputes it outside of any micro-batch",
    ),
    "an error of the user": ("RuntimeError: the reward model has no connection",),
    "afterwards": ("no error",),
}


def test_refusals_name_what_is_wrong_and_leave_the_model_usable(tmp_path):
    case = replace(step(), plans=[step(slots=0).plan])
    for messages in on_ranks(2, {"refusals": case}, tmp_path, refuse_all)["refusals"]:
        assert messages.keys() == EXPECTED.keys()
        for name, message in messages.items():
            assert all(part in message for part in EXPECTED[name]), (name, message)


def with_other_routes(case, sample):
    """Give a sample routes that the plan was not made for."""
    others = skewed_trace(case.trace.rows_per_sample.tolist(), seed=50)
    experts = [(others if s == sample else case.trace).select([s]).experts_TLK for s in range(case.trace.num_samples)]
    return replace(case, trace=of_experts(experts))


def test_many_rows_without_routes_have_their_own_exchange(tmp_path):
    lengths = (70, 75, 66, 80)
    cases = {
        "few last tokens": step(lengths=lengths, unrouted_last=True),
        "padding": step(lengths=(9, 12, 7, 10), schedule=([0, 0, 0, 0], [0, 0, 1, 1])),
        "filler": step(schedule=([0, 0, 1, 1], [0, 0, 0, 1])),
        "many last tokens": step(unrouted_last=True),
        "few, canonical": step(lengths=lengths, unrouted_last=True, sums="canonical"),
    }
    for name, results_R in on_ranks(2, cases, tmp_path, fall_back).items():
        assert_equals_dense(cases[name], results_R)
        at_home = [0, 1] if name in ("many last tokens", "few, canonical") else []
        assert [result["at home"] for result in results_R] == [at_home] * 2, name


def test_what_cannot_be_followed_runs_at_home_with_one_warning(tmp_path):
    case = step()
    static = step(slots=0).plan
    smaller = step(trace=skewed_trace((9, 12, 7, 10), layer_ids=(0,))).plan
    illegal = replace(case.plan, balancer="by hand", quota_MLRB=case.plan.quota_MLRB - 1)
    cases = {
        "routes on rank 0": with_other_routes(case, 0),
        "routes on rank 1": with_other_routes(case, 1),
        "routes, known ahead": with_other_routes(replace(case, ahead=True), 0),
        "routes, canonical": with_other_routes(replace(case, sums="canonical"), 0),
        "routes, checkpointed": with_other_routes(replace(case, checkpointing=True), 0),
        "plans that differ": replace(case, plans=(case.plan, static)),
        "plans of other sizes": replace(case, plans=(case.plan, smaller)),
        "illegal plan": replace(case, plan=illegal),
        "nothing": case,
    }
    warnings = {
        "routes": (
            "rank {}, micro-batch 0: the routes are not those of the plan (in layer 0 expert ",
            "replay the routes",
        ),
        "plans that differ": ("every expert runs at home: ranks [1] hold another plan", "make the plan on one rank"),
        "plans of other sizes": ("ranks [1] hold a demand that the plan was not made for",),
        "illegal plan": ("every expert runs at home: a quota is negative",),
    }
    for name, results_R in on_ranks(2, cases, tmp_path, fall_back).items():
        kind = name if name in warnings else "routes"
        assert_equals_dense(cases[name], results_R)
        lines_R = [result["lines"] for result in results_R]
        at_home = [] if name == "nothing" else [0] if kind == "routes" else [0, 1]
        assert [result["at home"] for result in results_R] == [at_home] * 2, name
        if name == "nothing":
            assert lines_R == [[], []]
            continue
        rank = 1 if name in ("routes on rank 1", "plans of other sizes") else 0  # the first that knows the reason
        assert [len(lines) for lines in lines_R] == [rank == 0, rank == 1], (name, lines_R)
        for part in warnings[kind]:
            assert part.format(rank) in lines_R[rank][0], (name, lines_R)
