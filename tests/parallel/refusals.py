"""What ranks do that cannot be planned: some of it is refused with a message, some of it runs at home instead."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist

from relibra.errors import RelibraError
from relibra.parallel import execute_plan, relocate
from relibra.parallel.balanced import balanced_layers
from relibra.replay import BatchRoutes
from tests.parallel.ranks_at_work import load, run_batch, step_on_rank
from tests.parallel.trainings import noted_timelines


@contextmanager
def one_parameter_less(layer):
    """Let the experts of a layer have another shape than those of the others."""
    names, layer.parameter_names = layer.parameter_names, layer.parameter_names[:1]
    others = [getattr(layer.experts, name).requires_grad_(False) for name in names[1:]]
    try:
        yield
    finally:
        layer.parameter_names = names
        for other in others:
            other.requires_grad_(True)


def message_of(action) -> str:
    try:
        action()
    except RelibraError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def refuse_all(case, folder) -> dict[str, str]:
    """Return by name what is said to whoever asks for what cannot be done, and last what a legal step says."""
    model = load(case, folder)
    return {
        "sums": message_of(lambda: execute(case, model, sums="canon")),
        **_refuse_order(case, model),
        **_refuse_differences_between_ranks(case, model),
        **_refuse_other_plans_and_models(case, model, folder),
        "an error of the user": user_error(case, model),
        "afterwards": message_of(lambda: execute(case, model)),
    }


def execute(case, model, *, plan=None, micro_batch=0, **settings) -> None:
    with execute_plan(model, case.plan if plan is None else plan, case.demand, **settings) as step:
        run_batch(model, case, micro_batch, dist.get_rank(), 1.0, step)


def _refuse_order(case, model) -> dict[str, str]:
    """Enter and leave plans and micro-batches where that is not allowed."""

    def nest():
        with execute_plan(model, case.plan, case.demand) as step:
            samples, _, mask_BN = case.batch(0, dist.get_rank())
            routes = BatchRoutes.padded(case.trace.select(samples), mask_BN)
            with step.micro_batch(0, routes), step.micro_batch(1, routes):
                pass

    def nest_plans():
        with execute_plan(model, case.plan, case.demand):
            execute(case, model)

    return {
        "wrong micro-batch": message_of(lambda: execute(case, model, micro_batch=5)),
        "micro-batch in micro-batch": message_of(nest),
        "plan in plan": message_of(nest_plans),
    }


def _refuse_differences_between_ranks(case, model) -> dict[str, str]:
    rank = dist.get_rank()

    def other_homes():
        layers = list(balanced_layers(model).values())
        homes_E = layers[1].physical_to_logical_E
        layers[1].physical_to_logical_E = homes_E[::-1].copy() if rank else homes_E
        try:
            execute(case, model)
        finally:
            layers[1].physical_to_logical_E = homes_E

    def gradients_on_one():
        with torch.set_grad_enabled(rank == 1), execute_plan(model, case.plan, case.demand) as step:
            step.micro_batch(0, None).__enter__()

    def evaluation_on_one():
        model.train(rank == 0)
        try:
            execute(case, model)
        finally:
            model.train()

    def relocate_on_one():
        if rank == 0:
            relocate(model, case.plan.physical_to_logical_map)
        execute(case, model)

    return {
        "relocate on one rank": message_of(relocate_on_one),
        "evaluation mode on one rank": message_of(evaluation_on_one),
        "different micro-batches": message_of(lambda: execute(case, model, micro_batch=rank)),
        "different sums": message_of(lambda: execute(case, model, sums="canonical" if rank else "fast")),
        "different homes": message_of(other_homes),
        "gradients on one rank": message_of(gradients_on_one),
    }


def _refuse_other_plans_and_models(case, model, folder) -> dict[str, str]:
    """Bring a plan, a model or routes that do not belong together."""
    moved = case.plan.physical_to_logical_map[:, ::-1].copy()
    other_homes = replace(case.plan, physical_to_logical_map=moved)
    other_layers = replace(case.plan, layer_ids=case.plan.layer_ids + 1)

    def state_dict_of_moved():
        relocate(model, moved)
        try:
            model.state_dict()
        finally:
            relocate(model, case.plan.physical_to_logical_map)

    def other_shapes(plan):
        layer = list(balanced_layers(model).values())[1]
        with one_parameter_less(layer), execute_plan(model, plan, case.demand):
            pass

    def other_rows():
        samples, tokens_BN, mask_BN = case.batch(0, dist.get_rank())
        longer_BN = torch.nn.functional.pad(mask_BN, (0, 1))
        routes = BatchRoutes.padded(case.trace.select(samples), longer_BN)
        with execute_plan(model, case.plan, case.demand) as step, step.micro_batch(0, routes):
            model(tokens_BN, use_cache=False)

    def all_to_all():
        execute(case, load(replace(case, implementation="all_to_all"), folder))

    return {
        "a state dict of moved experts": message_of(state_dict_of_moved),
        "moved homes": message_of(lambda: execute(case, model, plan=other_homes)),
        "other layers": message_of(lambda: execute(case, model, plan=other_layers)),
        "experts of different shapes": message_of(lambda: other_shapes(case.plan)),
        "different shapes without replicas": message_of(lambda: other_shapes(case.plans[0])),
        "routes of another batch": message_of(other_rows),
        "all_to_all": message_of(all_to_all),
        "tensor parallelism": message_of(lambda: load(case, folder, tp_size=2)),
        "recompute outside": message_of(lambda: recompute_outside(case, folder, routed=True)),
        "recompute filler outside": message_of(lambda: recompute_outside(case, folder, routed=False)),
    }


def recompute_outside(case, folder, *, routed: bool) -> None:
    """Leave the micro-batch, but not the plan, before a backward pass that recomputes the layers."""
    model = load(replace(case, checkpointing=True), folder)
    samples, tokens_BN, mask_BN = case.batch(0, dist.get_rank())
    routes = BatchRoutes.padded(case.trace.select(samples), mask_BN) if routed else None
    with execute_plan(model, case.plan, case.demand) as step:
        with step.micro_batch(0, routes):
            loss = model(tokens_BN, attention_mask=mask_BN, use_cache=False).logits.sum()
        loss.backward()


def user_error(case, model) -> str:
    """Raise what is no failure of a peer, though it names one, where pushes are on their way; return what arrives."""
    samples, tokens_BN, mask_BN = case.batch(0, dist.get_rank())
    routes = BatchRoutes.padded(case.trace.select(samples), mask_BN)
    try:
        with execute_plan(model, case.plan, case.demand) as step, step.micro_batch(0, routes):
            model(tokens_BN, attention_mask=mask_BN, use_cache=False)
            raise RuntimeError("the reward model has no connection to its peer")
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"


def fall_back(case, folder) -> dict:
    """Do a step of which something cannot be followed; return also the log, and which micro-batches ran at home.

    Rank r has `case.plans[r]`, if there are any.
    """
    if case.plans:
        case = replace(case, plan=case.plans[dist.get_rank()])
    with logged() as lines, noted_timelines() as timelines:
        result = step_on_rank(case, folder)
    at_home = sorted({event.micro_batch for event in timelines[0].events if event.stage == "at home"})
    return result | {"lines": lines, "at home": at_home}


@contextmanager
def logged():
    """Collect the lines that the executor logs."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    log = logging.getLogger("relibra.parallel.fallback")
    log.addHandler(handler)
    try:
        yield lines
    finally:
        log.removeHandler(handler)
