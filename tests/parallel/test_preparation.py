"""Micro-batches are prepared ahead and once for two passes, and only where all ranks can."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from relibra.parallel import execute_plan
from tests.parallel.ranks_at_work import load, on_ranks, run_batch
from tests.parallel.steps import resident_step, step

pytestmark = pytest.mark.slow


def two_passes(case, folder):
    """Run a pass without gradients and one with, as a step of RL does; return what was prepared in each, and when.

    A rank in `case.plans` does not know its routes ahead; one that is there twice makes them anew for the second pass.
    """
    model, rank = load(case, folder), dist.get_rank()
    routes = case.known_routes(range(len(case.plan.replica_MLRB)), rank)
    found = {}
    for name in ("recompute", "update"):
        if name == "update" and case.plans.count(rank) == 2:
            routes = case.known_routes(routes, rank)
        known = {} if rank in case.plans else routes
        with execute_plan(model, case.plan, case.demand, sums=case.sums, routes=known) as execution:
            for m in routes:
                with torch.set_grad_enabled(name == "update"):
                    found[name, m] = run_batch(
                        model, replace(case, in_flight=name == "recompute"), m, rank, 1.0, execution, routes
                    )[1]
        events = execution.timeline().events
        found[name] = [event.micro_batch for event in events if event.stage == "prepare"]
        found[f"{name}, home"] = execution.ran_at_home
    return found


CASES = {
    "known": ((), [0, 1], []),
    "known, canonical": ((), [0, 1], []),
    "not on rank 1": ((1,), [0, 1], []),
    "other objects on rank 1": ((1, 1), [0, 1], [0, 1]),
}


def test_both_passes_of_a_step_are_prepared_once(tmp_path):
    cases = {
        name: replace(step(ahead=True), plans=ranks, sums="canonical" if "canonical" in name else "fast")
        for name, (ranks, _, _) in CASES.items()
    }
    cases["residents"] = resident_step(0, 2, micro_batches=4, ahead=True)
    expected = CASES | {"residents": ((), [0, 1, 2, 3], [])}
    for name, results_R in on_ranks(2, cases, tmp_path, two_passes).items():
        _, recompute, update = expected[name]
        for result in results_R:
            assert (result["recompute"], result["update"]) == (recompute, update), name
            assert result["recompute, home"] == result["update, home"] == [], name
        for m in recompute:
            assert [result["recompute", m] for result in results_R] == pytest.approx(
                [result["update", m] for result in results_R], rel=1e-6
            )
