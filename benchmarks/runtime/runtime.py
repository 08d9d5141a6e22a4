"""Training steps by plans beside transformers' `all_to_all`, on two processes. Rows go to results/runtime.json.

Run: relibra bench runtime [--quick] [--json] [--repetitions N] [--data FOLDER] [--output FOLDER].
Twenty-five minutes with nine repetitions. On GPUs, or any number of ranks, under torchrun:
torchrun --nproc-per-node 8 -m benchmarks runtime --backend nccl [--quick] ...
Two processes of one thread each, forward and backward passes of all micro-batches of a step, replayed routes, no
optimizer; medians over repetitions in which the variants take turns. --quick takes a smaller model, few repetitions,
and writes no rows. The recordings are not part of the project. Under torchrun each of its processes is a rank: on GPUs
with sizes near Qwen3-30B-A3B in bfloat16, devices waited for at both ends of a step only. Rank 0 prints the table and
writes results/runtime_ranks.json.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks.harness.options import measurement_options
from benchmarks.harness.provenance import quartiles, write_results
from benchmarks.runtime import steps
from benchmarks.runtime.torchrun_ranks import BACKENDS, TorchrunRanks, torchrun_ranks
from relibra import Budget, plan_step
from relibra.cluster import cluster_preset
from relibra.planning.costs.expert_shape import ExpertShape
from relibra.routing.demand import Demand
from relibra.routing.readers import open_trace
from relibra.routing.trace import RoutingTrace

RECORDING = "gpt_oss_20b_decode_topk.npz"
SYNTHETIC = steps.Sizes(layers=2, experts=16, top_k=4, hidden=384, width=896, samples=4, length=256, micro_batches=4)
RECORDED = steps.Sizes(layers=2, experts=32, top_k=4, hidden=384, width=896, samples=4, length=256, micro_batches=4)
ON_GPUS = {"layers": 4, "hidden": 2048, "width": 768, "length": 1024, "dtype": "bfloat16"}
"""Layers, experts and choices of Qwen3-30B-A3B, and a vocabulary and attention that take little time."""
GPU_EXPERTS, GPU_TOP_K = 128, 8
TINY = {"hidden": 64, "width": 64, "samples": 2, "length": 32}
TARGETS = {1.25: 1.12, 1.5: 1.28, 1.75: 1.45}
"""Throughput over `all_to_all` to reach at a rank skew."""
RESIDENT_TARGETS = {1.25: 1.26, 1.5: 1.43, 1.75: 1.59}
"""The same with resident slots: what shared slots reached when these were new."""
RESIDENT = "relibra, 2 resident slots"
HOMES_STAY = "relibra, homes stay"
"""The second one is the first one with static rows: experts at home are copied in front of the slots."""
NEW_SIZES = ("ranks", "per_node", "dtype")
"""Committed rows of two processes have no such sizes."""
QUICK_WORDS = "--quick: a toy model, one repetition. It shows that the program runs; the figures say nothing"
TOLERANCE = 0.02
"""Load above the mean that is accepted for fewer copies: without it a copy is made for a single token."""


def main() -> None:
    parser = measurement_options(__doc__, data=True)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--backend", choices=BACKENDS, default="gloo", help="nccl: GPUs, under torchrun; default: gloo")
    options = parser.parse_args()
    ranks = torchrun_ranks(options.backend)
    if ranks is not None:
        _run_under_torchrun(ranks, options)
        return
    rows = with_shares(list(_rows(options.data, options.quick, options.repetitions)))
    reached = list(_reached(rows))
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        _print(rows)
        if options.quick:
            print(QUICK_WORDS)
        else:
            _print_reached(reached)
    if not options.quick:
        command = f"relibra bench runtime --repetitions {options.repetitions}"
        print(write_results("runtime", rows, command, options.output), file=sys.stderr)
        print(write_results("runtime_targets", reached, command, options.output), file=sys.stderr)


def _run_under_torchrun(ranks: TorchrunRanks, options: argparse.Namespace) -> None:
    """Measure with the other ranks; rank 0 prints and writes. A figure that a GPU's host cannot see is left out."""
    torch.set_num_threads(1)
    # All ranks plan, and all go through the same cases: what they would print is the same.
    with ranks.connected(), redirect_stderr(sys.stderr if ranks.rank == 0 else io.StringIO()):
        rows = with_shares(list(_rows(options.data, options.quick, options.repetitions, ranks)))
    if ranks.rank:
        return
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        _print(rows)
        print(ranks.name)
        if options.quick:
            print(QUICK_WORDS)
    if not options.quick:
        command = f"torchrun --nproc-per-node {ranks.per_node} -m benchmarks runtime --backend {ranks.backend}"
        command += f" --repetitions {options.repetitions}"
        print(write_results("runtime_ranks", rows, command, options.output), file=sys.stderr)


