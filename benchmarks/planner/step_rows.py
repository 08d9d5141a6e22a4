"""Rows of `relibra bench step`: each plan of a cell simulated, and held against static, peers and the default's own
other settings.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.planner.step_cells import Case
from relibra.planning.budget import PEER_SLOTS, Budget
from relibra.planning.costs.copies import slot_bytes
from relibra.planning.costs.layer_costs import LayerCosts
from relibra.planning.plan import StepPlan
from relibra.planning.planner import plan_step
from relibra.planning.registry import find_balancer
from relibra.planning.validation import validate_plan
from relibra.rl.batch.plan_budget import plan_budget
from relibra.rl.config.settings import PlanSettings
from relibra.simulation import Execution, with_mini_batches
from relibra.simulation.step.group_run import run_group
from relibra.simulation.step.stage_costs import StageCosts
from relibra.simulation.step.step_result import SimulatedStep
from relibra.simulation.step.training_step import assemble, costs_of

Row = dict[str, Any]
DEFAULT = "relibra (default)"
PEERS = ("eplb", "ultraep", "moonep_node", "moonep", "live")
OWN: dict[str, dict[str, Any]] = {
    "one slot": {"slots": 1},
    "two slots": {"slots": 2},
    "no residents": {"memory_gib": 0.0},
    "homes kept": {"move_homes": False},
    "no packing": {"pack_samples": False},
}
"""Other settings of the default's budget."""
BEHIND = 0.005
"""Share of a plan's seconds by which the default may be slower."""
APART = 0.01
"""Share of their simulated seconds by which two plans of a cell differ where their order counts."""


def rows_of(case: Case) -> list[Row]:
    """Plan and simulate the step of a case with every balancer; peers have as many slots as the default's plan.

    EPLB's slots all stay with their layer: it has as many as fit, and a row of its own with more.
    """
    budget = default_budget(case)
    default, row = planned_row(case, DEFAULT, "relibra", budget)
    slots = default.slots or PEER_SLOTS
    peers = replace(budget, slots=slots, pack_samples=False)
    rows = [planned_row(case, "static", "static", budget)[1]]
    fitting = replace(peers, slots=min(slots, slots_that_stay(case)))
    rows += [planned_row(case, name, name, fitting if name == "eplb" else peers)[1] for name in PEERS] + [row]
    if fitting != peers:
        rows.append(planned_row(case, "eplb beyond memory", "eplb", peers)[1])
    own = {name: replace(budget, **changes) for name, changes in OWN.items()}
    rows += [planned_row(case, name, "relibra", changed)[1] for name, changed in own.items() if changed != budget]
    rows = with_ratios(rows)
    ahead = {behind["plan"]: {"table": "ahead", "ahead": behind["ahead"]} for behind in cells_behind(rows)}
    of_default = {DEFAULT: {"table": case.cell.table}}
    return [{**one, **(of_default | ahead).get(one["plan"], {"table": "plans"})} for one in rows]


