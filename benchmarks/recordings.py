"""Skew of recorded routes under the static layout. Rows go to results/recordings.json.

The recordings are not part of the project; the script says so and stops when they are not there.
Run: python benchmarks/recordings.py FOLDER
"""

import sys
from pathlib import Path

from provenance import write_results

from relibra.routing.readers import iterate_routes
from relibra.routing.survey import survey

CASES = (
    ("gpt_oss_20b_decode_topk.npz", "gpt-oss-20b, decoding"),
    ("deepseek_v2_lite_esft_topk.npz", "DeepSeek-V2-Lite"),
)
TOKENS = 2048


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) == 2 else Path("recordings")
    rows = []
    for file, name in CASES:
        if not (folder / file).exists():
            sys.exit(f"skipped: {folder / file} is not there; name the folder that holds the recordings")
        result = survey(lambda file=file: iterate_routes(folder / file), ranks=[8, 16, 32], micro_batch_tokens=TOKENS)
        rows += [
            {
                "case": name,
                "label": "measured",
                "unit": "rank skew, static layout, mean over (micro-batch, layer)",
                "ranks": layout.ranks,
                "median": round(layout.skew_median, 3),
                "mean": round(layout.skew_mean, 3),
                "p95": round(layout.skew_p95, 3),
                "seed": None,
                "repetitions": 1,
                "configuration": f"{result.rows:,} tokens, {result.layers} layers, {result.top_k} of {result.experts} "
                f"experts, micro-batches of {TOKENS:,} tokens in recorded order",
            }
            for layout in result.layouts
        ]
    # Where the recordings lie says something of a machine, not of the result.
    print(write_results("recordings", rows, command="python benchmarks/recordings.py FOLDER"))


if __name__ == "__main__":
    main()
