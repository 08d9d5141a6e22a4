"""RL-sized steps: replicas in slots that stay with their layer, against the best plan in shared slots.

32 simulated H100 in nodes of 8, 32 micro-batches of 4,096 tokens per rank, 6 layers, static skew 2.4 (128 experts) and
3.6 (32 experts). Plans are for seconds and may move homes and copy experts to other nodes, with samples as given and
packed. The best plan in shared slots may leave slots empty.
"""

from collections.abc import Iterator
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from benchmarks.planner.steps import domain_step
from relibra.cluster import cluster_preset
from relibra.planning.budget import Budget
from relibra.planning.costs.copies import slot_bytes
from relibra.planning.planner import plan_step
from relibra.planning.validation import validate_plan
from relibra.routing.demand import ScheduledDemand
from relibra.simulation import ModelShape, cut_model, model_shape, simulate_step

MODELS = {"qwen3-30b-a3b": 128, "qwen3-235b-a22b": 128, "gpt-oss-20b": 32}
"""Experts of each model."""
SIZES = {"ranks": 32, "layers": 6, "micro_batches": 32, "samples": 1024, "tokens": 4096}
TARGETS = {2: 0.93, 4: 0.75}
"""Most seconds of exchange, experts and exposed copies, as a share of the best plan in shared slots, by slots."""
EXPERT_TERMS = ("exchange", "gates", "compute", "copies")
BUDGET = Budget(objective="seconds", cross_node_copies=True, tolerance=0.01, steps_served=10)
MACHINE = "32, nodes of 8"


def resident_rows() -> Iterator[dict]:
    """Plan and simulate every model in shared slots and in resident ones."""
    for name, experts in MODELS.items():
        full = model_shape(name)
        demand = domain_step(experts=experts, top_k=full.top_k, seed=0, **SIZES)
        model = cut_model(full, demand)
        for samples, pack in (("given", False), ("packed", True)):
            case = f"{name}, samples {samples}"
            yield from _rows_of_case(case, demand, model, full.moe_layers, replace(BUDGET, pack_samples=pack))


def _rows_of_case(case: str, demand: ScheduledDemand, model: ModelShape, layers: int, budget: Budget) -> Iterator[dict]:
    def row(slots: int, resident: int) -> dict:
        return _row(case, demand, model, layers, replace(budget, slots=slots, resident_slots=resident))

    yield {**row(0, 0), "plan": "static"}
    shared = {slots: row(slots, 0) for slots in TARGETS}
    for slots, target in TARGETS.items():
        best = min((one for number, one in shared.items() if number <= slots), key=lambda one: one["expert_seconds"])
        resident = row(slots, slots)
        yield {**best, "plan": "shared slots", "slots": slots}
        yield {
            **resident,
            "plan": "resident slots",
            "ratio": resident["seconds"] / best["seconds"],
            "expert_ratio": resident["expert_seconds"] / best["expert_seconds"],
            "target": target,
            "ok": "yes" if resident["expert_seconds"] <= target * best["expert_seconds"] else "NO",
        }


def _row(case: str, demand: ScheduledDemand, model: ModelShape, layers: int, budget: Budget) -> dict:
    """Plan and simulate one budget; no slots: the static layout."""
    cluster, slots, resident = cluster_preset("h100x8", SIZES["ranks"]), budget.slots, budget.resident_slots or 0
    plan = plan_step(demand, cluster, budget, "relibra" if slots else "static", expert=model.expert)
    scheduled = plan.scheduled(demand)
    validate_plan(plan, cluster.topology, scheduled)
    step = simulate_step(plan, scheduled, cluster, model)
    M, L, R, _ = plan.replica_MLRB.shape
    sent = {kind: float(bytes_R.sum()) for kind, bytes_R in step.sent_bytes.items()}
    return {
        "case": case,
        "label": "simulated",
        "unit": "seconds of one step with all moves of homes; experts: exchange, experts and exposed copies of it",
        "seed": 0,
        "repetitions": 1,
        "ranks": R,
        "domain": MACHINE,
        "slots": slots,
        "resident_slots": resident,
        "seconds": step.seconds,
        "expert_seconds": sum(step.terms[term] for term in EXPERT_TERMS),
        "ratio": 1.0,
        "expert_ratio": 1.0,
        "target": "",
        "ok": "",
        "skew": plan.skew(scheduled),
        "pushes": sent.get("push", 0.0) / model.expert.weight_bytes / M / L,
        "bytes_pushed": sent.get("push", 0.0) + sent.get("return", 0.0),
        "exposed_seconds": step.terms["copies"],
        "moved": plan.num_moved,
        "slot_bytes": slot_bytes(plan, model.expert, num_layers=layers),
        "configuration": f"{M} micro-batches of 4,096 tokens per rank, {L} layers; memory of {layers} layers",
    }


def print_resident_rows(rows: list[dict]) -> None:
    """Print one line per model, plan and number of slots."""
    columns = ("slots", "seconds", "expert_seconds", "ratio", "expert_ratio", "target", "ok", "skew", "pushes", "moved")
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for column in ("case", "plan"):
        table.add_column(column, no_wrap=True)
    for column in columns:
        table.add_column(column.replace("_", " "), justify="right")
    for row in rows:
        shown = (f"{row[c]:,.3f}" if isinstance(row[c], float) else str(row[c]) for c in columns)
        table.add_row(row["case"], row["plan"], *shown)
    Console(width=170).print(table)
