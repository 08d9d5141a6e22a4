"""Homes of experts that tokens pick together, on recorded routes. Rows go to results/picked_together*.json.

Homes are searched on some samples and scored on others: half and half, or on a domain that the search has not seen.
Ranks that a token goes to never stand without the load of the busiest rank: such experts rise and fall together. What
they are worth, in seconds of planned steps by the cost model, is the second file. The recordings are not part of the
project; the program says so and writes nothing when they are not there.
Run: relibra bench picked_together [--quick] [--json] [--data FOLDER] [--output FOLDER]. Three minutes.
--quick takes fewer layers and one machine, and writes no rows.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.harness.options import measurement_options
from benchmarks.harness.provenance import write_results
from benchmarks.harness.recorded_cuts import cut_recorded
from relibra.cluster import cluster_preset
from relibra.planning.budget import Budget
from relibra.planning.costs.copies import relocation_seconds
from relibra.planning.costs.exchange import exchange_costs
from relibra.planning.costs.expert_shape import expert_shape
from relibra.planning.deployment.expert_workers import plan_placements
from relibra.planning.deployment.worker_choice import LOAD_CAP, choose_workers
from relibra.planning.levers.homes import deal_inside_nodes
from relibra.planning.levers.replication import replicate
from relibra.planning.placement import Homes, static_homes
from relibra.planning.planner import plan_step
from relibra.planning.traffic.distinct_rows import distinct_rows_of_step
from relibra.routing.demand_rows import sample_of_rows
from relibra.routing.readers import open_trace
from relibra.routing.trace import RoutingTrace

CASES = {
    "gpt-oss-20b": ("gpt_oss_20b_decode_topk.npz", 32),
    "deepseek-v2-lite": ("deepseek_v2_lite_esft_topk.npz", 64),
}
RANKS, TOKENS, SEED = 8, 2048, 0
EVERY, EVERY_QUICK = 3, 12
"""Layers are taken at these distances."""
MACHINES = (
    ("one node of 8", 8, 8, "flat", 256),
    ("one node of 8", 8, 8, "flat", 2048),
    ("4 nodes of 2", 8, 2, "flat", 256),
    ("4 nodes of 2", 8, 2, "hierarchical", 256),
    ("2 nodes of 8", 16, 8, "flat", 256),
    ("2 nodes of 8", 16, 8, "hierarchical", 256),
    ("4 nodes of 8", 32, 8, "hierarchical", 256),
)
"""Name, ranks, ranks per node, dispatch, tokens of a rank in a micro-batch."""


def main() -> None:
    options = measurement_options(__doc__, data=True).parse_args()
    for file, _ in CASES.values():
        if not (options.data / file).exists():
            print(f"skipped: {options.data / file} is not there; name its folder with --data", file=sys.stderr)
            return
    held_out, seconds = [], []
    for model, (file, experts) in CASES.items():
        trace = open_trace(options.data / file, experts)
        layers = np.arange(0, trace.num_layers, EVERY_QUICK if options.quick else EVERY)
        held_out += [row for split in _splits(trace) for row in _scored(model, trace, layers, *split)]
        seconds += [_planned(model, trace, layers, *one) for one in MACHINES[: 1 if options.quick else None]]
    if options.json:
        print(json.dumps([*held_out, *seconds], indent=1))
    else:
        _print(held_out, ("case", "homes", "copies", "other ranks", "load", "load in a micro-batch"))
        _print(
            seconds, ("case", "dispatch", "tokens", "planned", "there / planned", "moved / planned", "bound / bound")
        )
    if not options.quick:
        for name, rows in (("picked_together", held_out), ("picked_together_seconds", seconds)):
            # Where the recordings lie says something of a machine, not of the result.
            print(write_results(name, rows, "relibra bench picked_together", options.output), file=sys.stderr)


def _splits(trace: RoutingTrace) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yield a name, the samples that homes are searched on, and those that they are scored on."""
    number_S = np.arange(trace.num_samples)
    yield "every second sample", number_S[::2], number_S[1::2]
    for group, name in enumerate(trace.group_names):
        yield f"{name} left out", number_S[trace.group_ids != group], number_S[trace.group_ids == group]


def _scored(
    model: str, trace: RoutingTrace, layers: np.ndarray, split: str, planned: np.ndarray, scored: np.ndarray
) -> list[dict]:
    """Return the rows of one split: each way of finding homes, without copies and with one slot per rank."""
    planned_TLK, scored_TLK = (
        some.experts_TLK[some.valid_T][:, layers] for some in (trace.select(one.tolist()) for one in (planned, scored))
    )
    found = plan_placements(planned_TLK, trace.num_experts, RANKS, spare=0, cap=LOAD_CAP, seed=SEED)
    rows = []
    for homes, held_LNE in found.items():
        for slots in (0, 1):
            figures = np.mean(
                [_visits(scored_TLK[:, layer], held_NE, slots) for layer, held_NE in enumerate(held_LNE)], axis=0
            )
            rows.append(
                {
                    "case": f"{model}, {split}",
                    "label": "measured",
                    "unit": f"{RANKS} ranks: others that a token goes to, once each, where its own is any of them; "
                    f"load of the busiest rank / mean, over all scored tokens and in a micro-batch of {TOKENS:,} of "
                    "them in recorded order; means over layers",
                    "seed": SEED,
                    "repetitions": 1,
                    "model": model,
                    "split": split,
                    "homes": homes,
                    "copies": "one slot per rank, loads known" if slots else "none",
                    "other ranks": float(figures[0]),
                    "load": float(figures[1]),
                    "load in a micro-batch": float(figures[2]),
                    "configuration": f"{len(planned_TLK):,} tokens searched, {len(scored_TLK):,} scored, "
                    f"{len(layers)} layers",
                }
            )
    return rows


