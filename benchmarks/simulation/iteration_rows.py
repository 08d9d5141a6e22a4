"""Rows of `relibra bench iteration`: the levers of one cell under each balancer, and the settings of peers.

Ratios are of the training stages, at equal passes, prompts and rollouts ahead; `ratio_to_best_setting` is not, and its
row names the peer's setting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from benchmarks.simulation.iteration_cells import TOKENS, Case, Cell, draw_lengths, make_case, repeat_layers
from benchmarks.simulation.iteration_peers import PEER_SETTINGS, PeerSetting
from relibra.planning.budget import PEER_SLOTS
from relibra.planning.planner import plan_step
from relibra.planning.registry import find_balancer
from relibra.planning.validation import validate_plan
from relibra.rl.batch.plan_budget import plan_budget
from relibra.rl.config.settings import PlanSettings
from relibra.simulation import Execution
from relibra.simulation.training_passes import (
    Activations,
    Iteration,
    Levers,
    OldLogProbs,
    PredictedIteration,
    TrainingPasses,
    simulate_passes,
)

Row = dict[str, Any]
RELIBRA, DEFAULT = "relibra", "relibra (default)"
PEERS = ("eplb", "ultraep", "moonep_node", "moonep", "live")
BALANCERS = (RELIBRA, "static", *PEERS)
HOST_MEMORY = 600e9
"""Bytes per second of a node's host memory, an assumption: AdamW on the CPU reads and writes 30 bytes per weight."""
PASSES: dict[OldLogProbs, str] = {
    "all": "old log-probs of all",
    "later": "old log-probs but of the first mini-batch",
    "none": "no old log-probs",
}
ACTIVATIONS: tuple[Activations, ...] = ("recomputed", "kept", "chosen")


@dataclass(frozen=True, kw_only=True, eq=False)
class Planned:
    """A case planned by every balancer, and its simulated passes.

    passes   by balancer and by whether every rank holds the weights outside of experts
    """

    case: Case
    passes: dict[tuple[str, bool], TrainingPasses]
    skew: dict[str, float]
    slots: dict[str, int]


class Found(NamedTuple):
    """An iteration, and what it was found with."""

    iteration: PredictedIteration
    planned: Planned


