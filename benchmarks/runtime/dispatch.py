"""Bytes between nodes and time of a step whose tokens cross to other nodes flat or hierarchically.

Four processes are two emulated nodes of two ranks, a thread each: bytes are those that would cross, time is that of one
machine, whose "nodes" are as near as its ranks. Planned bytes are counted from routes and plan by hand, sent bytes by
the timeline. Both ways run the same plan and take turns. Rows go to results/dispatch.json.
Run: relibra bench dispatch [--quick] [--json] [--output FOLDER]
--quick takes a toy model and one repetition, and writes no rows.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils import logging as transformers_logging

from benchmarks.harness.options import measurement_options
from benchmarks.harness.provenance import quartiles, write_results
from benchmarks.runtime.steps import VOCAB, Sizes
from relibra import Budget, plan_step
from relibra.cluster import cluster_preset
from relibra.parallel import execute_plan, register, relocate
from relibra.planning.plan import StepPlan
from relibra.planning.traffic.rank_tables import rank_tables
from relibra.replay import BatchRoutes
from relibra.routing.demand import Demand, ScheduledDemand
from relibra.routing.synthetic import TraceShape, domain_trace
from relibra.routing.trace import RoutingTrace

SEED = 0
NODES, RANKS_PER_NODE = 2, 2
NUM_RANKS = NODES * RANKS_PER_NODE
WAYS = ("flat", "hierarchical")
REPETITIONS = 9
EXCHANGES = 4
"""Of a row in a layer: to the experts and back, and of both gradients."""
SIZES = Sizes(layers=2, experts=16, top_k=4, hidden=384, width=896, samples=2, length=256, micro_batches=2)
TOY = Sizes(layers=2, experts=8, top_k=2, hidden=64, width=32, samples=1, length=16, micro_batches=2)


def main() -> None:
    options = measurement_options(__doc__).parse_args()
    torch.set_num_threads(1)
    sizes, repetitions = (TOY, 1) if options.quick else (SIZES, REPETITIONS)
    rows = list(_rows(sizes, repetitions))
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        for row in rows:
            print(
                f"{row['case']}: {row['planned_bytes']:,} bytes between nodes planned, {row['sent_bytes']:,} sent, "
                f"{row['seconds']:.3f} s"
            )
    if not options.quick:
        print(write_results("dispatch", rows, "relibra bench dispatch", options.output), file=sys.stderr)


def make_step(sizes: Sizes) -> tuple[RoutingTrace, ScheduledDemand, StepPlan]:
    """Return routes of domains, one batch per rank and micro-batch, and a plan for two nodes."""
    number = np.arange(sizes.samples * NUM_RANKS * sizes.micro_batches)
    shape = TraceShape(
        rows_per_sample=[sizes.length] * len(number),
        num_layers=sizes.layers,
        num_experts=sizes.experts,
        top_k=sizes.top_k,
    )
    trace = domain_trace(shape, np.random.default_rng(SEED))
    micro_batch_S, rank_S = number // (sizes.samples * NUM_RANKS), number // sizes.samples % NUM_RANKS
    demand = Demand.from_trace(trace).with_schedule(micro_batch_S, rank_S, NUM_RANKS)
    cluster = cluster_preset("laptop", NUM_RANKS, RANKS_PER_NODE)
    return (
        trace,
        demand,
        plan_step(demand, cluster, Budget(slots=1, pack_samples=False), "relibra_paper_tokens", never_worse=False),
    )


def crossing_rows(trace: RoutingTrace, demand: ScheduledDemand, plan: StepPlan) -> dict[str, int]:
    """Count the rows that go to other nodes in the forward pass of a step: per rank that computes, or once per node."""
    found = dict.fromkeys(WAYS, 0)
    M, L, _, _ = plan.replica_MLRB.shape
    for m, layer, rank in np.ndindex(M, L, NUM_RANKS):
        own = np.flatnonzero((plan.micro_batch_S == m) & (plan.rank_S == rank)).tolist()
        experts_TK = trace.select(own).experts_TLK[:, layer]
        tables = rank_tables(plan, demand, rank, m, layer)
        token_X = np.argsort(experts_TK, axis=None, kind="stable")[tables.send_order_X] // experts_TK.shape[1]
        target_X = np.repeat(np.arange(NUM_RANKS), tables.send_RP.sum(axis=1))
        leaves_X = target_X // RANKS_PER_NODE != rank // RANKS_PER_NODE
        pairs = np.stack([token_X, target_X])[:, leaves_X]
        found["flat"] += np.unique(pairs, axis=1).shape[1]
        pairs[1] //= RANKS_PER_NODE
        found["hierarchical"] += np.unique(pairs, axis=1).shape[1]
    return found


def _rows(sizes: Sizes, repetitions: int) -> Iterator[dict]:
    trace, demand, plan = make_step(sizes)
    planned = crossing_rows(trace, demand, plan)
    with tempfile.TemporaryDirectory() as folder:
        found_R = _on_ranks(sizes, trace, demand, plan, Path(folder), repetitions)
    where = (
        f"{NODES} emulated nodes of {RANKS_PER_NODE} processes, 1 thread each, {sizes.layers} layers, {sizes.top_k} of "
    )
    where += f"{sizes.experts} experts of {sizes.hidden} x {sizes.width}, {sizes.micro_batches} micro-batches of "
    where += f"{sizes.rows:,} tokens per rank"
    for way in WAYS:
        seconds = np.max([found["seconds"][way] for found in found_R], axis=0).tolist()
        planned_bytes = EXCHANGES * planned[way] * sizes.hidden * 4
        sent = int(np.sum([found["sent"][way] for found in found_R]))
        yield {
            "case": way, "label": "measured", "seed": SEED, "repetitions": repetitions, "planned_bytes": planned_bytes,
            "sent_bytes": sent, "ok": sent == planned_bytes, "seconds": float(np.median(seconds)),
            **quartiles(seconds, "seconds"), "unit": "bytes and seconds of a step, forward and backward",
            "configuration": where,
        }  # fmt: skip


def _on_ranks(
    sizes: Sizes,
    trace: RoutingTrace,
    demand: ScheduledDemand,
    plan: StepPlan,
    folder: Path,
    repetitions: int,
) -> list[dict]:
    """Run both ways on four processes; return the seconds of each repetition, and the bytes of one, by rank."""
    transformers_logging.disable_progress_bar()
    torch.manual_seed(SEED)
    AutoModelForCausalLM.from_config(sizes.config()).save_pretrained(folder)
    spawn(_work, (sizes, trace, demand, plan, folder, repetitions), nprocs=NUM_RANKS)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(NUM_RANKS)]


def _work(
    rank: int,
    sizes: Sizes,
    trace: RoutingTrace,
    demand: ScheduledDemand,
    plan: StepPlan,
    folder: Path,
    repetitions: int,
) -> None:
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    register()
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=NUM_RANKS)
    config = DistributedConfig(fsdp_size=NUM_RANKS, ep_size=NUM_RANKS, ep_implementation="relibra")
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config, dtype=torch.float32).train()
    relocate(model, plan.physical_to_logical_map)
    plans = {way: replace(plan, dispatch=way) for way in WAYS}
    found: dict[str, dict] = {"seconds": {way: [] for way in WAYS}, "sent": {}}
    for repetition in range(repetitions + 1):  # the first one warms up
        for way in WAYS[:: 1 if repetition % 2 else -1]:
            seconds, found["sent"][way] = _step(model, sizes, trace, demand, plans[way])
            found["seconds"][way] += [seconds] * (repetition > 0)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _step(
    model: torch.nn.Module, sizes: Sizes, trace: RoutingTrace, demand: ScheduledDemand, plan: StepPlan
) -> tuple[float, int]:
    """Run a step; return its seconds, until all ranks are done, and the bytes of rows that this rank sent to nodes."""
    generator, batches = torch.Generator().manual_seed(dist.get_rank()), []
    for m in range(sizes.micro_batches):
        own = np.flatnonzero((plan.micro_batch_S == m) & (plan.rank_S == dist.get_rank())).tolist()
        tokens_BN = torch.randint(VOCAB, (sizes.samples, sizes.length), generator=generator)
        batches.append((BatchRoutes.padded(trace.select(own), torch.ones_like(tokens_BN)), tokens_BN))
    model.zero_grad()
    dist.barrier()
    start = time.perf_counter()
    with execute_plan(model, plan, demand, routes={m: routes for m, (routes, _) in enumerate(batches)}) as step:
        for m, (routes, tokens_BN) in enumerate(batches):
            model.set_requires_gradient_sync(m == len(batches) - 1)
            with step.micro_batch(m, routes):
                logits = model(tokens_BN, use_cache=False).logits
                cross_entropy(logits[:, :-1].flatten(0, 1), tokens_BN[:, 1:].flatten()).backward()
        dist.barrier()
        seconds = time.perf_counter() - start
        events = step.timeline().events
    return seconds, sum(event.bytes_between_nodes for event in events if event.label == "rows")


if __name__ == "__main__":
    main()
