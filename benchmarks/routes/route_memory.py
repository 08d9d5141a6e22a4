"""Memory and seconds of a step's routes on two ranks: 1,024 responses of 16,384 tokens, 48 layers, 8 choices.

Two processes hold half of the responses each, as engines hand them over, and take them through all that a step does
with routes before a layer sees them: step trace (validated, written), counts for the planner, exchange, micro-batches.
Counted is the memory of both processes above what they had before the routes. Rows go to results/route_memory.json.
Run: relibra bench route_memory [--quick] [--json] [--output FOLDER]. Four minutes, 12 GB of disk.
--quick takes short responses, and writes no rows.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.multiprocessing.spawn import spawn

from benchmarks.harness.options import measurement_options
from benchmarks.harness.process_memory import process_bytes
from benchmarks.harness.provenance import write_results
from relibra.cluster import cluster_preset
from relibra.rl.batch.training_batch import build_batch
from relibra.rl.config.run_config import load_config
from relibra.rl.model.policy import Policy
from relibra.rl.rollout.response import Response
from relibra.rl.run.ranks import joined_ranks
from relibra.rl.run.step_metrics import route_bytes
from relibra.rl.run.step_trace import StepTraces, record_routes

NUM_RANKS = 2
SAMPLES, TOKENS, QUICK_TOKENS = 1024, 16_384, 128
PROMPT, LAYERS, EXPERTS, TOP_K = 64, 48, 128, 8
TARGET_GIB = 8.0
STAGES = ("rollout", "trace", "plan, exchange and micro-batches")
"""Names of the rows; those of `route_bytes` belong to them in the same order, plan and exchange to the last."""


def main() -> None:
    options = measurement_options(__doc__).parse_args()
    tokens = QUICK_TOKENS if options.quick else TOKENS
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
        probe.close()
        spawn(_work, (tokens, port, Path(folder)), nprocs=NUM_RANKS)
        found = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(NUM_RANKS)]
    rows = [_row(stage, found, tokens) for stage in (*STAGES, "all")]
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        for row in rows:
            print(f"{row['case']}: {row['peak_gib']} GiB at most, {row['seconds']} s, {row['gigabytes']} GB moved")
    if not options.quick:
        print(write_results("route_memory", rows, "relibra bench route_memory", options.output), file=sys.stderr)


def _work(rank: int, tokens: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    settings = [f"parallel.ranks={NUM_RANKS}", f"model.num_experts={EXPERTS}", f"update.micro_batch_tokens={tokens}"]
    config, model = load_config(None, settings), nn.Identity()
    layers = tuple(range(LAYERS))
    policy = Policy(trained=model, meta=model, num_experts=EXPERTS, layer_ids=layers, top_k=TOP_K, balanced=False)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(NUM_RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    with joined_ranks(600.0, torch.device("cpu")):
        record_routes(0, _responses(rank, 8), StepTraces(folder / "first", config.trace, num_experts=EXPERTS,
                                                         layer_ids=layers))  # fmt: skip  # compiles kernels
        traces = StepTraces(folder, config.trace, num_experts=EXPERTS, layer_ids=layers)
        before = process_bytes("VmRSS", reset_peak=True)
        peaks, clock = [], [time.perf_counter()]
        responses = _responses(rank, tokens)
        routed = sum(one.experts_mLK.nbytes for one in responses if one.experts_mLK is not None)
        _end_stage(peaks, clock, before)
        responses = record_routes(0, responses, traces)
        _end_stage(peaks, clock, before)
        batch = build_batch(responses, policy, config, previous=None, cluster=cluster_preset("laptop", NUM_RANKS))
        _end_stage(peaks, clock, before)
        rows = sum(one.routes.num_rows for one in batch.micro_batches if one.routes is not None)
        assert rows == len(batch.responses) * (tokens - 1), "every fed token has its routes"
        moved = route_bytes(batch, routed=routed, traced=traces.written_bytes)
    found = {"peaks": peaks, "seconds": np.diff(clock).tolist(), "moved": moved}
    (folder / f"{rank}.json").write_text(json.dumps(found))


def _responses(rank: int, tokens: int) -> list[Response]:
    """Return half of the responses, each with memory of its own: distinct experts in every (token, layer)."""
    rng = np.random.default_rng(rank)
    first_NLK = rng.permuted(np.tile(np.arange(EXPERTS, dtype=np.uint8), (64, LAYERS, 1)), axis=2)[..., :TOP_K]
    response = tokens - PROMPT if tokens > PROMPT else tokens - 1
    return [
        Response(
            sample_id=s,
            group_id=s // 8,
            tokens_n=rng.integers(0, 50_000, tokens),
            prompt_length=tokens - response,
            log_probs_r=-rng.random(response, dtype=np.float32),
            versions_r=np.zeros(response, dtype=np.int32),
            values_r=np.full(response, np.nan, dtype=np.float32),
            experts_mLK=(np.resize(first_NLK, (tokens - 1, LAYERS, TOP_K)) + np.uint8(s % EXPERTS)) % np.uint8(EXPERTS),
            windows=1,
            window_length=response,
            finish_reason="stop",
            reward=1.0,
        )
        for s in range(rank * SAMPLES // NUM_RANKS, (rank + 1) * SAMPLES // NUM_RANKS)  # half of them has to move
    ]


def _end_stage(peaks: list[int], clock: list[float], before: int) -> None:
    """Note the peak of memory since the last stage, and the time."""
    peaks.append(process_bytes("VmHWM") - before)
    clock.append(time.perf_counter())
    process_bytes("VmRSS", reset_peak=True)


def _row(stage: str, found: list[dict], tokens: int) -> dict:
    moved = found[0]["moved"]  # of all ranks
    by_stage = dict(zip(STAGES, (moved["rollout"], moved["trace"], moved["plan"] + moved["exchange"]), strict=True))
    at = range(len(STAGES)) if stage == "all" else [STAGES.index(stage)]
    peak = sum(max(one["peaks"][i] for i in at) for one in found) / 2**30
    return {
        "case": f"routes of a step: {stage}",
        "label": "measured",
        "unit": "GiB of both processes above what they had before the routes; GB that are handed over, written or sent",
        "peak_gib": round(peak, 2),
        "target": f"<= {TARGET_GIB}" if stage == "all" else "",
        "ok": peak <= TARGET_GIB if stage == "all" else "",
        "gigabytes": round(sum(by_stage[STAGES[i]] for i in at) / 1e9, 2),
        "seconds": round(max(sum(one["seconds"][i] for i in at) for one in found), 1),
        "samples": SAMPLES,
        "tokens": tokens,
        "seed": 0,
        "repetitions": 1,
        "configuration": f"{SAMPLES} responses x {tokens} tokens x {LAYERS} layers x {TOP_K} of {EXPERTS} experts, "
        f"{NUM_RANKS} ranks on one machine, R3; the step trace is written to disk",
    }


if __name__ == "__main__":
    main()
