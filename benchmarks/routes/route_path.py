"""Time of routes from the rollout engine to the layer that replays them, on one core.

One rank takes windows with routes, as an engine reports them, through all that a step does with routes before a layer
sees them: responses, step trace (validated, hashed, written), exchange, demand, micro-batches with `BatchRoutes`. Rows
go to results/route_path.json.
Run: relibra bench route_path [--quick] [--json] [--output FOLDER]
--quick takes fewer samples and repetitions, and writes no rows.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from benchmarks.harness.options import measurement_options
from benchmarks.harness.provenance import quartiles, write_results
from relibra.cluster import cluster_preset
from relibra.rl.batch.training_batch import build_batch
from relibra.rl.config.run_config import load_config
from relibra.rl.model.policy import Policy
from relibra.rl.rollout.response import Window, new_response
from relibra.rl.run.ranks import connect_ranks, joined_ranks
from relibra.rl.run.step_trace import StepTraces, record_routes
from relibra.routing.synthetic import TraceShape, domain_trace

REPETITIONS = 7
SEED = 0
TOKENS, PROMPT, LAYERS, EXPERTS, TOP_K = 512, 64, 48, 128, 8
MICRO_BATCH_TOKENS = 4096
STAGES = ("responses", "step trace", "demand, exchange and micro-batches")


def main() -> None:
    options = measurement_options(__doc__).parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    samples, repetitions = (8, 2) if options.quick else (64, REPETITIONS)
    rows = measured(samples, repetitions)
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        for row in rows:
            low, high = row["us_per_token low"], row["us_per_token high"]
            print(f"{row['case']}: {row['us_per_token']} us per token ({low:.2f} to {high:.2f})")
    if not options.quick:
        print(write_results("route_path", rows, "relibra bench route_path", options.output), file=sys.stderr)


def measured(samples: int, repetitions: int) -> list[dict]:
    """Take the same windows through a step's stages, again and again; one row per stage and one for all."""
    windows = _windows(samples)
    with joined_ranks(60.0, torch.device("cpu"), connect_ranks(60.0, "tcp://127.0.0.1:0?rank=0&world_size=1")):
        seconds = [_pass(windows) for _ in range(repetitions + 1)][1:]  # the first one compiles and warms caches
    tokens = samples * TOKENS
    by_stage = dict(zip(STAGES, zip(*seconds, strict=True), strict=True))
    cases = {"all": [sum(one) for one in seconds], **{stage: list(found) for stage, found in by_stage.items()}}
    return [_row(case, [1e6 * one / tokens for one in found], samples) for case, found in cases.items()]


def _windows(samples: int) -> list[Window]:
    """Return windows as an engine reports them: routes of all tokens but the last, each in memory of its own."""
    shape = TraceShape(rows_per_sample=[TOKENS - 1] * samples, num_layers=LAYERS, num_experts=EXPERTS, top_k=TOP_K)
    trace, rng = domain_trace(shape, np.random.default_rng(SEED)), np.random.default_rng(SEED + 1)
    return [
        Window(
            tokens_w=rng.integers(0, 50_000, TOKENS - PROMPT),
            log_probs_w=-rng.random(TOKENS - PROMPT, dtype=np.float32),
            experts_mLK=trace.experts_TLK[trace.sample_rows(s)].copy(),
            stopped=True,
        )
        for s in range(samples)
    ]


def _pass(windows: list[Window]) -> tuple[float, float, float]:
    """Return the seconds of each stage."""
    config = load_config(
        None, ["parallel.ranks=1", f"model.num_experts={EXPERTS}", f"update.micro_batch_tokens={MICRO_BATCH_TOKENS}"]
    )
    model = nn.Identity()
    policy = Policy(
        trained=model,
        meta=model,
        num_experts=EXPERTS,
        layer_ids=tuple(range(LAYERS)),
        top_k=TOP_K,
        balanced=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        begun = [new_response(s, s // 8, range(PROMPT)) for s in range(len(windows))]
        responses = [
            replace(one.extended(window, weight_version=0, max_response=TOKENS), reward=1.0)
            for one, window in zip(begun, windows, strict=True)
        ]
        sampled = time.perf_counter()
        traces = StepTraces(Path(folder), config.trace, num_experts=EXPERTS, layer_ids=policy.layer_ids)
        responses = record_routes(0, responses, traces)
        written = time.perf_counter()
        batch = build_batch(responses, policy, config, previous=None, cluster=cluster_preset("laptop", 1))
        end = time.perf_counter()
    rows = sum(one.routes.num_rows for one in batch.micro_batches if one.routes is not None)
    assert rows == len(windows) * (TOKENS - 1), "every fed token has its routes"
    return sampled - begin, written - sampled, end - written


def _row(case: str, us_per_token: list[float], samples: int) -> dict:
    return {
        "case": f"engine to layer: {case}",
        "label": "measured",
        "unit": "microseconds per token, one core, median",
        "us_per_token": round(statistics.median(us_per_token), 2),
        **quartiles(us_per_token, "us_per_token"),
        "seed": SEED,
        "repetitions": len(us_per_token),
        "configuration": f"{samples} responses x {TOKENS} tokens x {LAYERS} layers x {TOP_K} of {EXPERTS} experts, one "
        f"rank, micro-batches of {MICRO_BATCH_TOKENS} tokens, R3; the step trace is written to disk",
    }


if __name__ == "__main__":
    main()
