"""Time to prepare the rows of a micro-batch, and how much of a step waits for it.

Preparation: the work of one rank per layer, in processor time of one core, at the sizes of Qwen3-30B-A3B: tables and
row lists, without the exchange between ranks. Step: on two processes, routes known when the step begins (as in
`relibra train`) or only when a micro-batch is entered; last tokens without routes. Rows go to results/preparation.json.
Run: relibra bench preparation [--quick] [--json] [--output FOLDER]
--quick takes fewer layers, a toy model and few repetitions, and writes no rows.
"""

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.harness.options import measurement_options
from benchmarks.harness.provenance import quartiles, write_results
from benchmarks.runtime import steps
from benchmarks.runtime.runtime import SYNTHETIC, TINY, make_variant
from relibra import Budget, plan_step
from relibra.cluster import cluster_preset
from relibra.parallel.rows.prepared_rows import prepare_rows
from relibra.parallel.rows.row_lists import row_lists
from relibra.planning.traffic.rank_tables import micro_batch_tables, rank_tables
from relibra.replay import BatchRoutes
from relibra.routing.demand import Demand
from relibra.routing.synthetic import TraceShape, domain_trace
from relibra.routing.trace import RoutingTrace

SEED = 0
RANKS, LAYERS, EXPERTS, TOP_K = 8, 48, 128, 8
TOKENS = (1024, 8192)
"""Of a rank in a micro-batch; with the first one the micro-batch has 8,192."""
REPETITIONS, STEPS = 15, 5
TARGET_MS, TARGET_SHARE = 0.15, 0.01


def main() -> None:
    options = measurement_options(__doc__).parse_args()
    with steps.freed_memory(kept=True), ProcessPoolExecutor(1, get_context("spawn")) as process:
        rows = process.submit(_work, options.quick).result()
    rows += _steps(options.quick)
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        for row in rows:
            print(f"{row['case']}, {row['configuration']}: {row['value']:.4g} {row['unit']}")
    if not options.quick:
        print(write_results("preparation", rows, "relibra bench preparation", options.output), file=sys.stderr)


def _work(quick: bool) -> list[dict]:
    """Time one rank alone, in a process of its own: a group of `fake` ranks exchanges nothing."""
    torch.set_num_threads(1)
    layers, repetitions = (4, 2) if quick else (LAYERS, REPETITIONS)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    try:
        sizes = TOKENS[:1] if quick else TOKENS
        return [row for tokens in sizes for row in _work_of(tokens, layers, repetitions)]
    finally:
        dist.destroy_process_group()


def _work_of(tokens: int, layers: int, repetitions: int) -> Iterator[dict]:
    shape = TraceShape(rows_per_sample=[tokens], num_layers=layers, num_experts=EXPERTS, top_k=TOP_K)
    of_rank_TLK = domain_trace(shape, np.random.default_rng(SEED)).experts_TLK
    trace = RoutingTrace.from_samples(  # the other ranks have the same rows, in another order
        [np.roll(of_rank_TLK, rank, axis=0) for rank in range(RANKS)],
        num_experts=EXPERTS,
        layer_ids=list(range(layers)),
    )
    demand = Demand.from_trace(trace).with_schedule(np.zeros(RANKS, dtype=int), np.arange(RANKS), RANKS)
    cluster, budget = cluster_preset("h100x8", RANKS, RANKS), Budget(slots=1, pack_samples=False)
    plan = plan_step(demand, cluster, budget, "relibra_paper_tokens", never_worse=False)
    routes = BatchRoutes.of_rows(
        [trace.experts_TLK[trace.sample_rows(0)]],
        num_experts=EXPERTS,
        layer_ids=trace.layer_ids.tolist(),
        sample_ids=[0],
        weight_versions=[0],
    )
    group, device, compiled, one_by_one = dist.group.WORLD, torch.device("cpu"), [], []
    for _ in range(repetitions + 1):
        start = time.thread_time()
        rows = prepare_rows(micro_batch_tables(plan, demand, 0, 0), routes, group)
        rows.lists_on(device, None)
        compiled.append((time.thread_time() - start) / layers * 1e3)
    for _ in range(3):
        start = time.thread_time()
        for layer in range(layers):
            tables = rank_tables(plan, demand, 0, 0, layer)
            row_lists(tables, routes.experts_TLK[:, layer].numpy(), device)
        one_by_one.append((time.thread_time() - start) / layers * 1e3)
    where = f"{layers} layers, {tokens:,} tokens of each of {RANKS} ranks, {TOP_K} of {EXPERTS} experts, one core"
    found = compiled[1:]  # the first one compiles
    target = {"target": TARGET_MS, "ok": bool(np.median(found) <= TARGET_MS)}
    yield {**_row("preparation per layer", found, "ms", where), **target}
    yield _row("the same layer by layer, without the rows of tokens that are sent once", one_by_one[1:], "ms", where)


def _steps(quick: bool) -> Iterator[dict]:
    repetitions = 1 if quick else STEPS
    sizes = replace(SYNTHETIC, **TINY) if quick else SYNTHETIC
    variant = make_variant(sizes, steps.skewed_routes(sizes, 1.5, seed=SEED), "relibra")
    lasts = make_variant(sizes, _without_last_routes(variant.trace), "relibra")
    variants = [
        replace(variant, name="ahead"),
        replace(variant, name="at entry", ahead=False),
        replace(lasts, name="last tokens joined"),
        replace(lasts, name="last tokens apart", live_apart=True),
    ]
    with tempfile.TemporaryDirectory() as folder:
        found = steps.on_ranks(sizes, variants, Path(folder), repetitions)
    passes = sizes.micro_batches * sizes.layers
    where = f"{sizes.layers} layers, {sizes.rows:,} tokens of each of {steps.NUM_RANKS} ranks, {sizes.top_k} of "
    where += f"{sizes.experts} experts of {sizes.hidden} x {sizes.width}, {sizes.micro_batches} micro-batches"
    for name in ("ahead", "at entry"):
        share = np.array(found.unprepared[name]) / np.array(found.seconds[name])
        here = f"{where}, routes known {'before the step' if name == 'ahead' else name}"
        target = {"target": TARGET_SHARE, "ok": bool(np.median(share) <= TARGET_SHARE)} if name == "ahead" else {}
        yield {**_row("exposed share of a step", share.tolist(), "of its seconds", here), **target}
        seconds = np.array(found.preparing[name]) / passes * 1e3
        yield _row("preparation per layer, with its exchange", seconds.tolist(), "ms", here)
    for name, way in (
        ("last tokens joined", "beside planned rows"),
        ("last tokens apart", "in an exchange of their own"),
    ):
        ratio = np.array(found.processor[name]) / np.array(found.processor["ahead"])
        here = f"{where}, last token of each {sizes.length} without routes, {way}"
        yield _row("step / step with routes for all rows", ratio.tolist(), "ratio of processor seconds", here)


def _without_last_routes(trace: RoutingTrace) -> RoutingTrace:
    valid_T = trace.valid_T.copy()
    valid_T[trace.offsets[1:] - 1] = False
    return replace(trace, valid_T=valid_T)


def _row(case: str, values: list[float], unit: str, configuration: str) -> dict:
    return {
        "case": case,
        "label": "measured",
        "seed": SEED,
        "repetitions": len(values),
        "value": float(np.median(values)),
        **quartiles(values, "value"),
        "unit": unit,
        "configuration": configuration,
    }


if __name__ == "__main__":
    main()
