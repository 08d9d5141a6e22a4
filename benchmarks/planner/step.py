"""Seconds of a whole simulated step: what training plans by default, beside static and its peers. Rows go to
results/step.json, those of resident slots to results/step_resident.json, those of dispatch to
results/step_dispatch.json.

Cases: a generated step of one layer of Qwen3-30B-A3B on 16 H100, and both recordings on 8, 16 and 32 ranks in nodes of
8 and on 32 in one rack, with micro-batches of 2,048 and of 8,192 tokens per rank. A recording is too short for such
steps: its samples are drawn again, seeded, until 32 micro-batches are full. The trainer's own schedule is used, and as
many resident slots as all layers of the model allow. Every plan is simulated, also where it loses to static, with its
moves of homes in full; live peers (UltraEP, MoonEP) decide after the router. The recordings are not part of the
project; the program says so when they are not there.
Resident slots: RL-sized steps of three models, with slots that stay with their layer and with shared ones
(`resident_steps`).
Dispatch: the same on 32 ranks in nodes of 8, flat and hierarchical (`dispatch_steps`).
Run: relibra bench step [--quick] [--json] [--data FOLDER] [--output FOLDER].
Twelve minutes. --quick runs the generated case only, without resident slots, and writes no rows.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.harness.options import measurement_options
from benchmarks.harness.provenance import write_results
from benchmarks.planner.dispatch_steps import dispatch_rows, print_dispatch_rows
from benchmarks.planner.resident_steps import print_resident_rows, resident_rows
from relibra.cluster import Cluster, cluster_preset
from relibra.planning.budget import Budget
from relibra.planning.costs.copies import slot_bytes
from relibra.planning.planner import plan_step
from relibra.planning.registry import is_live
from relibra.planning.validation import validate_plan
from relibra.rl.batch.plan_budget import plan_budget
from relibra.rl.batch.schedule import make_schedule
from relibra.rl.config.settings import PlanSettings
from relibra.routing.demand import Demand, ScheduledDemand
from relibra.routing.readers import open_trace
from relibra.routing.statistics import co_activation
from relibra.simulation import Execution, ModelShape, cut_model, model_shape, simulate_step

RECORDINGS = {
    "gpt-oss-20b": ("gpt_oss_20b_decode_topk.npz", 32),
    "deepseek-v2-lite": ("deepseek_v2_lite_esft_topk.npz", 64),
}
MACHINES = {
    "8, one node": ("h100x8", 8),
    "16, nodes of 8": ("h100x8", 16),
    "32, nodes of 8": ("h100x8", 32),
    "32, one rack": ("nvl72", 32),
}
MICRO_BATCHES = 32
TOKENS = (2048, 8192)
SPREAD = 0.35
"""Of the log-popularity of the generated case: a static skew of 1.49 on 16 ranks."""
DEFAULT = "relibra (default)"
PEERS = ("eplb", "ultraep", "moonep_node", "moonep")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step and the machine it runs on.

    layers    MoE layers of the whole model, which share the memory for slots
    limit     tokens of a rank's micro-batch
    drawn     how the samples were made
    """

    name: str
    machine: str
    layers: int
    drawn: str
    cluster: Cluster
    model: ModelShape
    demand: ScheduledDemand
    limit: int


def main() -> None:
    options = measurement_options(__doc__, data=True).parse_args()
    rows = [row for case in _cases(options.data, options.quick) for row in rows_of(case)]
    dispatch = list(dispatch_rows(options.data, quick=options.quick))
    resident = [] if options.quick else list(resident_rows())
    if options.json:
        print(json.dumps([*rows, *dispatch, *resident], indent=1))
    else:
        print_rows(rows)
        print_dispatch_rows(dispatch)
        if resident:
            print_resident_rows(resident)
    if not options.quick:
        print(write_results("step", rows, "relibra bench step", options.output), file=sys.stderr)
        print(write_results("step_dispatch", dispatch, "relibra bench step", options.output), file=sys.stderr)
        print(write_results("step_resident", resident, "relibra bench step", options.output), file=sys.stderr)