def _rows(data: Path, quick: bool, repetitions: int, ranks: TorchrunRanks | None = None) -> Iterator[dict]:
    repetitions = 1 if quick else repetitions
    sizes = sizes_of(SYNTHETIC, ranks, quick=quick)
    for skew in TARGETS:
        trace = steps.skewed_routes(sizes, skew, seed=0)
        balancers = ["eplb", "live", "relibra", RESIDENT, HOMES_STAY, *["canonical"] * (skew == 1.5)]
        yield from _measured("synthetic, micro-batches differ", sizes, trace, balancers, repetitions, ranks)
    if not (data / RECORDING).exists():
        print(
            f"skipped: recorded routes, because {data / RECORDING} is not there; name it with --data", file=sys.stderr
        )
        return
    sizes = sizes_of(RECORDED, ranks, quick=quick)
    trace = open_trace(data / RECORDING, sizes.experts)
    if sizes.tokens > int(np.asarray(trace.valid_T).sum()) or sizes.experts % sizes.ranks:
        print(f"skipped: recorded routes, which are too few for {sizes.ranks} ranks of these sizes", file=sys.stderr)
        return
    yield from _measured(
        "recorded gpt-oss-20b",
        sizes,
        _recorded(trace, sizes),
        ["eplb", "live", "relibra", RESIDENT],
        repetitions,
        ranks,
    )


def sizes_of(sizes: steps.Sizes, ranks: TorchrunRanks | None, *, quick: bool) -> steps.Sizes:
    """Return the sizes for these ranks: larger ones on GPUs, experts enough for all, tiny ones to try the program."""
    if ranks is not None:
        sizes = replace(sizes, ranks=ranks.num_ranks, per_node=ranks.per_node)
        if ranks.backend == "nccl":
            sizes = replace(sizes, **ON_GPUS)
            if sizes.experts == SYNTHETIC.experts:
                sizes = replace(sizes, experts=GPU_EXPERTS, top_k=GPU_TOP_K)
        if sizes.experts != RECORDED.experts:
            sizes = replace(sizes, experts=max(sizes.experts, sizes.top_k * sizes.ranks))
    return replace(sizes, **TINY) if quick else sizes