def _visits(expert_TK: np.ndarray, home_NE: np.ndarray, slots: int) -> tuple[float, float, float]:
    """Return other ranks per token, load of all tokens, and mean load of a micro-batch, of one layer.

    slots   copies of a rank for each micro-batch, chosen from its loads; tokens prefer a rank that they visit
    """
    home_E, expert_TK = home_NE.argmax(axis=0), expert_TK.astype(np.int64)
    bounds = [*range(0, max(1, len(expert_TK) - TOKENS + 1), TOKENS), len(expert_TK)]  # a rest joins the last one
    visits, busiest, total_N = 0, 0, np.zeros(RANKS, dtype=np.int64)
    for start, stop in pairwise(bounds):
        some_TK, held_NE = expert_TK[start:stop], home_NE.copy()
        if slots:
            load_E = np.bincount(some_TK.ravel(), minlength=len(home_E))
            replica_RB = replicate(load_E[None], home_E, RANKS, RANKS, slots=slots, tolerance=0.01)[0][0]
            rank_X, slot_X = np.nonzero(replica_RB >= 0)
            held_NE[rank_X, replica_RB[rank_X, slot_X]] = True
        worker_TK = choose_workers(some_TK, held_NE, LOAD_CAP)
        visited_TN = np.zeros((len(some_TK), RANKS), dtype=bool)
        visited_TN[np.arange(len(some_TK))[:, None], worker_TK] = True
        load_N = np.bincount(worker_TK.ravel(), minlength=RANKS)
        visits, busiest, total_N = visits + int(visited_TN.sum()), busiest + int(load_N.max()), total_N + load_N
    T, K = expert_TK.shape
    mean = T * K / RANKS
    return visits / T * (RANKS - 1) / RANKS, float(total_N.max() / mean), busiest / mean


def _planned(
    model: str,
    trace: RoutingTrace,
    layers: np.ndarray,
    machine: str,
    ranks: int,
    per_node: int,
    dispatch: str,
    tokens: int,
) -> dict:
    """Return what a planned step gains that begins with homes of experts picked together on a rank, or on a node.

    The homes are searched on the routes of the step itself: they save at least as much as ones found before it.
    """
    cluster = replace(cluster_preset("h100x8", ranks, per_node), dispatch=dispatch)
    whole = cut_recorded(trace, tokens * ranks, ranks)
    demand, sample_T = whole.of_layers(layers), sample_of_rows(trace, whole)
    experts_TLK = trace.experts_TLK[:, layers]
    bins = cluster.num_nodes if dispatch == "hierarchical" else ranks
    found = plan_placements(experts_TLK[sample_T >= 0], trace.num_experts, bins, spare=0, cap=LOAD_CAP, seed=SEED)
    static = static_homes(cluster.topology, demand.layer_ids, trace.num_experts)
    home_LE, load_LE = found["picked together"].argmax(axis=1), demand.load_MLE.sum(axis=0)
    if bins < ranks:
        layouts = zip(load_LE, home_LE, static.home_LE, strict=True)
        home_LE = np.stack([deal_inside_nodes(*layout, ranks, per_node) for layout in layouts])
    together = static.with_home_ranks(home_LE.astype(np.int16))
    moves = relocation_seconds(static, together, cluster, expert_shape(model)) / Budget().steps_served

    def seconds(homes: Homes, *, move_homes: bool) -> tuple[float, float]:
        """Return the seconds of a step, with moves over ten steps: rows counted token by token, and by pairs."""
        budget = Budget(slots=1, move_homes=move_homes, pack_samples=False)
        plan = plan_step(demand, cluster, budget, expert=expert_shape(model), previous=homes)
        arrays, found = (plan, plan.scheduled(demand), cluster, expert_shape(model)), plan.predicted
        rows = distinct_rows_of_step(plan, arrays[1], experts_TLK, sample_T)
        bound = found["total"] - found["relocation"] * (1 - 1 / budget.steps_served)
        counted, by_pairs = (exchange_costs(*arrays, one) for one in (rows, None))
        more = sum(
            float((one.dispatch_ML + one.combine_ML).sum()) * sign for one, sign in ((counted, 2), (by_pairs, -2))
        )
        return bound + more, bound

    (planned, planned_bound), (there, there_bound) = (
        seconds(static, move_homes=True),
        seconds(together, move_homes=False),
    )
    return {
        "case": f"{model}, {machine}",
        "label": "model",
        "unit": "milliseconds of a step of these layers on H100, one slot per rank, as relibra plans it; ratios to it, "
        "where experts picked together are at home together: there already, and moved there over ten steps, rows "
        "counted token by token; the last with rows bounded by pairs, which is what a planner knows",
        "seed": SEED,
        "repetitions": 1,
        "model": model,
        "machine": machine,
        "dispatch": dispatch,
        "tokens": tokens,
        "planned": 1000 * planned,
        "there / planned": there / planned,
        "moved / planned": (there + moves) / planned,
        "bound / bound": (there_bound + moves) / planned_bound,
        "configuration": f"{len(demand.tokens_MLRE)} micro-batches, {len(layers)} layers",
    }


def _print(rows: list[dict], columns: tuple[str, ...]) -> None:
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for column in columns:
        is_text = isinstance(rows[0][column], str)
        table.add_column(column, justify="left" if is_text else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(f"{row[key]:.3f}" if isinstance(row[key], float) else str(row[key]) for key in columns))
    Console(width=140).print(table)
    print(rows[0]["unit"])
