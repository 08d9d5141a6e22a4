"""Steps on 32 simulated H100 in nodes of 8, where tokens go to each rank that computes for them, or to each node once.

Cases: generated routes of one layer of Qwen3-30B-A3B, and the recorded routes of gpt-oss-20b in 8 micro-batches of
drawn samples, both with 4,096 tokens per rank and micro-batch. Static layout and the plan of relibra, made and
simulated for each dispatch. Rows between ranks and nodes are counted token by token.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from relibra.cluster import Dispatch, cluster_preset
from relibra.planning.planner import plan_step
from relibra.planning.traffic.distinct_rows import distinct_rows_of_step
from relibra.planning.validation import validate_plan
from relibra.rl.batch.plan_budget import plan_budget
from relibra.rl.batch.schedule import make_schedule
from relibra.rl.config.settings import PlanSettings
from relibra.routing.demand import Demand, ScheduledDemand
from relibra.routing.readers import open_trace
from relibra.routing.statistics import co_activation
from relibra.routing.synthetic import TraceShape, domain_trace
from relibra.routing.trace import RoutingTrace
from relibra.simulation import ModelShape, cut_model, model_shape, simulate_step

RANKS, LIMIT, MICRO_BATCHES = 32, 4096, 8
RECORDING, RECORDED_MODEL, EXPERTS = "gpt_oss_20b_decode_topk.npz", "gpt-oss-20b", 32
DISPATCHES: tuple[Dispatch, ...] = ("flat", "hierarchical")
PLANS = ("static", "relibra")


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """A scheduled step with its tokens.

    layers     MoE layers of the whole model, which share the memory for slots
    sample_T   position of each token's sample in the demand
    drawn      how the samples were made
    """

    name: str
    layers: int
    model: ModelShape
    demand: ScheduledDemand
    experts_TLK: np.ndarray
    sample_T: np.ndarray
    drawn: str


def dispatch_rows(data: Path, *, quick: bool) -> Iterator[dict]:
    """Plan and simulate each case with each dispatch; the recording is left out with --quick, or where it is not."""
    shape = TraceShape(rows_per_sample=[512] * 256, num_layers=1, num_experts=128, top_k=8)
    generated = domain_trace(shape, np.random.default_rng(0), num_domains=4)
    yield from _rows_of_case(_case("generated", generated, "qwen3-30b-a3b", micro_batches=2))
    if quick:
        return
    if not (data / RECORDING).exists():
        print(f"skipped: {data / RECORDING} is not there; name its folder with --data", file=sys.stderr)
        return
    recorded = open_trace(data / RECORDING, EXPERTS)
    yield from _rows_of_case(_case(RECORDED_MODEL, recorded, RECORDED_MODEL, micro_batches=MICRO_BATCHES))


def _case(name: str, trace: RoutingTrace, model: str, *, micro_batches: int) -> Case:
    """Draw samples of a trace, seeded, until so many micro-batches are full, and schedule them as a trainer does."""
    length_S = np.diff(trace.offsets)
    wanted = RANKS * LIMIT * micro_batches
    drawn_X = np.random.default_rng(0).integers(len(length_S), size=int(2 * wanted / length_S.mean()) + 100)
    drawn_X = drawn_X[: int(np.searchsorted(np.cumsum(length_S[drawn_X]), wanted))]
    rows_T = np.concatenate([np.arange(trace.offsets[x], trace.offsets[x + 1]) for x in drawn_X])
    sample_T = np.repeat(np.arange(len(drawn_X)), length_S[drawn_X])
    valid_T = np.asarray(trace.valid_T)[rows_T]
    once = Demand.from_trace(trace)
    scale = len(rows_T) / trace.num_rows
    demand = replace(
        once,
        counts_SLE=once.counts_SLE[drawn_X],
        sample_ids=np.arange(len(drawn_X)),
        pairs_LEE=np.round(co_activation(trace) * scale).astype(np.int64),
    )
    assert demand.top_k
    tokens_S = demand.counts_SLE[:, 0].sum(axis=1) // demand.top_k
    made = make_schedule(tokens_S, np.arange(len(tokens_S)), mini_batches=1, micro_batch_tokens=LIMIT, num_ranks=RANKS)
    scheduled = demand.with_schedule(made.micro_batch_S, made.rank_S, RANKS, made.num_micro_batches)
    return Case(
        name=name,
        layers=model_shape(model).moe_layers,
        model=cut_model(model_shape(model), scheduled),
        demand=replace(scheduled, group_M=None),
        experts_TLK=np.asarray(trace.experts_TLK)[rows_T[valid_T]],
        sample_T=sample_T[valid_T],
        drawn=f"{len(drawn_X):,} samples drawn from {trace.num_samples:,}",
    )


def _rows_of_case(case: Case) -> Iterator[dict]:
    for plan in PLANS:
        rows = [_row(case, plan, dispatch) for dispatch in DISPATCHES]
        for row in rows:
            yield {**row, "ratio_to_flat": rows[0]["seconds"] / row["seconds"]}


def _row(case: Case, balancer: str, dispatch: Dispatch) -> dict:
    cluster = replace(cluster_preset("h100x8", RANKS), dispatch=dispatch)
    budget = plan_budget(PlanSettings(), cluster).with_resident_slots(case.model.expert, case.layers)
    plan = plan_step(case.demand, cluster, budget, balancer, expert=case.model.expert)
    scheduled = plan.scheduled(case.demand)
    validate_plan(plan, cluster.topology, scheduled)
    distinct = distinct_rows_of_step(plan, scheduled, case.experts_TLK, case.sample_T, threads=2)
    step = simulate_step(plan, scheduled, cluster, case.model, distinct=distinct)
    step = step.with_relocation_over(budget.steps_served)
    M, L, R, _ = plan.replica_MLRB.shape
    network_R = step.network_bytes_R
    between = float(network_R.sum())
    return {
        "case": f"{case.name}, 32 in nodes of 8, {LIMIT} tokens",
        "label": "simulated",
        "unit": f"seconds of one step with 1/{budget.steps_served} of the moves of homes",
        "seed": 0,
        "repetitions": 1,
        "ranks": R,
        "plan": balancer,
        "dispatch": dispatch,
        "seconds": step.seconds,
        "exchange_seconds": step.terms["exchange"],
        "network_bytes": between,
        "network_skew": float(network_R.max() / network_R.mean()) if between else 1.0,
        "inside_bytes": float(step.sent_bytes["dispatch"].sum() + step.sent_bytes["combine"].sum()) - between,
        "skew": plan.skew(scheduled),
        "terms": {term: seconds for term, seconds in step.terms.items() if seconds > 0},
        "configuration": f"{M} micro-batches, {L} layer{'s' * (L > 1)}; {case.drawn}",
    }


def print_dispatch_rows(rows: list[dict]) -> None:
    """Print one line per case, plan and dispatch; bytes are those of dispatch and combine, forward and backward."""
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for column in ("case", "plan", "dispatch"):
        table.add_column(column, no_wrap=True)
    for column in ("seconds", "flat / it", "exchange s", "GB between nodes", "busiest / mean", "GB inside nodes"):
        table.add_column(column, justify="right")
    for row in rows:
        figures = (
            *(row[name] for name in ("seconds", "ratio_to_flat", "exchange_seconds")),
            row["network_bytes"] / 1e9,
            row["network_skew"],
            row["inside_bytes"] / 1e9,
        )
        table.add_row(row["case"], row["plan"], row["dispatch"], *(f"{figure:,.3f}" for figure in figures))
    Console(width=170).print(table)
