"""Decode steps and prompts fed again with rollout windows, in a model of slots without an engine.

Responses with lognormal lengths decode in a fixed number of slots, and a slot whose response has ended idles until the
step does. A step that waits for the longest response (PPO) is held against steps of at most W tokens per response, of
which unfinished ones go on in the next (T-PPO). A decode step costs 1 + b x responses under way: b = 0 is a decoder
bound by reading weights. Feeding the earlier tokens of a response again is not in these ratios, and is reported beside
them. Other ratios price it, or keep the keys and values over the update (`rollout.on_update=keep`), and all passes of
training, in which a response that goes on feeds its earlier tokens anyway: for a dense model of 32B on 32 H100.
Rows go to results/rollout_windows.json.
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
from benchmarks.simulation.windows import WindowTotals, decode_in_windows
from relibra.cluster import cluster_preset
from relibra.planning.costs.expert_shape import ExpertShape
from relibra.simulation.model_shape import ModelShape
from relibra.simulation.rollout import LengthDistribution, decode_cost, prefill_seconds

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

ENGINES, ENGINE_RANKS = 4, 8
CLUSTER = cluster_preset("h100x8", ENGINES * ENGINE_RANKS)
MODEL = ModelShape(
    name="dense 32B",
    moe_layers=64,
    hidden=5120,
    query_heads=40,
    kv_heads=8,
    head_dim=128,
    experts=1,  # of which every token takes the one: a dense layer
    top_k=1,
    expert=ExpertShape(hidden=5120, width=27_648),
    vocabulary=152_064,
)
WHOLE = ("rollout, fed again", "rollout, kept", "step, fed again", "step, kept")
UPDATE, VALUES = 4, 1
"""Passes forward that cost as much: an update that recomputes activations; values without gradients."""
CITED = "up to 2.5 in training (arXiv 2506.15050)"

UNIT = (
    "idle: share of slots x decode steps without a response; rate: tokens per time, windowed / synchronous, without "
    "feeding earlier tokens again; continued: share of slots that go on with a response; fed again: earlier response "
    "tokens per decoded token; rollout, step: tokens per second, windowed / synchronous, of decoding with what is fed "
    "again or with kept keys, and with all passes of training; medians over repetitions"
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
                    **at_32b(sync, windowed, draw(10_000, rng)),
                }
            )
        rows.append({
            "case": f"median {median:,}, sigma {sigma:g}, W = {window:,}", "label": "model", "unit": UNIT,
            "seed": SEED, "repetitions": repetitions, "median": median, "sigma": sigma, "window": window,
            **{name: float(np.median([one[name] for one in found])) for name in found[0]},
            "configuration": (
                f"{SLOTS} slots, lengths lognormal and at most {LONGEST:,}, {STEPS} steps after {BURN_IN}, no refill "
                f"within a step; rollout and step: {MODEL.name}, {ENGINES} engines of {ENGINE_RANKS} H100, which train "
                "too, without prompts"
            ),
            "cited": CITED,
        })  # fmt: skip
    return rows


def at_32b(sync: WindowTotals, windowed: WindowTotals, length_S: np.ndarray) -> dict[str, float]:
    """Return tokens per second, windowed / synchronous: of the rollout and of a whole step, fed again or kept."""
    context = float((length_S.astype(np.float64) ** 2).sum() / (2 * length_S.sum()))
    cost = decode_cost(MODEL, CLUSTER, ENGINE_RANKS, context)

    def forward(tokens: int, responses: int) -> float:
        mean = round(tokens / responses) if responses else 0
        return prefill_seconds(MODEL, CLUSTER, CLUSTER.num_ranks, np.full(responses, mean))

    def rates(of: WindowTotals, *, kept: bool) -> tuple[float, float]:
        decode = cost.seconds(of.decode_steps, of.tokens // ENGINES)
        rollout = decode + (0.0 if kept else forward(of.fed_again, of.continued))
        # The update and values feed whole responses so far; the value model learns from those that have ended.
        policy = (UPDATE + VALUES) * forward(of.tokens + of.fed_again, of.slots)
        training = policy + UPDATE * forward(of.tokens, of.slots - of.continued)
        return of.tokens / rollout, of.tokens / (rollout + training)

    before = rates(sync, kept=True)
    found = {"fed again": rates(windowed, kept=False), "kept": rates(windowed, kept=True)}
    return {
        f"{part}, {how}": rate / before[i]
        for i, part in enumerate(("rollout", "step"))
        for how, rate in ((how, both[i]) for how, both in found.items())
    }


def print_rows(rows: list[dict]) -> None:
    """Print two tables: slots alone, and seconds of a 32B model."""
    slots = {
        "idle sync": "idle\nsync",
        "idle window": "idle\nwindow",
        "rate, b = 0": "rate\nb = 0",
        f"rate, b = 1/{SLOTS}": f"rate\nb = 1/{SLOTS}",
        "continued": "\ncontinued",
        "fed again": "fed\nagain",
    }
    for name, columns in (("windows", slots), (MODEL.name, {one: one.replace(", ", "\n") for one in WHOLE})):
        table = Table(title=f"model of {name}", title_justify="left", box=None, padding=(0, 1), pad_edge=False)
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
