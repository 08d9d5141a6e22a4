"""Training steps whose layers balance live, and what they refuse."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from relibra.parallel import balance_live, execute_plan, relocate
from relibra.parallel import live as live_balancing
from relibra.parallel.balanced import balanced_layers
from relibra.planning.traffic.rank_tables import layer_tables
from tests.parallel import ranks_at_work, trainings
from tests.parallel.ranks_at_work import Case, load, run_batch, step_on_rank
from tests.parallel.refusals import message_of, one_parameter_less
from tests.parallel.trainings import train_on_rank


def live_step(case: Case, folder) -> dict:
    """Do this rank's share of a step; the plan of the case only says schedule, slots and nodes."""
    model, plan, computed = load(case, folder), case.plan, []

    def noted(*of_layer):
        tables = layer_tables(*of_layer)
        computed.append(int(tables.receive_RP.sum()))
        return tables

    with (
        mock.patch.object(live_balancing, "layer_tables", noted),
        balance_live(
            model, slots=plan.slots, ranks_per_node=plan.ranks_per_node, sums=case.sums, dispatch=plan.dispatch
        ) as live,
        mock.patch.object(ranks_at_work, "load", return_value=model),
    ):
        found = step_on_rank(replace(case, follow_plan=False), folder)
    stages = sorted({event.stage for event in live.timeline().events})
    reached = {"skew": tuple(live.skew()), "copies": live.num_copies, "stages": stages, "computed": computed}
    return found | reached | {"timeline": live.timeline()}


def long_live_step(case: Case, folder) -> dict:
    """Do the same while few events are kept."""
    with mock.patch.object(live_balancing, "MOST_EVENTS", 10):
        return live_step(case, folder)


def live_step_without_replay(case: Case, folder) -> dict:
    """Do the same with the model's own routes."""
    with mock.patch.object(Case, "routes", return_value=None):
        return live_step(case, folder)


def live_training(case: Case, folder) -> dict:
    """Train with experts at the homes of the plan."""
    model = load(case, folder)
    relocate(model, case.plan.physical_to_logical_map)
    with (
        balance_live(model, slots=case.plan.slots, sums=case.sums),
        mock.patch.object(trainings, "load", return_value=model),
    ):
        return train_on_rank(replace(case, follow_plan=False), folder)


def refuse_all_live(case: Case, folder) -> dict[str, str]:
    """Return by name what is said to whoever asks for what cannot be done, and what a legal step says at the end."""
    model, rank = load(case, folder), dist.get_rank()

    def run(**settings) -> None:
        with balance_live(model, **settings):
            run_batch(model, replace(case, follow_plan=False), 0, rank, 1.0)

    def other_modes() -> None:
        with balance_live(model), torch.set_grad_enabled(rank == 0):
            model(torch.ones(1, 4, dtype=torch.long), use_cache=False)

    def inside_a_plan() -> None:
        with execute_plan(model, case.plan, case.demand):
            run()

    def plan_inside() -> None:
        with balance_live(model), execute_plan(model, case.plan, case.demand):
            pass

    def other_homes() -> None:
        layer = balanced_layers(model)[0]
        with mock.patch.object(layer, "physical_to_logical_E", np.roll(layer.physical_to_logical_E, rank)):
            run()

    def other_shapes(**settings) -> None:
        with one_parameter_less(balanced_layers(model)[1]), balance_live(model, **settings):
            pass

    return {
        "slots": message_of(lambda: run(slots=-1)),
        "different shapes": message_of(other_shapes),
        "different shapes without slots": message_of(lambda: other_shapes(slots=0)),
        "half a slot": message_of(lambda: run(slots=1.5)),
        "tolerance": message_of(lambda: run(tolerance=float("nan"))),
        "sums": message_of(lambda: run(sums="canon")),
        "ranks per node": message_of(lambda: run(ranks_per_node=3)),
        "settings": message_of(lambda: run(slots=1 + rank)),
        "dispatch": message_of(lambda: run(dispatch="rails")),
        "two dispatches": message_of(lambda: run(dispatch=["flat", "hierarchical"][rank])),
        "homes": message_of(other_homes),
        "inside a plan": message_of(inside_a_plan),
        "a plan inside": message_of(plan_inside),
        "modes": message_of(other_modes),
        "another point": message_of(lambda: run() if rank else execute_plan(model, case.plan, case.demand).__enter__()),
        "afterwards": message_of(run),
    }
