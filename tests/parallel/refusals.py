"""What a rank does to be refused; each returns the message."""

from __future__ import annotations

import time
from dataclasses import replace

import torch
import torch.distributed as dist

from relibra.errors import RelibraError
from relibra.parallel import execute_plan
from relibra.replay import BatchRoutes, replay_routing

from .ranks_at_work import load, run_batch


def message_of(action) -> str:
    try:
        action()
    except RelibraError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def refuse_all(case, folder) -> dict[str, str]:
    rank = dist.get_rank()
    model = load(case, folder)

    def execute(plan=case.plan, demand=case.demand, model=model, micro_batch=0, routes=case, valid_T=None):
        with execute_plan(model, plan, demand) as step:
            if valid_T is None:
                run_batch(model, routes, micro_batch, rank, 1.0, step)
            else:
                with step.micro_batch(micro_batch, valid_T):
                    model(case.batch(0, rank)[1], use_cache=False)

    def nest():
        with execute_plan(model, case.plan, case.demand) as step, step.micro_batch(0), step.micro_batch(1):
            pass

    def nest_plans():
        with execute_plan(model, case.plan, case.demand):
            execute()

    moved = case.plan.physical_to_logical_map[:, ::-1].copy()
    negative = replace(case.plan, balancer="by hand", quota_MLRB=case.plan.quota_MLRB - 1)
    return {
        "wrong routes": message_of(lambda: execute(routes=replace(case, trace=case.trace.select([2, 3, 0, 1])))),
        "wrong micro-batch": message_of(lambda: execute(micro_batch=5)),
        "micro-batch in micro-batch": message_of(nest),
        "plan in plan": message_of(nest_plans),
        "moved homes": message_of(lambda: execute(plan=replace(case.plan, physical_to_logical_map=moved))),
        "other layers": message_of(lambda: execute(plan=replace(case.plan, layer_ids=case.plan.layer_ids + 1))),
        "different plans": message_of(lambda: execute(plan=negative if rank else case.plan)),
        "illegal plan": message_of(lambda: execute(plan=negative)),
        "valid_T of another batch": message_of(lambda: execute(valid_T=torch.zeros(3, dtype=torch.bool))),
        "all_to_all": message_of(lambda: execute(model=load(replace(case, implementation="all_to_all"), folder))),
        "tensor parallelism": message_of(lambda: load(case, folder, tp_size=2)),
        "recompute outside": message_of(lambda: recompute_outside(case, folder)),
        "afterwards": message_of(execute),
    }


def recompute_outside(case, folder) -> None:
    """Leave the micro-batch, but not the plan and the replay, before a backward pass that recomputes the layers."""
    model = load(replace(case, checkpointing=True), folder)
    samples, tokens_BN, mask_BN = case.batch(0, dist.get_rank())
    routes = BatchRoutes.padded(case.trace.select(samples), mask_BN)
    with execute_plan(model, case.plan, case.demand) as step, replay_routing(model, routes):
        with step.micro_batch(0):
            loss = model(tokens_BN, use_cache=False).logits.sum()
        loss.backward()


def one_rank_is_wrong(case, folder) -> tuple[str, float]:
    """Rank 0 has other routes than the plan and leaves; return what each rank says, and after how many seconds."""
    rank, start = dist.get_rank(), time.monotonic()
    model = load(case, folder)
    trace = case.trace.select([2, 1, 0, 3]) if rank == 0 else case.trace
    message = "no error"
    try:
        with execute_plan(model, case.plan, case.demand) as step:
            run_batch(model, replace(case, trace=trace), 0, rank, 1.0, step)
    except RuntimeError as error:  # EngineError is one; so is what gloo raises about a peer that went away
        message = f"{type(error).__name__}: {error}"
    dist.destroy_process_group()
    return message, time.monotonic() - start
