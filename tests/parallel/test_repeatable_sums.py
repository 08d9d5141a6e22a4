"""Every path of the executor runs under torch's switch for repeatable sums, and gives the same bits twice."""

from dataclasses import replace

import pytest
import torch

from tests.parallel.against_dense import assert_equals_dense
from tests.parallel.lives import live_step
from tests.parallel.ranks_at_work import on_ranks, step_on_rank
from tests.parallel.steps import step


def twice(case, folder):
    """Do a step twice under the switch; a case of no plan balances live."""
    work = step_on_rank if case.follow_plan else live_step
    torch.use_deterministic_algorithms(True)
    try:
        return {"runs": [work(case, folder) for _ in range(2)]}
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.slow
def test_sums_are_repeatable_under_the_switch_of_torch(tmp_path):
    planned = step(lengths=(90, 81, 88, 79), unrouted_last=True, slots=2)
    plans = {
        "slots of all layers, few last tokens": planned.plan,
        "slots of one layer, few last tokens": replace(planned.plan, resident=True),
    }
    cases = {name: replace(planned, plan=plan) for name, plan in plans.items()}
    cases["gpt-oss, last tokens apart"] = step(family="gpt_oss", unrouted_last=True)
    cases["canonical"] = step(sums="canonical", unrouted_last=True)
    cases["live"] = replace(step(), follow_plan=False)
    for name, results_R in on_ranks(2, cases, tmp_path, twice).items():
        first, second = ([result["runs"][run] for result in results_R] for run in range(2))
        assert_equals_dense(cases[name], first)
        for once, again in zip(first, second, strict=True):
            for part in ("logits", "loss", "gradients"):
                torch.testing.assert_close(once[part], again[part], rtol=0, atol=0, msg=name)
