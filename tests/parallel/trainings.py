"""Several optimizer steps on several ranks, homes moving in between, and the same dense in one process."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from relibra import Budget, plan_step
from relibra.parallel import execute_plan, logical_parameters, relocate
from relibra.planning.plan import StepPlan
from tests.planning.cases import cluster
from tests.replay.tiny_models import tiny_model

from .ranks_at_work import Case, load, num_targets, run_batch

SETTINGS = {"lr": 1e-3, "eps": 1e-5, "weight_decay": 0.01, "foreach": False}
"""Of AdamW; an epsilon far above the rounding of gradients, so that no sign of a tiny one decides a whole step."""


def moved(case: Case, seed: int) -> Case:
    """Return the case with homes drawn at random, and replicas planned for them."""
    rng = np.random.default_rng(seed)
    plan = case.plan
    random_LE = np.stack([rng.permutation(plan.num_experts) for _ in plan.layer_ids]).astype(np.int16)
    nobody = np.full_like(plan.replica_MLRB, -1)
    there = replace(
        plan, physical_to_logical_map=random_LE, replica_MLRB=nobody, quota_MLRB=np.zeros_like(plan.quota_MLRB)
    )
    budget = Budget(slots=plan.slots, move_homes=False, place_samples=False, objective="tokens")
    planned = plan_step(case.demand, cluster(1, plan.num_ranks), budget, previous=there)
    assert (planned.physical_to_logical_map == random_LE).all()
    return replace(case, plan=planned)


def train_on_rank(case: Case, folder) -> dict:
    """Train with one plan after another; return the losses of this rank and all weights in logical order."""
    model = load(case, folder)
    optimizer = torch.optim.AdamW(model.parameters(), **SETTINGS)
    rank, losses = dist.get_rank(), []
    for number in range(case.num_steps):
        plan = case.plans[number % len(case.plans)]
        now = replace(case, plan=plan)
        if case.follow_plan:
            relocate(model, plan.physical_to_logical_map, optimizer)
        with execute_plan(model, plan, case.demand, sums=case.sums) if case.follow_plan else nullcontext() as step:
            loss = 0.0
            for m in range(plan.replica_MLRB.shape[0]):
                loss += run_batch(model, now, m, rank, case.num_ranks / num_targets(case), step)[1]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss / num_targets(case))
    if case.implementation != "relibra":
        return {"losses": losses}
    return {"losses": losses, "weights": {name: weight.clone() for name, weight in logical_parameters(model)}}


def train_dense(case: Case) -> dict:
    """The reference."""
    model = tiny_model(case.family).train()
    optimizer = torch.optim.AdamW(model.parameters(), **SETTINGS)
    losses = []
    for _ in range(case.num_steps):
        loss = 0.0
        for m, rank in np.ndindex(case.plan.replica_MLRB.shape[0], case.plan.num_ranks):
            if case.batch(m, rank)[0]:
                loss += run_batch(model, case, m, rank, 1 / num_targets(case))[1]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss / num_targets(case))
    return {"losses": losses, "weights": {name: p.detach() for name, p in model.named_parameters()}}


def disagree_on_rank(case: Case, folder) -> dict:
    """Run a step with routes of other samples on rank 1; return what was logged, and the losses."""
    model = load(case, folder)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("relibra.parallel.execution").addHandler(handler)
    rank = dist.get_rank()
    trace = case.trace.select([2, 1, 0, 3]) if rank == 1 else case.trace
    with execute_plan(model, case.plan, case.demand) as step:
        own, _, _ = run_batch(model, replace(case, trace=trace), 0, rank, 1.0, step)
    return {"lines": lines, "logits": own, "follows": step.follows_plan}


def plans_of(*cases: Case) -> tuple[StepPlan, ...]:
    return tuple(case.plan for case in cases)
