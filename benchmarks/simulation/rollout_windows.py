"""Decode steps and prompts fed again with rollout windows, in a model of slots without an engine.

Responses with lognormal lengths decode in a fixed number of slots, and a slot whose response has ended idles until the
step does. A step that waits for the longest response (PPO) is held against steps of at most W tokens per response, of
which unfinished ones go on in the next (T-PPO). A decode step costs 1 + b x responses under way: b = 0 is a decoder
bound by reading weights. Feeding the earlier tokens of a response again is not in the ratios, and is reported beside
them. Rows go to results/rollout_windows.json.
Run: relibra bench rollout_windows [--quick] [--json] [--output FOLDER]
--quick writes no rows.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.harness.options import measurement_options
from benchmarks.harness.provenance import write_results
from benchmarks.simulation.windows import decode_in_windows
from relibra.simulation import LengthDistribution

SLOTS, LONGEST = 512, 24_576
BURN_IN, STEPS, REPETITIONS, SEED = 20, 50, 5, 0
COST_PER_RESPONSE = 1 / SLOTS
CASES = (
    (3_000, 0.9, 8_192),
    (6_000, 0.6, 8_192),
    (6_000, 0.9, 8_192),
    (8_000, 0.5, 8_192),
    (6_000, 0.6, 4_096),
    (3_000, 0.9, 4_096),
)
"""Median length, sigma of its logarithm, window."""

UNIT = (
    "idle: share of slots x decode steps without a response; rate: tokens per time, windowed / synchronous, without "
    "feeding earlier tokens again; continued: share of slots that go on with a response; fed again: earlier response "
    "tokens per decoded token; medians over repetitions"
)


def modelled(cases: Sequence[tuple[float, float, int]], repetitions: int) -> list[dict]:
    """Hold windows against synchronous steps; one row per case."""
    rows = []
    for median, sigma, window in cases:
        found = []
        for repetition in range(repetitions):
            rng = np.random.default_rng([SEED, repetition])
            draw = LengthDistribution(median=float(median), sigma=sigma, longest=LONGEST).draw
            sync, windowed = (
                decode_in_windows(draw, SLOTS, tokens, rng, steps=STEPS, burn_in=BURN_IN)
                for tokens in (LONGEST, window)
            )
            found.append(
                {
                    "idle sync": sync.idle(SLOTS),
                    "idle window": windowed.idle(SLOTS),
                    "rate, b = 0": windowed.tokens_per_time(0.0) / sync.tokens_per_time(0.0),
                    f"rate, b = 1/{SLOTS}": windowed.tokens_per_time(COST_PER_RESPONSE)
                    / sync.tokens_per_time(COST_PER_RESPONSE),
                    "continued": windowed.continued / windowed.slots,
                    "fed again": windowed.fed_again / windowed.tokens,
                }
            )
        rows.append({
            "case": f"median {median:,}, sigma {sigma:g}, W = {window:,}", "label": "model", "unit": UNIT,
            "seed": SEED, "repetitions": repetitions, "median": median, "sigma": sigma, "window": window,
            **{name: float(np.median([one[name] for one in found])) for name in found[0]},
            "configuration": (
                f"{SLOTS} slots, lengths lognormal and at most {LONGEST:,}, {STEPS} steps after {BURN_IN}, no refill "
                "within a step"
            ),
        })  # fmt: skip
    return rows


def print_rows(rows: list[dict]) -> None:
    """Print one table."""
    columns = {
        "idle sync": "idle\nsync",
        "idle window": "idle\nwindow",
        "rate, b = 0": "rate\nb = 0",
        f"rate, b = 1/{SLOTS}": f"rate\nb = 1/{SLOTS}",
        "continued": "\ncontinued",
        "fed again": "fed\nagain",
    }
    table = Table(title="model of windows", title_justify="left", box=None, padding=(0, 1), pad_edge=False)
    for title in ("\nmedian", "\nsigma", "\nW", *columns.values()):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        sizes = f"{row['median']:,}", f"{row['sigma']:g}", f"{row['window']:,}"
        table.add_row(*sizes, *(f"{row[column]:.2f}" for column in columns))
    Console().print(table)
    print(UNIT)


def main() -> None:
    options = measurement_options(__doc__).parse_args()
    rows = modelled(CASES, 1 if options.quick else REPETITIONS)
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        print_rows(rows)
    if not options.quick:
        command = "relibra bench rollout_windows"
        print(write_results("rollout_windows", rows, command, options.output), file=sys.stderr)
