"""What does a window buy in decoding, and what does it cost in prompts fed again? A model of slots, without an engine.

Responses with lognormal lengths decode in a fixed number of slots, and a slot whose response has ended idles until the
step does. A step that waits for the longest response (PPO) is held against steps of at most W tokens per response, of
which unfinished ones go on in the next (T-PPO). A decode step costs 1 + b x responses under way: b = 0 is a decoder
bound by reading weights. Feeding the earlier tokens of a response again is not in the ratios, and is reported beside
them. Rows go to results/rollout_windows.json.
Run: python benchmarks/rollout_windows.py [--quick] [--json] [--output FOLDER]
--quick writes no rows.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.random import Generator
from provenance import RESULTS, write_results
from rich.console import Console
from rich.table import Table

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


@dataclass(frozen=True)
class Steps:
    """Totals over some steps."""

    tokens: int
    decode_steps: int
    continued: int
    fed_again: int
    slots: int

    @property
    def idle(self) -> float:
        """Share of slots x decode steps without a response."""
        return 1 - self.tokens / (SLOTS * self.decode_steps)

    def tokens_per_time(self, cost_per_response: float) -> float:
        """Return the rate if a decode step costs 1 + cost x responses under way; summed up, those are the tokens."""
        return self.tokens / (self.decode_steps + cost_per_response * self.tokens)


def run(median: float, sigma: float, window: int, rng: Generator, *, steps: int = STEPS) -> Steps:
    """Decode steps of at most `window` tokens per response, after a burn-in; unfinished responses go on first."""
    length_B = _lengths(median, sigma, rng)
    done_B = np.zeros(SLOTS, dtype=np.int64)
    tokens = decode_steps = continued = fed_again = 0
    for step in range(BURN_IN + steps):
        added_B = np.minimum(length_B - done_B, window)
        if step >= BURN_IN:
            tokens += int(added_B.sum())
            decode_steps += int(added_B.max())
            continued += int((done_B > 0).sum())
            fed_again += int(done_B.sum())
        done_B += added_B
        finished_B = done_B == length_B
        length_B = np.where(finished_B, _lengths(median, sigma, rng), length_B)
        done_B[finished_B] = 0
    return Steps(tokens, decode_steps, continued, fed_again, SLOTS * steps)


def _lengths(median: float, sigma: float, rng: Generator) -> np.ndarray:
    return np.clip(np.rint(rng.lognormal(np.log(median), sigma, SLOTS)), 1, LONGEST).astype(np.int64)


def modelled(cases: Sequence[tuple[float, float, int]], repetitions: int) -> list[dict]:
    """Hold windows against synchronous steps; one row per case."""
    rows = []
    for median, sigma, window in cases:
        found = []
        for repetition in range(repetitions):
            rng = np.random.default_rng([SEED, repetition])
            sync, windowed = (run(median, sigma, tokens, rng) for tokens in (LONGEST, window))
            found.append(
                {
                    "idle sync": sync.idle,
                    "idle window": windowed.idle,
                    "rate, b = 0": windowed.tokens_per_time(0) / sync.tokens_per_time(0),
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows = modelled(CASES, 1 if options.quick else REPETITIONS)
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        print_rows(rows)
    if not options.quick:
        command = "python benchmarks/rollout_windows.py"
        print(write_results("rollout_windows", rows, command, options.output), file=sys.stderr)


if __name__ == "__main__":
    main()