def slots_that_stay(case: Case) -> int:
    """Return how many slots fit into the memory of a case if each layer has its own."""
    one = case.model.expert.weight_bytes + case.model.expert.gradient_bytes
    return int(case.memory_gib * 2**30 // (len(case.demand.layer_ids) * one))


def default_budget(case: Case) -> Budget:
    """Return what training lets the plan of this step use; on one node it packs no samples."""
    budget = replace(plan_budget(PlanSettings(), case.memory_gib), rank_tokens=case.cell.tokens)
    return budget if case.cluster.num_nodes > 1 else replace(budget, pack_samples=False)


def planned_row(case: Case, name: str, balancer: str, budget: Budget) -> tuple[StepPlan, Row]:
    """Plan and simulate the step of a case; return the plan and its row."""
    expert = case.model.expert
    start = time.perf_counter()
    plan = plan_step(case.demand, case.cluster, budget, balancer, expert=expert, never_worse=balancer == "relibra")
    spent = time.perf_counter() - start
    costs, step = simulate(plan, case, balancer)
    charged = step.with_relocation_over(budget.steps_served)
    scheduled = plan.scheduled(case.demand)
    M, L, R, _ = plan.replica_MLRB.shape
    sent = {kind: float(bytes_R.sum()) for kind, bytes_R in step.sent_bytes.items()}
    return plan, {
        "case": case.cell.name,
        "label": "simulated",
        "unit": f"seconds of one step with 1/{budget.steps_served} of the moves of homes; exchange hidden: model",
        "seed": case.cell.seed,
        "repetitions": 1,
        "ranks": R,
        "dispatch": case.cell.exchange,
        "plan": name,
        "seconds": charged.seconds,
        "seconds_in_full": step.seconds,
        "predicted_seconds": plan.predicted["total"],
        "hidden_exchange_seconds": charged.seconds - sum(hidden_seconds(stage) for stage in costs),
        "exposed_seconds": step.terms["copies"],
        "skew": plan.skew(scheduled),
        "row_bytes": sent["dispatch"] + sent["combine"],
        "network_bytes": step.bytes.rows.between,
        "weight_bytes": sent["push"],
        "gradient_bytes": sent["return"],
        "move_bytes": float(plan.num_moved * expert.state_bytes),
        "moved": plan.num_moved,
        "slots": plan.slots,
        "resident": plan.resident,
        "slot_gib": slot_bytes(plan, expert, num_layers=case.whole.moe_layers) / 2**30,
        "plan_seconds": spent,
        "configuration": f"{M} micro-batches, {L} of {case.whole.moe_layers} layers, "
        f"{len(case.demand.sample_ids)} samples; slots in {case.memory_gib / L * case.whole.moe_layers:.1f} GiB",
    }


def simulate(plan: StepPlan, case: Case, balancer: str) -> tuple[list[StageCosts], SimulatedStep]:
    """Check a plan and simulate it; return the costs of every optimizer step, and the step."""
    scheduled = plan.scheduled(case.demand)
    validate_plan(plan, case.cluster.topology, scheduled)
    scheduled, how = with_mini_batches(scheduled, Execution(live=find_balancer(balancer).sees == "live"))
    how = how.on(case.cluster)
    costs = costs_of(plan, scheduled, case.cluster, case.model, how)
    return costs, assemble(plan, [run_group(costs, how)], case.cluster, case.model, how)


def hidden_seconds(costs: LayerCosts) -> float:
    """Return the seconds by which a step is shorter if rows travel beside experts (label `model`).

    In each micro-batch, layer and pass the longer of the busiest rank's experts and of dispatch with combine counts, in
    place of their sum. Attention, copies and gate weights stay as they are.
    """
    experts_ML = (costs.home_MLR + costs.replica_MLR).max(axis=2)
    rows_ML = costs.exchange.dispatch_ML + costs.exchange.combine_ML
    return float((np.minimum(experts_ML, rows_ML) + np.minimum(2 * experts_ML, rows_ML)).sum())


def with_ratios(rows: list[Row]) -> list[Row]:
    """Return the rows of a cell with the seconds of static, of the best peer and of the best own setting over theirs.

    The best own setting is one of the default's others. Rows hold the same ratios with the exchange hidden.
    """
    groups: dict[str, Callable[[str], bool]] = {
        "static": lambda plan: plan == "static",
        "best_peer": lambda plan: plan in PEERS,
        "best_own_setting": lambda plan: plan in OWN,
    }
    ratios = [
        {
            f"{prefix}ratio_to_{group}": min(one[key] for one in rows if belongs(one["plan"])) / row[key]
            for prefix, key in (("", "seconds"), ("hidden_", "hidden_exchange_seconds"))
            for group, belongs in groups.items()
        }
        for row in rows
    ]
    return [{**row, **found} for row, found in zip(rows, ratios, strict=True)]


def cells_behind(rows: list[Row], share: float = BEHIND) -> list[Row]:
    """Return the rows whose plan takes less than the default's seconds in their cell, by more than a share of its own.

    Each with `ahead`, the default's seconds / its own - 1; the largest first. Plans beyond the memory are left out.
    """
    default = {row["case"]: row["seconds"] for row in rows if row.get("plan") == DEFAULT}
    found = [
        {**row, "ahead": default[row["case"]] / row["seconds"] - 1}
        for row in rows
        if row["case"] in default and row.get("plan") in (DEFAULT, "static", *PEERS, *OWN)
    ]
    return sorted((row for row in found if row["ahead"] > share), key=lambda row: -row["ahead"])


def prediction_order(rows: list[Row], pairs: int = 200, seed: int = 0) -> Row:
    """Return how often the order of two plans of relibra in a cell is the same by prediction and by simulation.

    Pairs that differ by more than `APART` in simulated seconds, drawn from all cells; all moves are counted in both.
    """
    own = [row for row in rows if row.get("plan") in (DEFAULT, *OWN)]
    found = [
        (a["seconds_in_full"] - b["seconds_in_full"]) * (a["predicted_seconds"] - b["predicted_seconds"]) > 0
        for place, a in enumerate(own)
        for b in own[:place]
        if a["case"] == b["case"] and apart(a["seconds_in_full"], b["seconds_in_full"])
    ]
    drawn = np.random.default_rng(seed).permutation(len(found))[:pairs]
    return {
        "case": "prediction order",
        "table": "order",
        "label": "simulated",
        "unit": f"share of pairs of plans more than {APART:.0%} apart whose order by prediction is that by simulation",
        "seed": seed,
        "repetitions": 1,
        "share": float(np.mean([found[x] for x in drawn])) if found else None,
        "target": 0.95,
        "pairs": len(drawn),
        "configuration": f"the default and its own other settings, of {len(found)} such pairs",
    }


def apart(a: float, b: float) -> bool:
    """Return whether two plans differ in seconds by more than `APART` of the faster one."""
    return abs(a - b) > APART * min(a, b)
