"""Trainings whose plans have resident slots: several optimizer steps inside one plan, and what moved meanwhile."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from relibra.parallel import execute_plan, logical_parameters, relocate
from relibra.planning.plan import StepPlan
from relibra.replay import BatchRoutes
from relibra.timeline import Timeline
from tests.parallel.ranks_at_work import Case, load, num_targets, run_batch
from tests.parallel.refusals import message_of
from tests.parallel.trainings import SETTINGS
from tests.replay.tiny_models import tiny_model


def groups_of(plan: StepPlan) -> list[list[int]]:
    """Return the micro-batches of each optimizer step."""
    return [np.flatnonzero(plan.group_M == group).tolist() for group in np.unique(plan.group_M)]


def train_on_rank(case: Case, folder) -> dict:
    """Compute log-probabilities, then train group by group, with one plan after another.

    With micro-batches in flight, backward passes of every second step come in reverse.
    """
    model = load(case, folder)
    optimizer = torch.optim.AdamW(model.parameters(), **SETTINGS)
    rank, losses, logits, timelines = dist.get_rank(), [], {}, []
    for number in range(case.num_steps):
        now = replace(case, plan=case.plans[number % len(case.plans)])
        relocate(model, now.plan.physical_to_logical_map, optimizer)
        logits |= {(number, s): one for s, one in log_probabilities(model, now, timelines).items()}
        with execute_plan(model, now.plan, case.demand, sums=case.sums) as step:
            for group in groups_of(now.plan):
                scale = case.num_ranks / num_targets(case)
                done = [run_batch(model, now, m, rank, scale, step) for m in group]
                for _, _, backward in done[:: -1 if number % 2 else 1]:
                    backward()
                losses.append(sum(loss for _, loss, _ in done) / num_targets(case))
                optimizer.step()
                optimizer.zero_grad()
        timelines.append(step.timeline())
    weights = {name: weight.clone() for name, weight in logical_parameters(model)}
    return {"losses": losses, "logits": logits, "weights": weights, "timelines": timelines}


def log_probabilities(model, case: Case, timelines: list[Timeline]) -> dict:
    """Run all micro-batches twice without gradients; return the logits of each sample."""
    logits: dict = {}
    with torch.no_grad(), execute_plan(model, case.plan, case.demand, sums=case.sums) as step:
        for m in [*range(len(case.plan.replica_MLRB))] * 2:
            samples, tokens_BN, mask_BN = case.batch(m, dist.get_rank())
            routes = BatchRoutes.padded(case.trace.select(samples), mask_BN) if samples else None
            with step.micro_batch(m, routes):
                attention = mask_BN if samples else torch.ones_like(mask_BN)
                of_batch = model(tokens_BN, attention_mask=attention, use_cache=False).logits
            for row, s in enumerate(samples):
                own = of_batch[row, : int(mask_BN[row].sum())]
                assert s not in logits or torch.equal(logits[s], own), "two passes with the same weights"
                logits[s] = own
    timelines.append(step.timeline())
    return logits


def train_dense(case: Case) -> dict:
    """The reference."""
    model = tiny_model(case.family).train()
    optimizer = torch.optim.AdamW(model.parameters(), **SETTINGS)
    case, losses, logits = replace(case, in_flight=False), [], {}
    for number in range(case.num_steps):
        now = replace(case, plan=case.plans[number % len(case.plans)])
        for group in groups_of(now.plan):
            loss = 0.0
            for m, rank in np.ndindex(len(now.plan.replica_MLRB), now.plan.num_ranks):
                if m in group and now.batch(m, rank)[0]:
                    loss += run_batch(model, now, m, rank, 1 / num_targets(case))[1]
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss / num_targets(case))
    return {"losses": losses, "logits": logits, "weights": {name: p.detach() for name, p in model.named_parameters()}}


def misuse_residents(case: Case, folder) -> dict[str, str]:
    """Leave out passes, step early or late, on one rank or with another model; groups are [0, 1] and [2]."""
    model, rank = load(case, folder), dist.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    other = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=1e-3)

    def run(*actions):
        with execute_plan(model, case.plan, case.demand) as step:
            for action in actions:
                if callable(action):
                    action()
                else:
                    run_batch(model, case, action, rank, 1.0, step)

    def late():
        model = load(case, folder)
        samples, tokens_BN, mask_BN = case.batch(0, rank)
        routes = BatchRoutes.padded(case.trace.select(samples), mask_BN)
        with execute_plan(model, case.plan, case.demand) as step, step.micro_batch(0, routes):
            loss = model(tokens_BN, attention_mask=mask_BN, use_cache=False).logits.sum()
        loss.backward()

    def give_up():
        raise RuntimeError("out of patience")

    def user_error():
        try:
            run(0, give_up)
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}"

    return {
        "the last micro-batch skipped": message_of(lambda: run(0)),
        "a group left early": message_of(lambda: run(0, 2, 1)),
        "an early optimizer step": message_of(lambda: run(0, optimizer.step, 1, 2)),
        "backward after the plan": message_of(late),
        "an optimizer step on one rank": message_of(
            lambda: run(0, 1, *[optimizer.step] * rank, 2, *[optimizer.step] * rank, 0, 1)
        ),
        "another model's optimizer": message_of(lambda: run(0, other.step, 1, optimizer.step, 2)),
        "an error of the user": user_error(),
        "afterwards": message_of(lambda: run(0, 1, optimizer.step, 2)),
    }