def _recorded(trace: RoutingTrace, sizes: steps.Sizes) -> RoutingTrace:
    """Cut samples of equal length from the recording, in its order, with layers from all over the model."""
    layers = np.arange(trace.num_layers)[4 :: 8 if sizes.layers <= 2 else 4][: sizes.layers]
    rows = np.flatnonzero(np.asarray(trace.valid_T))[: sizes.tokens]
    experts_TLK = np.asarray(trace.experts_TLK)[rows][:, layers]
    return RoutingTrace.from_samples(
        np.split(experts_TLK, sizes.tokens // sizes.length),
        num_experts=sizes.experts,
        layer_ids=list(range(sizes.layers)),
    )


def _measured(
    case: str,
    sizes: steps.Sizes,
    trace: RoutingTrace,
    balancers: list[str],
    repetitions: int,
    ranks: TorchrunRanks | None,
) -> Iterator[dict]:
    start = time.perf_counter()
    variants = [make_variant(sizes, trace, name) for name in ("all_to_all", *balancers)]
    balanced = steps.balanced_routes(sizes)
    variants += [
        replace(make_variant(sizes, balanced, "static", slots=0), name="balanced routes"),
        replace(make_variant(sizes, balanced, "all_to_all"), name="balanced routes, all_to_all"),
    ]
    if ranks is None:
        with tempfile.TemporaryDirectory() as folder:
            timed = steps.on_ranks(sizes, variants, Path(folder), repetitions)
            memory = steps.on_ranks(sizes, variants, Path(folder), 0)
    else:
        timed = memory = _measured_by(ranks, sizes, variants, repetitions)
    print(f"{case}, skew {variants[0].skew:.2f}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    seconds = {name: np.array(found) for name, found in timed.seconds.items()}
    for variant in variants:
        own = seconds[variant.name]
        exposed = float(np.median(timed.exposed[variant.name]))
        # The host of a GPU does not see what the device waits for.
        waits = {"exposed_seconds": exposed, "exposed_share": exposed / float(np.median(own))}
        where = {} if ranks is None else {"ep": ranks.num_ranks, "configuration": ranks.name}
        yield {
            "case": case,
            "label": "measured",
            "unit": "tokens per second of forward and backward passes; ratios of throughput, medians over repetitions",
            "seed": 0,
            "repetitions": repetitions,
            "case_skew": variants[0].skew,
            "skew": variant.skew,
            "planned_skew": variant.planned_skew,
            "balancer": variant.name,
            "tokens_per_second": sizes.tokens / float(np.median(own)),
            **quartiles(sizes.tokens / own, "tokens_per_second"),
            "seconds": own.tolist(),
            "ratio_to_all_to_all": float(np.median(seconds["all_to_all"] / own)),
            **quartiles(seconds["all_to_all"] / own, "ratio_to_all_to_all"),
            "ratio_to_balanced": float(np.median(seconds["balanced routes"] / own)),
            **quartiles(seconds["balanced routes"] / own, "ratio_to_balanced"),
            **({} if ranks is not None and ranks.backend == "nccl" else waits),
            "relocation_seconds": float(np.max(timed.moved[variant.name])),
            # Shared slots are there since the warm-up, so that the peak above what was there before lacks them.
            "peak_bytes": int(np.max(memory.peak[variant.name])) + variant.shared_slots * sizes.expert_bytes,
            "slot_bytes": (variant.shared_slots + 2 * variant.resident_slots * sizes.layers) * sizes.expert_bytes,
            "copies": variant.copies,
            "pushes": timed.pushed[variant.name][0] / (sizes.expert_bytes * sizes.micro_batches * sizes.layers),
            "bytes_pushed": timed.pushed[variant.name][0],
            "bytes_returned": timed.returned[variant.name][0],
            "expert_share": timed.expert_seconds / float(np.median(seconds["balanced routes"])),
            "sizes": {name: value for name, value in vars(sizes).items() if ranks is not None or name not in NEW_SIZES},
            **where,
        }


def _measured_by(
    ranks: TorchrunRanks, sizes: steps.Sizes, variants: list[steps.Variant], repetitions: int
) -> steps.Found:
    """Return what the ranks of torchrun find; the same on all of them; collective."""
    with ranks.folder_of_node() as folder:
        if ranks.local_rank == 0:
            steps.save_model(sizes, folder)
        dist.barrier()
        return steps.joined(ranks.gather(steps.measure(sizes, variants, folder, repetitions)))


def make_variant(sizes: steps.Sizes, trace: RoutingTrace, name: str, slots: int = 1) -> steps.Variant:
    """Plan a step of these routes by a balancer, or by none."""
    slots = 2 if name == RESIDENT else slots
    demand = Demand.from_trace(trace).with_schedule(*steps.schedule(sizes), sizes.ranks)
    on_gpus = sizes.torch_dtype.itemsize == 2
    cluster = cluster_preset("h100x8" if on_gpus else "laptop", sizes.ranks, sizes.per_node)
    budget = Budget(slots=slots, memory_gib=0.0, pack_samples=False, tolerance=TOLERANCE)
    expert = ExpertShape(hidden=sizes.hidden, width=sizes.width, bytes_per_value=sizes.torch_dtype.itemsize)
    static = plan_step(demand, cluster, replace(budget, slots=0), "static", expert=expert)
    if name == "all_to_all":
        plan = None
    else:
        balancer = "relibra" if name.startswith("relibra") or name == "canonical" else name
        budget = replace(budget, move_homes=name != HOMES_STAY)
        plan = plan_step(demand, cluster, budget, balancer, expert=expert)
        plan = replace(plan, resident=True) if name == RESIDENT else plan
    return steps.Variant(
        name=name,
        trace=trace,
        demand=demand,
        plan=plan,
        sums="canonical" if name == "canonical" else "fast",
        live_tolerance=TOLERANCE if name == "live" else None,
        skew=static.skew(demand),
        planned_skew=(plan or static).skew(demand),
    )


def with_shares(rows: list[dict]) -> list[dict]:
    """Return the rows with the factors of `ratio_to_all_to_all`: the executor's, and what balance adds.

    The executor's is that of routes without skew; 1 for transformers' own expert parallelism.
    """
    found = []
    for row in rows:
        of = {one["balancer"]: one for one in rows if one["case_skew"] == row["case_skew"]}
        native = row["balancer"].endswith("all_to_all")
        executor = 1.0 if native else _ratio(of["balanced routes"], of["balanced routes, all_to_all"])
        found.append({**row, "executor_ratio": executor, "balance_ratio": row["ratio_to_all_to_all"] / executor})
    return found


def _reached(rows: list[dict]) -> Iterator[dict]:
    """Hold what was measured against what is to be reached; `at_most` says which way."""

    def row(case: str, what: str, reached: float, target: float, *, at_most: bool = False) -> dict:
        ok = reached <= target if at_most else reached >= target
        found = {"case": case, "what": what, "reached": reached, "target": target, "at_most": at_most, "ok": bool(ok)}
        return {**found, "label": "measured", "seed": 0, "repetitions": rows[0]["repetitions"]}

    for case, skew in dict.fromkeys((one["case"], one["case_skew"]) for one in rows):
        of = {one["balancer"]: one for one in rows if (one["case"], one["case_skew"]) == (case, skew)}
        name, relibra = f"{case}, skew {skew:.2f}", of["relibra"]
        nominal = min(TARGETS, key=lambda target: abs(target - skew))
        target = TARGETS[nominal] if case.startswith("synthetic") else 0.99
        yield row(name, "throughput / all_to_all", relibra["ratio_to_all_to_all"], target)
        target = RESIDENT_TARGETS[nominal] if case.startswith("synthetic") else 0.99
        yield row(name, "throughput / all_to_all, resident slots", of[RESIDENT]["ratio_to_all_to_all"], target)
        yield row(name, "throughput / balanced routes", relibra["ratio_to_balanced"], 0.95)
        yield row(name, "throughput / EPLB by the same runtime", _ratio(relibra, of["eplb"]), 1.0)
        yield row(name, "throughput / live balancing, equal slots", _ratio(relibra, of["live"]), 1.0)
        if "canonical" in of:
            yield row(name, "throughput, canonical sums / fast sums", _ratio(of["canonical"], relibra), 0.75)
        balanced, native = of["balanced routes"], of["balanced routes, all_to_all"]
        yield row(name, "balanced routes: throughput / all_to_all", _ratio(balanced, native), 1.0)
        yield row(name, "exposed pushes and returns, share of the step", relibra["exposed_share"], 0.02, at_most=True)
        above = relibra["peak_bytes"] - of["all_to_all"]["peak_bytes"]
        allowed = 2 * relibra["slot_bytes"] + 0.05 * of["all_to_all"]["peak_bytes"]
        yield row(name, "peak memory above all_to_all / allowed", above / allowed, 1.0, at_most=True)
        yield row(name, "share of the experts in a step of balanced routes", relibra["expert_share"], 0.7)


def _ratio(one: dict, other: dict) -> float:
    """Return the median ratio of throughput, repetition by repetition."""
    return float(np.median(np.array(other["seconds"]) / np.array(one["seconds"])))


def _print_reached(reached: list[dict]) -> None:
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="bold")
    table.add_column("case", overflow="fold", max_width=26)
    table.add_column("what", overflow="fold", max_width=28)
    for title in ("reached", "target", "ok"):
        table.add_column(title, justify="right", no_wrap=True)
    for one in reached:
        sign = "<=" if one["at_most"] else ">="
        table.add_row(
            one["case"],
            one["what"],
            f"{one['reached']:.3f}",
            f"{sign} {one['target']:.2f}",
            "yes" if one["ok"] else "no",
        )
    Console().print(table)
    print(f"{sum(one['ok'] for one in reached)} of {len(reached)} targets reached")


def _print(rows: list[dict]) -> None:
    for case, skew in dict.fromkeys((one["case"], one["case_skew"]) for one in rows):
        table = Table(
            title=f"{case}, rank skew {skew:.2f}", title_justify="left", box=None, padding=(0, 1), pad_edge=False
        )
        table.add_column("balancer", no_wrap=True)
        for title in ("plan", "tok/s", "/ a2a", "executor", "balance", "/ even", "exposed", "pushed", "MiB"):
            table.add_column(title, justify="right", no_wrap=True)
        for row in rows:
            if (row["case"], row["case_skew"]) == (case, skew):
                table.add_row(
                    row["balancer"].removeprefix("relibra, "),
                    f"{row['planned_skew']:.2f}",
                    f"{row['tokens_per_second']:.0f}",
                    *(f"{row[name]:.3f}" for name in ("ratio_to_all_to_all", "executor_ratio", "balance_ratio")),
                    f"{row['ratio_to_balanced']:.3f}",
                    f"{100 * row['exposed_share']:.1f} %" if "exposed_share" in row else "-",
                    f"{row['pushes']:.1f}",
                    f"{row['peak_bytes'] / 2**20:.0f}",
                )
        Console().print(table, "")
    print(
        "plan: skew under the plan; a2a: transformers' all_to_all, a product of executor (that of routes\n"
        "without skew) and balance; even: balanced routes, the same step\n"
        "with as many token-slots for every expert, by the same runtime; exposed: waiting for pushes and\n"
        "returns, and of live balancing for counts and solver, share of the step; pushed: experts per\n"
        "micro-batch and layer, forward and backward; MiB: memory of the busier rank at its peak, above\n"
        "what it had before the step"
    )