def _cases(data: Path, quick: bool) -> Iterator[Case]:
    yield generated_case()
    for name, (file, experts) in RECORDINGS.items() if not quick else ():
        if not (data / file).exists():
            print(f"skipped: {data / file} is not there; name its folder with --data", file=sys.stderr)
            continue
        trace = open_trace(data / file, experts)
        demand = replace(Demand.from_trace(trace), pairs_LEE=co_activation(trace))
        for machine, (preset, ranks) in MACHINES.items():
            cluster = cluster_preset(preset, ranks)
            for limit in TOKENS:
                scheduled = scheduled_again(demand, ranks, limit, seed=0)
                yield Case(
                    name=name,
                    machine=machine,
                    layers=model_shape(name).moe_layers,
                    drawn=f"{len(demand.sample_ids)} recorded samples drawn again, {len(scheduled.sample_ids)} times",
                    cluster=cluster,
                    model=cut_model(model_shape(name), scheduled),
                    demand=scheduled,
                    limit=limit,
                )


def generated_case() -> Case:
    """Make 1,024 samples of log-normal lengths, about 10 micro-batches of 8,192 tokens per rank on 16 ranks.

    A token picks the 8 experts with the largest log-weight plus Gumbel noise: without replacement, by weight.
    """
    rng = np.random.default_rng(0)
    samples, experts, top_k, ranks, limit = 1024, 128, 8, 16, 8192
    length_S = np.clip(rng.lognormal(np.log(900), 0.9, samples), 16, limit).astype(np.int64)
    log_weight_SE = rng.normal(scale=SPREAD, size=experts) + rng.normal(scale=0.6, size=(samples, experts))
    counts_SE, pairs_EE = np.zeros((samples, experts), dtype=np.int32), np.zeros((experts, experts))
    for s in range(samples):
        noisy_TE = log_weight_SE[s].astype(np.float32) + rng.gumbel(size=(length_S[s], experts)).astype(np.float32)
        picked_TE = np.zeros(noisy_TE.shape, dtype=np.float32)
        np.put_along_axis(picked_TE, np.argpartition(-noisy_TE, top_k, axis=1)[:, :top_k], 1.0, axis=1)
        counts_SE[s] = picked_TE.sum(axis=0)
        pairs_EE += picked_TE.T @ picked_TE
    demand = Demand(
        counts_SLE=counts_SE[:, None],
        pairs_LEE=pairs_EE.astype(np.int64)[None],
        layer_ids=np.arange(1, dtype=np.int32),
        sample_ids=np.arange(samples),
        top_k=top_k,
    )
    return Case(
        name="generated",
        machine="16, nodes of 8",
        layers=model_shape("qwen3-30b-a3b").moe_layers,
        drawn=f"{samples} samples of log-normal lengths",
        cluster=cluster_preset("h100x8", ranks),
        model=cut_model(model_shape("qwen3-30b-a3b"), demand),
        demand=_scheduled(demand, ranks, limit),
        limit=limit,
    )


def scheduled_again(demand: Demand, ranks: int, limit: int, *, seed: int) -> ScheduledDemand:
    """Draw samples again until `MICRO_BATCHES` micro-batches of `limit` tokens per rank are full, and schedule them."""
    assert demand.top_k
    rng = np.random.default_rng(seed)
    length_S = demand.counts_SLE[:, 0].sum(axis=1) // demand.top_k
    wanted = ranks * limit * MICRO_BATCHES
    drawn_X = rng.integers(len(length_S), size=int(1.5 * wanted / length_S.mean()) + 100)
    drawn_X = drawn_X[: int(np.searchsorted(np.cumsum(length_S[drawn_X]), wanted))]
    scale = wanted / int(length_S.sum())
    pairs_LEE = None if demand.pairs_LEE is None else np.round(demand.pairs_LEE * scale).astype(np.int64)
    again = replace(
        demand, counts_SLE=demand.counts_SLE[drawn_X], sample_ids=np.arange(len(drawn_X)), pairs_LEE=pairs_LEE
    )
    return _scheduled(again, ranks, limit)


def _scheduled(demand: Demand, ranks: int, limit: int) -> ScheduledDemand:
    """Schedule as the trainer does, in one mini-batch."""
    assert demand.top_k
    tokens_S = demand.counts_SLE[:, 0].sum(axis=1) // demand.top_k
    schedule = make_schedule(
        tokens_S, np.arange(len(tokens_S)), mini_batches=1, micro_batch_tokens=limit, num_ranks=ranks
    )
    scheduled = demand.with_schedule(schedule.micro_batch_S, schedule.rank_S, ranks, schedule.num_micro_batches)
    return replace(scheduled, group_M=None)


