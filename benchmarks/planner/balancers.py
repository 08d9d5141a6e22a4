"""Every balancer on recorded routes, side by side. Rows go to results/balancers_{gpt_oss,v2_lite}.json.

The later half of the micro-batches is planned; balancers that see the past plan from the earlier half. The recordings
are not part of the project; the program says so and writes nothing when they are not there.
Run: relibra bench balancers [--quick] [--json] [--data FOLDER] [--output FOLDER].
Two minutes. --quick plans for 8 ranks only, once, and writes no rows.
"""

import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.harness.options import measurement_options
from benchmarks.harness.provenance import quartiles, write_results
from benchmarks.harness.recorded_cuts import cut_recorded
from relibra.cluster import cluster_preset
from relibra.planning.budget import Budget
from relibra.planning.costs.expert_shape import expert_shape
from relibra.planning.registry import BALANCERS
from relibra.reporting.data.comparison import iterate_comparison
from relibra.routing.micro_batches import select_micro_batches
from relibra.routing.readers import open_trace

CASES = {
    "balancers_gpt_oss": ("gpt_oss_20b_decode_topk.npz", 32, 2048, "gpt-oss-20b"),
    "balancers_v2_lite": ("deepseek_v2_lite_esft_topk.npz", 64, 1024, "deepseek-v2-lite"),
}
RANKS = (8, 16, 32)


OWN_SLOTS = {"ultraep": 2, "ultraep_shipped": 2}
"""Spare slots per rank that a system ships with, where they are not the one that others get."""
REPETITIONS = 3
"""Of planning, for its time; skew and copies are the same each time."""


def main() -> None:
    options = measurement_options(__doc__, data=True).parse_args()
    for file, *_ in CASES.values():
        if not (options.data / file).exists():
            print(f"skipped: {options.data / file} is not there; name its folder with --data", file=sys.stderr)
            return
    ranks, repetitions = (RANKS[:1], 1) if options.quick else (RANKS, REPETITIONS)
    tables = {name: _rows(options.data, *case, ranks, repetitions) for name, case in CASES.items()}
    if options.json:
        print(json.dumps([row for rows in tables.values() for row in rows], indent=1))
    else:
        for rows in tables.values():
            print_rows(rows, ranks)
    if not options.quick:
        for name, rows in tables.items():
            # Where the recordings lie says something of a machine, not of the result.
            print(write_results(name, rows, "relibra bench balancers", options.output), file=sys.stderr)


def _rows(
    data: Path, file: str, experts: int, tokens: int, model: str, all_ranks: tuple[int, ...], repetitions: int
) -> list[dict]:
    trace = open_trace(data / file, experts)
    half = len(cut_recorded(trace, tokens, all_ranks[0]).load_MLE) // 2
    token_slots = half * tokens * trace.top_k * trace.num_layers
    tables = {ranks: _compared(trace, ranks, tokens, model) for ranks in all_ranks[:-1]}
    # All balancers once, then all again: a slow moment of the machine falls on none of them alone.
    rounds = [_compared(trace, all_ranks[-1], tokens, model) for _ in range(repetitions)]
    rows = []
    for balancer, last in rounds[0].items():
        found = {**{ranks: table[balancer] for ranks, table in tables.items()}, all_ranks[-1]: last}
        assert all(row.valid for row in found.values()), f"{balancer} made a plan that is not valid"
        milliseconds = [1000 * one[balancer].plan_seconds / trace.num_layers for one in rounds]
        rows.append(
            {
                "case": f"{model}, {balancer}",
                "label": "measured",
                "unit": "skew, nodes of 8 ranks, later half of the micro-batches of "
                f"{tokens} tokens in recorded order; on {all_ranks[-1]} ranks: slots per rank, copies per "
                "micro-batch and layer, share of token-slots computed on another node, milliseconds of planning per "
                "layer, median",
                "seed": 0,
                "repetitions": repetitions,
                "balancer": balancer,
                "sees": last.sees,
                "slots": last.slots,
                **{f"{ranks} ranks": found[ranks].skew for ranks in all_ranks},
                "copies": last.copies_per_micro_batch_layer,
                "across nodes": last.cross_node_token_slots / token_slots,
                "plan ms": statistics.median(milliseconds),
                **quartiles(milliseconds, "plan ms"),
            }
        )
    return rows


def print_rows(rows: list[dict], all_ranks: tuple[int, ...]) -> None:
    """Print the skews and what planning takes."""
    columns = ("balancer", "sees", "slots", *(f"{ranks} ranks" for ranks in all_ranks), "copies", "plan ms")
    table = Table(title=rows[0]["case"].split(",")[0], title_justify="left", box=None, padding=(0, 1), pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column in ("balancer", "sees") else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(f"{row[c]:.3f}" if isinstance(row[c], float) else str(row[c]) for c in columns))
    Console(width=110).print(table)
    print(rows[0]["unit"])


def _compared(trace, ranks: int, tokens: int, model: str) -> dict:
    whole = cut_recorded(trace, tokens, ranks)
    half = len(whole.load_MLE) // 2
    budget, names = Budget(slots=1), list(BALANCERS)
    own = [(replace(budget, slots=slots), [name]) for name, slots in OWN_SLOTS.items()]
    others = [name for name in names if name not in OWN_SLOTS]
    rows = [
        row
        for each, balancers in [(budget, others), *own]
        for row, _ in iterate_comparison(
            select_micro_batches(whole, half),
            cluster_preset("h100x8", ranks, 8),
            each,
            balancers,
            expert=expert_shape(model),
            history_MLE=whole.load_MLE[:half],
        )
    ]
    return {row.balancer: row for row in sorted(rows, key=lambda row: names.index(row.balancer))}
