"""Plans with other numbers of slots one after another on one model: the slots are allocated anew."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from relibra.parallel import balance_live, execute_plan
from relibra.planning.plan import StepPlan
from relibra.replay import replay_routing
from tests.parallel.against_dense import assert_gradients_close
from tests.parallel.ranks_at_work import Case, dense_step, load, num_targets, on_ranks, step_of_model
from tests.parallel.steps import planned, step

pytestmark = pytest.mark.slow


def one_plan_after_another(case: Case, folder) -> list[dict]:
    """Do a step under each plan of the case."""
    model, results = load(case, folder), []
    for plan in case.plans:
        model.zero_grad()
        results.append(step_of_model(model, replace(case, plan=plan)))
    return results


def backward_after_another_step(case: Case, folder) -> dict:
    """Return the gradients of a step whose backward passes come after a step with other slots."""
    model = load(case, folder)

    def entered(plan: StepPlan):
        if case.follow_plan:
            return execute_plan(model, plan, case.demand, sums=case.sums)
        return balance_live(model, slots=plan.slots, sums=case.sums)

    def loss_of(step, m: int) -> Tensor:
        _, tokens_BN, mask_BN = case.batch(m, dist.get_rank())
        routes = case.routes(m, dist.get_rank())
        with step.micro_batch(m, routes) if case.follow_plan else replay_routing(model, routes):
            each = -model(tokens_BN, attention_mask=mask_BN, use_cache=False).logits[:, :-1].log_softmax(-1)
        return (each.gather(-1, tokens_BN[:, 1:, None]).squeeze(-1) * mask_BN[:, 1:]).sum()

    with entered(case.plan) as step:
        losses = [loss_of(step, m) for m in range(len(case.plan.replica_MLRB))]
    with entered(case.plans[0]) as step:
        loss_of(step, 0).backward()
    model.zero_grad()
    for loss in losses:
        (loss * case.num_ranks / num_targets(case)).backward()
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def test_new_slots_have_the_type_of_the_forward_pass(tmp_path):
    case = replace(step(slots=1), distributed={"fsdp_mixed_precision": True})
    others = {"two slots": planned(case.demand, 2, 2), "resident": replace(case.plan, resident=True)}
    cases = {name: replace(case, plans=(case.plan, other)) for name, other in others.items()}
    cases |= {f"{name}, alone": replace(case, plans=(other,)) for name, other in others.items()}
    found = on_ranks(2, cases, tmp_path, one_plan_after_another)
    for name in others:
        for (_, second), (alone,) in zip(found[name], found[f"{name}, alone"], strict=True):
            for parameter, gradient in alone["gradients"].items():
                assert torch.equal(second["gradients"][parameter], gradient), (name, parameter)


def test_a_backward_pass_uses_the_slots_of_its_forward_pass(tmp_path):
    case = step(slots=1)
    two = planned(case.demand, 2, 2)
    cases = {
        "planned": replace(case, plans=(two,)),
        "canonical": replace(case, plans=(two,), sums="canonical"),
        "live": replace(case, plans=(two,), follow_plan=False),
    }
    for name, results_R in on_ranks(2, cases, tmp_path, backward_after_another_step).items():
        expected = dense_step(cases[name])["gradients"]
        for result in results_R:
            assert_gradients_close(result, expected, name)