def plan_case(case: Case) -> Planned:
    """Plan a case with every balancer, as `relibra bench step` does, and simulate its passes with all layers."""
    budget = replace(plan_budget(PlanSettings(), case.memory_gib), rank_tokens=case.tokens)
    if case.cluster.num_nodes == 1:
        budget = replace(budget, pack_samples=False)
    passes, skew, slots = {}, {}, {}
    for name in BALANCERS:
        allowed = budget
        if name != RELIBRA:
            allowed = replace(budget, slots=slots[RELIBRA] or PEER_SLOTS, pack_samples=False)
        if name == "eplb":  # its slots stay with their layer
            one = case.part.expert.weight_bytes + case.part.expert.gradient_bytes
            fitting = int(case.memory_gib * 2**30 // (case.part.moe_layers * one))
            allowed = replace(allowed, slots=min(slots[RELIBRA] or PEER_SLOTS, fitting))
        plan = plan_step(
            case.demand, case.cluster, allowed, name, expert=case.part.expert, never_worse=name == RELIBRA
        )  # fmt: skip
        scheduled = plan.scheduled(case.demand)
        validate_plan(plan, case.cluster.topology, scheduled)
        skew[name], slots[name] = plan.skew(scheduled), plan.slots
        whole = repeat_layers(plan, scheduled, case.whole.moe_layers)
        for dense in (False, True):
            how = Execution(live=find_balancer(name).sees == "live", shard_dense=not dense)
            passes[name, dense] = simulate_passes(
                *whole, case.cluster, case.whole, how, steps_served=budget.steps_served
            )  # fmt: skip
    return Planned(case=case, passes=passes, skew=skew, slots=slots)


def rows_of(cell: Cell) -> list[Row]:
    """Return all rows of a cell: relibra's levers, balancers at the default's levers, and settings of peers."""
    lengths_S = draw_lengths(cell)
    prompt_S = np.full(len(lengths_S), cell.prompt)
    rows: list[Row] = []
    for prompts in ("repeated", "once"):
        planned = [plan_case(make_case(cell, tokens, once=prompts == "once")) for tokens in TOKENS]
        case = planned[0].case
        iteration = Iteration.of_lengths(lengths_S + prompt_S, prompt_S, case.cluster, case.whole)
        found = [*lever_rows(planned, iteration)]
        found += [peer_row(planned, iteration, one) for one in PEER_SETTINGS if one.prompts == prompts]
        rows += [{**row, "prompts": prompts} for row in found]
    for row in rows:
        if row["plan"] == RELIBRA and row["prompts"] == "once" and row["table"] == "default":
            row["plan"] = DEFAULT
        elif row["table"] == "default":
            row["table"] = "levers"
    return with_best_setting(rows)


def lever_rows(planned: list[Planned], iteration: Iteration) -> Iterator[Row]:
    """Yield a row per levers for relibra, and for every other balancer with those of the default."""
    exact: OldLogProbs = "later" if planned[0].case.cell.mini_batches > 1 else "none"
    for old, activations, ahead in product(dict.fromkeys(("all", exact, "none")), ACTIVATIONS, (0, 1)):
        is_default = (old, activations) == (exact, "chosen")
        if ahead and not is_default:
            continue
        levers = Levers(old_log_probs=old, activations=activations, ahead=ahead)
        found = fastest(planned, at_levers(iteration, levers))
        for name in BALANCERS if is_default and not ahead else (RELIBRA,):
            row = made_row(name, found, levers)
            yield {**row, "table": "default" if is_default and not ahead and name == RELIBRA else "levers"}


def at_levers(iteration: Iteration, levers: Levers) -> Callable[[TrainingPasses, Case], PredictedIteration]:
    """Return what `fastest` calls for relibra and balancers: the iteration of some levers."""
    return lambda passes, _: iteration.predict(passes, levers)


def fastest(
    planned: list[Planned], predict: Callable[[TrainingPasses, Case], PredictedIteration], *, whole_dense: bool = False
) -> dict[str, Found]:
    """Return the fastest iteration of every balancer that fits, over numbers of tokens; where none fits, the least."""
    found = {}
    for name in BALANCERS:
        sizes = [Found(predict(one.passes[name, whole_dense], one.case), one) for one in planned]
        found[name] = min(
            sizes, key=lambda each: (0 if each[0].fits else each[0].bytes, each[0].training)
        )  # fmt: skip
    return found


def made_row(balancer: str, found: dict[str, Found], levers: Levers) -> Row:
    """Return the row of one balancer beside all balancers at equal levers, of which those that fit count."""
    own, planned = found[balancer]
    cell, case = planned.case.cell, planned.case
    fitting = [one for one in PEERS if found[one].iteration.fits] or list(PEERS)
    best = min(fitting, key=lambda one: found[one].iteration.training)
    return {
        "case": cell.name,
        "label": "simulated",
        "unit": "seconds of the stages that train; ratios are of them",
        "seed": 0,
        "repetitions": 1,
        "ranks": cell.ranks,
        "dispatch": cell.exchange,
        "skew_asked": cell.skew,
        "mini_batches": cell.mini_batches,
        "lengths": f"{cell.prompt} / {cell.response}",
        "plan": balancer,
        "balancer": balancer,
        "passes": f"{PASSES[levers.old_log_probs]}, activations {levers.activations}",
        "ahead": levers.ahead,
        "seconds": own.training,
        "iteration_seconds": own.seconds,
        "gib": own.bytes / 2**30,
        "fits": own.fits,
        "kept": str(own.kept),
        "tokens": case.tokens,
        "skew": planned.skew[balancer],
        "slots": planned.slots[balancer],
        "ratio_to_static": found["static"].iteration.training / own.training,
        "ratio_to_best_peer": found[best].iteration.training / own.training,
        "best_peer": best,
        "peer": "",
        "source": "",
    }


def peer_row(planned: list[Planned], iteration: Iteration, one: PeerSetting) -> Row:
    """Return the row of a peer's setting, with the fastest balancer at that setting where it takes the best."""
    levers = Levers(
        old_log_probs=one.old_log_probs if planned[0].case.cell.mini_batches > 1 else one.single,
        activations=one.activations,
        ahead=one.ahead,
    )
    found = fastest(
        planned, lambda passes, case: with_moments(passes, levers, iteration, one, case), whole_dense=one.whole_dense
    )
    fitting = [name for name in ("static", *PEERS) if found[name].iteration.fits] or ["static"]
    balancer = "static" if one.balancer == "static" else min(fitting, key=lambda n: found[n].iteration.training)
    # At equal passes: relibra on its own executor and in its own memory.
    equal = replace(levers, activations="recomputed" if one.activations == "recomputed" else "chosen")
    own = fastest(planned, at_levers(iteration, equal))[RELIBRA].iteration
    return {
        **made_row(balancer, found, levers),
        "table": "peers",
        "plan": f"{one.name} ({one.setting})",
        "ratio_to_relibra": found[balancer].iteration.training / own.training,
        "peer": one.name,
        "setting": one.setting,
        "words": one.words,
        "source": one.source,
    }


def with_moments(
    passes: TrainingPasses, levers: Levers, iteration: Iteration, one: PeerSetting, case: Case
) -> PredictedIteration:
    """Return the iteration with a peer's place of moments: the faster one that fits, where the peer has both."""
    steps, own = case.cell.mini_batches, passes.parts["optimizer"] / 8  # weights of a rank
    on_cpu = max(30 * own * case.cluster.ranks_per_node / HOST_MEMORY, float(case.cluster.host.seconds(4 * own)))
    added = steps * on_cpu - passes.update.terms["optimizer"]
    freed = {"optimizer": 0.0, "weights": passes.parts["weights"] - 4 * own}
    found = []
    if one.moments != "cpu":
        found.append(iteration.predict(passes, levers))
    if one.moments != "device":
        there = iteration.predict(replace(passes, parts={**passes.parts, **freed}), levers)
        found.append(replace(there, stages={**there.stages, "update": there.stages["update"] + added}))
    return min(found, key=lambda each: (0 if each.fits else each.bytes, each.training))


def with_best_setting(rows: list[Row]) -> list[Row]:
    """Return the rows of a cell with the fastest setting of a peer that fits over theirs, whatever it leaves out.

    Also over the fastest one that repeats prompts.
    """
    peers = [row for row in rows if row["peer"] and row["fits"]]
    repeating = [row for row in peers if row["prompts"] == "repeated"]
    found: Row = {}
    for key, among in (("best_setting", peers), ("best_repeating_setting", repeating)):
        best = min(among, key=lambda row: row["seconds"])
        found |= {key: f"{best['plan']}: {best['passes']}, {best['balancer']}", f"_{key}": best["seconds"]}
    return [
        {
            **row,
            **{key: found[key] for key in ("best_setting", "best_repeating_setting")},
            "ratio_to_best_setting": found["_best_setting"] / row["seconds"],
            "ratio_to_best_repeating_setting": found["_best_repeating_setting"] / row["seconds"],
        }
        for row in rows
    ]