def budgets(case: Case) -> dict[str, tuple[str, Budget]]:
    """Return balancer and budget of each plan by its name in the rows.

    Peers have as many slots as the default, EPLB also beyond its memory; MoonEP reserves as many as a rank has homes.
    """
    default, tokens = (
        plan_budget(settings, case.cluster).with_resident_slots(case.model.expert, case.layers)
        for settings in (PlanSettings(), PlanSettings(objective="tokens"))
    )
    plans = {DEFAULT: ("relibra", default), "static": ("static", default), "tokens": ("relibra", tokens)}
    return plans | {name: (name, replace(default, pack_samples=False)) for name in PEERS}


def rows_of(case: Case) -> list[dict]:
    """Plan and simulate a case with every balancer."""
    rows = [_row(case, plan, *choice) for plan, choice in budgets(case).items()]
    static, default = (next(row for row in rows if row["plan"] == name) for name in ("static", DEFAULT))
    return [
        {**row, "ratio_to_static": static["seconds"] / row["seconds"], "ahead_by": ahead_by(row, default)}
        for row in rows
    ]


def ahead_by(row: dict, default: dict) -> str:
    """Say what a plan that is faster than the default spends less on; "" for the others."""
    if row["seconds"] >= default["seconds"]:
        return ""
    saved = {name: default["terms"][name] - seconds for name, seconds in row["terms"].items()}
    parts = (f"{1e3 * seconds:.3g} ms less {name}" for name, seconds in saved.items() if seconds > 0)
    return f"{1e3 * (default['seconds'] - row['seconds']):.3g} ms in all: {', '.join(parts)}"


def _row(case: Case, name: str, balancer: str, budget: Budget) -> dict:
    plan = plan_step(
        case.demand, case.cluster, budget, balancer, expert=case.model.expert, never_worse=balancer == "relibra"
    )
    scheduled = plan.scheduled(case.demand)
    validate_plan(plan, case.cluster.topology, scheduled)
    step = simulate_step(plan, scheduled, case.cluster, case.model, Execution(live=is_live(balancer)))
    M, L, R, _ = plan.replica_MLRB.shape
    assert case.demand.top_k
    tokens_MR = scheduled.tokens_MLRE[:, 0].sum(axis=2) // case.demand.top_k
    sent = {kind: float(bytes_R.sum()) for kind, bytes_R in step.sent_bytes.items()}
    return {
        "case": f"{case.name}, {case.machine}, {case.limit} tokens",
        "label": "simulated",
        "unit": "seconds of one step with all moves of homes",
        "seed": 0,
        "repetitions": 1,
        "ranks": R,
        "domain": case.machine,
        "plan": name,
        "seconds": step.seconds,
        "skew": plan.skew(scheduled),
        "pushes": sent.get("push", 0.0) / case.model.expert.weight_bytes / M / L,
        "bytes_pushed": sent.get("push", 0.0) + sent.get("return", 0.0),
        "exposed_seconds": step.terms["copies"],
        "max_rank_tokens": int(tokens_MR.max()),
        "token_limit": case.limit,
        "moved": plan.num_moved,
        "slots": plan.slots,
        "resident_slots": plan.slots * plan.resident,
        "slot_bytes": slot_bytes(plan, case.model.expert, num_layers=case.layers),
        "terms": {term: seconds for term, seconds in step.terms.items() if seconds > 0},
        "configuration": f"{M} micro-batches, {L} layer{'s' * (L > 1)}; {case.drawn}",
    }


def print_rows(rows: list[dict]) -> None:
    """Print one line per case and plan."""
    columns = ("seconds", "ratio_to_static", "skew", "pushes", "exposed_seconds", "max_rank_tokens", "moved")
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for column in ("case", "plan"):
        table.add_column(column, no_wrap=True)
    for column in columns:
        table.add_column(column.replace("_", " "), justify="right")
    for row in rows:
        shown = (f"{row[c]:,.3f}" if isinstance(row[c], float) else f"{row[c]:,}" for c in columns)
        table.add_row(row["case"], row["plan"], *shown)
    Console(width=170).print(table)
