"""Several optimizer steps on several ranks, homes moving in between, and the same dense in one process."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from relibra import Budget, plan_step
from relibra.parallel import execute_plan, logical_parameters, relocate
from relibra.parallel.replicas.replica_gradients import LayerReplicas
from relibra.parallel.rows.exchange import AllToAll
from relibra.planning.plan import StepPlan
from relibra.replay.routers import is_recompute
from relibra.timeline import Timeline
from tests.parallel import ranks_at_work
from tests.parallel.faults import before
from tests.parallel.ranks_at_work import Case, load, num_targets, run_batch, step_on_rank
from tests.planning.cases import cluster
from tests.replay.tiny_models import tiny_model

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
    budget, machine = Budget(slots=plan.slots, move_homes=False, pack_samples=False), cluster(1, plan.num_ranks)
    planned = plan_step(case.demand, machine, budget, "relibra_paper_tokens", previous=there, never_worse=False)
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


def watched_step(case: Case, folder) -> dict:
    """Fail in the middle of a step, then do it twice; return the last one with its timeline, and what the slots held.

    wrong       replicas whose weights were not those of their homes, in a forward or backward pass
    memory      where the slots were
    tracked     parameters, entries of the state and of the optimizer that share memory with the slots
    """
    model = load(case, folder)
    experts = {name: weight.clone() for name, weight in logical_parameters(model) if ".experts." in name}
    found: dict = {"wrong": [], "compared": Counter(), "memory": set()}

    def compare(replicas: LayerReplicas, when: str) -> None:
        replicas.schedule.slots.state.wait_for_push()
        for name, shared in replicas.buffer.weights.items():
            found["memory"].add((name, shared.data_ptr()))
            home_E = experts[f"model.layers.{replicas.tables.place.layer_id}.mlp.experts.{name}"]
            for _, push in replicas.tables.pushes_to_here:
                found["compared"][when] += 1
                if not torch.equal(replicas.weights_of(push.slot)[name][0], home_E[push.expert].to(shared.dtype)):
                    found["wrong"].append((when, replicas.tables.place.layer_id, name, push))

    with (
        before(LayerReplicas, "wait_for_weights", lambda replicas: compare(replicas, "forward")),
        before(LayerReplicas, "send_gradients", lambda replicas, *_: compare(replicas, "backward")),
        mock.patch.object(ranks_at_work, "load", return_value=model),
        noted_timelines() as timelines,
    ):
        try:
            with before(AllToAll, "move", interrupt):
                step_on_rank(case, folder)
        except InterruptedError as error:
            found["interrupted"] = str(error)
        step_on_rank(case, folder)
        model.zero_grad()
        found |= step_on_rank(case, folder) | {"timeline": timelines[-1]}
    optimizer = torch.optim.AdamW(model.parameters())
    kept = [*model.parameters(), *model.state_dict().values(), *optimizer.param_groups[0]["params"]]
    places = {getattr(tensor, "_local_tensor", tensor).untyped_storage().data_ptr() for tensor in kept}
    found["tracked"] = places & {place for _, place in found["memory"]}
    return found


def interrupt(sizes: AllToAll, *_: object) -> None:
    """Fail on all ranks alike where rows of the second layer are about to go, and weights are on their way."""
    if sizes.place.layer_id == 1:
        raise InterruptedError("in layer 1")


def step_with_a_slow_rank(case: Case, folder) -> dict:
    """Do a step in which rank 1 thinks before the exchanges of the second layer."""
    slow = dist.get_rank() == 1

    def think(sizes: AllToAll, *_: object) -> None:
        if slow and sizes.place.layer_id == 1 and sizes.stage == "dispatch" and not is_recompute():
            time.sleep(0.5)

    with before(AllToAll, "move", think), noted_timelines() as timelines:
        step_on_rank(case, folder)
    return {"timeline": timelines[0]}


@contextmanager
def noted_timelines():
    """Collect the timeline of each plan that `step_on_rank` executes."""
    timelines: list[Timeline] = []

    @contextmanager
    def noted(*args, **kwargs):
        with execute_plan(*args, **kwargs) as step:
            yield step
        timelines.append(step.timeline())

    with mock.patch.object(ranks_at_work, "execute_plan", noted):
        yield timelines


def step_with_frozen_experts(case: Case, folder) -> dict:
    """Do a step in which only the rest of the model is trained."""

    def load_frozen(*args):
        model = load(*args)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".experts." not in name)
        return model

    with mock.patch.object(ranks_at_work, "load", load_frozen):
        return step_on_rank(case, folder)


def plans_of(*cases: Case) -> tuple[StepPlan, ...]:
    return tuple(case.plan for case in cases)
