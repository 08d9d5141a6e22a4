"""Time of the experts of each rank, run one after another: does an even load take even time?

For a few (micro-batch, layer) pairs of recorded routes each balancer plans the step; then the work that its plan gives
to each rank, home experts and replicas with their exact numbers of rows, is run forward and backward on this machine.
The busiest rank is what a layer waits for. Copies and exchange between ranks are not part of it. Rows go to
results/emulated_ranks.json.
Run: relibra bench emulated_ranks [--quick] [--json] [--data FOLDER] [--output FOLDER]
--quick takes fewer pairs and writes no rows. The recordings are not part of the project; without them routes are made
up, and the rows say so.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float64, Int64
from numpy import ndarray
from rich.console import Console
from rich.table import Table

from benchmarks.harness.options import measurement_options
from benchmarks.harness.provenance import write_results
from benchmarks.harness.recorded_cuts import cut_recorded
from relibra.calibration.grouped_experts import GroupedExperts, grouped_experts, seconds_each
from relibra.cluster import cluster_preset
from relibra.planning.budget import Budget
from relibra.planning.costs.expert_shape import ExpertShape
from relibra.planning.plan import StepPlan
from relibra.planning.traffic.split import split_tokens
from relibra.reporting.data.comparison import iterate_comparison
from relibra.routing.demand import ScheduledDemand
from relibra.routing.micro_batches import select_micro_batches
from relibra.routing.readers import open_trace
from relibra.routing.synthetic import TraceShape, domain_trace
from relibra.routing.trace import RoutingTrace

RECORDING = "gpt_oss_20b_decode_topk.npz"
EXPERTS, TOP_K, TOKENS = 32, 4, 2048
RANKS = (8, 16, 32)
SLOTS, SEED = 1, 0
BALANCERS = (
    "static",
    "eplb",
    "eplb_lp",
    "lplb",
    "ultraep",
    "flashlb",
    "balanced",
    "relibra",
    "relibra_paper_anywhere",
)
EQUAL = "equal counts"
"""Not a balancer: as if routing itself were forced to give every rank and every expert the same number of rows."""

CPU_EXPERT = ExpertShape(hidden=240, width=240, bytes_per_value=4)
"""A twelfth of gpt-oss-20b in both sizes: small enough for one core, large enough that products take the time."""

UNIT = (
    "token skew and straggler: busiest / mean rank, in token-slots and in seconds; busiest ms: of the busiest rank, "
    "forward and backward, per micro-batch and layer; time / static and time / equal: of the busiest rank, "
    "per token-slot"
)


@dataclass(frozen=True, kw_only=True)
class RankWork:
    """What one balancer gives the ranks to do.

    counts    [pair][rank][instance]: rows of each expert that a rank holds, homes and replicas, by expert
    """

    balancer: str
    sees: str
    counts: list[list[list[int]]]

    @property
    def load_PR(self) -> Int64[ndarray, "P R"]:
        """Token-slots of each rank."""
        return np.array([[sum(counts_E) for counts_E in ranks] for ranks in self.counts], dtype=np.int64)


def choose_pairs(demand: ScheduledDemand, number: int, seed: int = SEED) -> list[tuple[int, int]]:
    """Draw different (micro-batch, place in the layers) of a step, or take all where there are not more."""
    M, L, _ = demand.load_MLE.shape
    drawn = np.random.default_rng(seed).permutation(M * L)[:number]
    return [divmod(int(cell), L) for cell in np.sort(drawn)]


def planned_counts(plan: StepPlan, demand: ScheduledDemand, micro_batch: int, layer: int) -> list[list[int]]:
    """Return the rows of each instance on each rank, as the plan's token split deals them out.

    demand    under the plan's schedule
    layer     place in the plan's layers
    """
    split = split_tokens(
        demand.tokens_MLRE[micro_batch, layer],
        plan.home_LE[layer],
        plan.replica_MLRB[micro_batch, layer],
        plan.quota_MLRB[micro_batch, layer],
        plan.ranks_per_node,
    )
    counts_E = split.tokens_RI.sum(axis=0)
    return [counts_E[split.rank_I == rank].tolist() for rank in range(plan.num_ranks)]


def equal_counts(token_slots: int, experts: int, ranks: int) -> list[list[int]]:
    """Deal token-slots out to all experts, in the static layout; ranks, and experts of a rank, differ by 1 at most."""
    return [_dealt(of_rank, experts // ranks) for of_rank in _dealt(token_slots, ranks)]


def _dealt(amount: int, shares: int) -> list[int]:
    return [amount // shares + (share < amount % shares) for share in range(shares)]


def rank_works(
    demand: ScheduledDemand,
    ranks: int,
    expert: ExpertShape,
    pairs: list[tuple[int, int]],
    balancers: tuple[str, ...] = BALANCERS,
) -> list[RankWork]:
    """Plan the step for even token-slots with each balancer, and count what ranks get in the pairs; EQUAL is last."""
    cluster = cluster_preset("h100x8", ranks)
    budget = Budget(slots=SLOTS)
    works = []
    for row, plan in iterate_comparison(demand, cluster, budget, balancers, expert=expert):
        assert plan is not None, f"{row.balancer} made no plan: {row.message}"
        assert row.valid, f"{row.balancer} made a plan that is not valid: {row.message}"
        scheduled = plan.scheduled(demand)
        counts = [planned_counts(plan, scheduled, m, layer) for m, layer in pairs]
        works.append(RankWork(balancer=row.balancer, sees=row.sees, counts=counts))
    load_MLE = demand.load_MLE
    totals = [int(load_MLE[m, layer].sum()) for m, layer in pairs]
    counts = [equal_counts(total, demand.num_experts, ranks) for total in totals]
    return [*works, RankWork(balancer=EQUAL, sees="forces routes", counts=counts)]


def measured_seconds(
    works: list[RankWork], experts: GroupedExperts, repetitions: int
) -> dict[str, Float64[ndarray, "N P R"]]:
    """Time every rank of every balancer, repetition by repetition; the first one warms up and is thrown away.

    Balancers take turns inside a repetition, forwards and backwards, so that a slow moment of the machine, or its
    warming up, does not fall on one of them alone.
    """
    prepared = [[[experts.work(counts_E) for counts_E in ranks] for ranks in work.counts] for work in works]
    seconds: dict[str, list[list[list[float]]]] = {work.balancer: [] for work in works}
    turns = list(zip(works, prepared, strict=True))
    for repetition in range(repetitions + 1):
        for work, pairs in turns if repetition % 2 else reversed(turns):
            found = [seconds_each(ranks, experts.rows_TH.device) for ranks in pairs]
            if repetition:
                seconds[work.balancer].append(found)
    return {balancer: np.array(found) for balancer, found in seconds.items()}


def result_rows(
    works: list[RankWork], seconds: dict[str, Float64[ndarray, "N P R"]], source: str, **facts: object
) -> list[dict]:
    """Make a row of each balancer; ratios compare seconds per token-slot, as packing may fill micro-batches anew.

    The median over repetitions is taken rank by rank, before the busiest is looked for: the largest of many noisy times
    would be too large. Quartiles likewise, each of the rank that is busiest by its median, so that they enclose it.
    """
    medians = {balancer: np.median(found, axis=0) for balancer, found in seconds.items()}
    per_slot = {work.balancer: float(medians[work.balancer].max(axis=1).sum() / work.load_PR.sum()) for work in works}
    rows = []
    for work in works:
        own_PR, load_PR = medians[work.balancer], work.load_PR
        busiest_NP = seconds[work.balancer][:, np.arange(len(own_PR)), own_PR.argmax(axis=1)]
        low_P, high_P = np.quantile(busiest_NP, (0.25, 0.75), axis=0)
        ranks = load_PR.shape[1]
        skew, straggler = busiest_over_mean(load_PR), busiest_over_mean(own_PR)
        rows.append({
            "case": f"{source}, EP {ranks}, {work.balancer}", "label": "measured", "unit": UNIT, "source": source,
            "ep": ranks, "balancer": work.balancer, "sees": work.sees, "pairs": len(load_PR), "token_skew": skew,
            "straggler": straggler, "straggler / token skew": straggler / skew,
            "busiest ms": 1000 * float(own_PR.max(axis=1).mean()),
            "busiest ms low": 1000 * float(low_P.mean()), "busiest ms high": 1000 * float(high_P.mean()),
            "time / static": per_slot[work.balancer] / per_slot["static"],
            "time / equal": per_slot[work.balancer] / per_slot[EQUAL], "seed": SEED, **facts,
        })  # fmt: skip
    return rows


def busiest_over_mean(amount_PR: ndarray) -> float:
    """Sum of the busiest ranks over the sum of mean ranks; 1 where all are equal."""
    return float(amount_PR.max(axis=1).sum() / amount_PR.mean(axis=1).sum())


def sizes_needed(works: list[RankWork]) -> tuple[int, int]:
    """Return the most instances that any rank holds, and the most rows that any gets."""
    ranks = [counts_E for work in works for pair in work.counts for counts_E in pair]
    return max(map(len, ranks)), max(map(sum, ranks))


def print_rows(rows: list[dict]) -> None:
    """Print a table of each kind of routes."""
    columns = ("ep", "balancer", "token_skew", "straggler", "busiest ms", "time / static", "time / equal")
    console = Console()
    for source in dict.fromkeys(row["source"] for row in rows):
        table = Table(title=source, title_justify="left", box=None, padding=(0, 1), pad_edge=False)
        for column in columns:
            justify: Literal["left", "right"] = "left" if column == "balancer" else "right"
            title = "\n".join(column.replace("_", " ").rsplit(" ", 1))
            table.add_column(title, justify=justify, no_wrap=True)
        for row in rows:
            if row["source"] == source:
                table.add_row(*(f"{row[c]:.3f}" if isinstance(row[c], float) else str(row[c]) for c in columns))
        console.print(table)
    print(UNIT)


def routes(data: Path) -> tuple[str, RoutingTrace]:
    """Read the recorded routes of gpt-oss-20b; where they are not there, say so and make some up of the same sizes."""
    if (data / RECORDING).exists():
        return "gpt-oss-20b, recorded routes", open_trace(data / RECORDING, EXPERTS)
    print(
        f"skipped: recorded routes, because {data / RECORDING} is not there (name its folder with --data); "
        "made-up routes take their place",
        file=sys.stderr,
    )
    shape = TraceShape(rows_per_sample=[256] * 128, num_layers=4, num_experts=EXPERTS, top_k=TOP_K)
    return "gpt-oss-20b's sizes, synthetic domains", domain_trace(shape, np.random.default_rng(SEED), sigma=1.2)


def later_half(trace: RoutingTrace, tokens: int, ranks: int) -> ScheduledDemand:
    """Cut micro-batches in recorded order and keep the later half, as the comparison of balancers does."""
    whole = cut_recorded(trace, tokens, ranks)
    return select_micro_batches(whole, len(whole.load_MLE) // 2)


def main() -> None:
    options = measurement_options(__doc__, data=True).parse_args()
    torch.set_num_threads(1)
    number, repetitions = (2, 2) if options.quick else (6, 5)
    source, trace = routes(options.data)
    rows = []
    for ranks in RANKS[:1] if options.quick else RANKS:
        demand = later_half(trace, TOKENS, ranks)
        works = rank_works(demand, ranks, CPU_EXPERT, choose_pairs(demand, number))
        groups, most = sizes_needed(works)
        experts = grouped_experts(
            groups, most, CPU_EXPERT.hidden, CPU_EXPERT.width, torch.device("cpu"), torch.float32, SEED
        )
        experts.check()
        seconds = measured_seconds(works, experts, repetitions)
        configuration = (
            f"{source}, {TOKENS:,} tokens per micro-batch, {number} pairs of micro-batch and layer, {SLOTS} spare "
            f"slot per rank, nodes of 8; experts {CPU_EXPERT.hidden} x {CPU_EXPERT.width}, float32, processor time"
        )
        rows += result_rows(works, seconds, source, repetitions=repetitions, configuration=configuration)
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        print_rows(rows)
    if not options.quick:
        # Where the recordings lie says something of a machine, not of the result.
        path = write_results("emulated_ranks", rows, "relibra bench emulated_ranks", options.output)
        print(path, file=sys.stderr)
