"""Every balancer on recorded routes, side by side. Rows go to results/balancers_{gpt_oss,v2_lite}.json.

The later half of the micro-batches is planned; balancers that see the past plan from the earlier half. The recordings
are not part of the project; the script says so and stops when they are not there.
Run: python benchmarks/balancers.py FOLDER
"""

import sys
from pathlib import Path

from provenance import write_results

from relibra.cluster import cluster_preset
from relibra.planning.budget import Budget
from relibra.planning.comparison import comparable, compare
from relibra.planning.objective import expert_shape
from relibra.routing.micro_batches import cut_recorded, select_micro_batches
from relibra.routing.readers import open_trace

CASES = {
    "balancers_gpt_oss": ("gpt_oss_20b_decode_topk.npz", 32, 2048, "gpt-oss-20b"),
    "balancers_v2_lite": ("deepseek_v2_lite_esft_topk.npz", 64, 1024, "deepseek-v2-lite"),
}
RANKS = (8, 16, 32)


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) == 2 else Path("recordings")
    for name, (file, experts, tokens, model) in CASES.items():
        if not (folder / file).exists():
            sys.exit(f"skipped: {folder / file} is not there; name the folder that holds the recordings")
        trace = open_trace(folder / file, experts)
        half = len(cut_recorded(trace, tokens, RANKS[0]).load_MLE) // 2
        token_slots = half * tokens * trace.top_k * trace.num_layers
        tables = {ranks: _compared(trace, ranks, tokens, model) for ranks in RANKS}
        rows = []
        for balancer, last in tables[RANKS[-1]].items():
            found = {ranks: tables[ranks][balancer] for ranks in RANKS}
            assert all(row.valid for row in found.values()), f"{balancer} made a plan that is not valid"
            rows.append(
                {
                    "case": f"{model}, {balancer}",
                    "label": "measured",
                    "unit": "skew, 1 spare slot per rank, nodes of 8 ranks, later half of the micro-batches of "
                    f"{tokens} tokens in recorded order; on 32 ranks: copies per micro-batch and layer, share of "
                    "token-slots computed on another node, milliseconds of planning per layer",
                    "seed": 0,
                    "repetitions": 1,
                    "balancer": balancer,
                    "sees": last.sees,
                    **{f"{ranks} ranks": found[ranks].skew for ranks in RANKS},
                    "copies": last.copies_per_micro_batch_layer,
                    "across nodes": last.cross_node_token_slots / token_slots,
                    "plan ms": 1000 * last.plan_seconds / trace.num_layers,
                }
            )
        # Where the recordings lie says something of a machine, not of the result.
        print(write_results(name, rows, command="python benchmarks/balancers.py FOLDER"))


def _compared(trace, ranks: int, tokens: int, model: str) -> dict:
    whole = cut_recorded(trace, tokens, ranks)
    half = len(whole.load_MLE) // 2
    rows = compare(
        select_micro_batches(whole, half),
        cluster_preset("h100x8", ranks, 8),
        Budget(slots=1, objective="tokens", threads=2),
        [name for name in comparable() if name != "relibra+seconds"],
        expert=expert_shape(model),
        history_MLE=whole.load_MLE[:half],
    )
    return {row.balancer: row for row in rows}


if __name__ == "__main__":
    main()
