"""One GPU: time of even and uneven expert loads, copies into slots hidden under computing.

First the grouped experts are held against float64; a product that is wrong is not timed. Then every rank of an
expert-parallel group is run one after another, in bfloat16 and at the sizes of real models (see emulated_ranks.py), and
slots are copied on a stream of their own while experts compute. Last the executor's own path is run for every rank
(executor_path.py). Rows go to results/gpu.json, gpu_overlap.json and gpu_executor.json.
Run: relibra bench gpu [--quick] [--json] [--data FOLDER] [--output FOLDER]   (or: make bench-gpu)
--quick takes 8 ranks alone and writes no rows; with --device cpu it runs toy sizes, to try the program.
"""

from __future__ import annotations

import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float64
from numpy import ndarray

from benchmarks.harness.options import measurement_options
from benchmarks.harness.provenance import quartiles, write_results
from benchmarks.harness.recorded_cuts import cut_recorded
from benchmarks.planner.steps import domain_step
from benchmarks.runtime import emulated_ranks as emulated
from benchmarks.runtime import executor_path
from benchmarks.runtime.layer_parts import PathModel, path_model
from relibra.calibration.grouped_experts import grouped_experts
from relibra.errors import ConfigError
from relibra.planning.costs.expert_shape import ExpertShape, expert_shape
from relibra.routing.demand import ScheduledDemand
from relibra.routing.micro_batches import select_micro_batches
from relibra.routing.readers import open_trace
from relibra.routing.synthetic import TraceShape, domain_trace
from relibra.routing.trace import RoutingTrace

MODELS = {"Qwen3-30B-A3B": "qwen3-30b-a3b", "Qwen3-235B-A22B": "qwen3-235b-a22b"}
EXPERTS, TOP_K, TOKENS = 128, 8, 4096
RECORDED_TOKENS = 1024
"""Per rank: 32 ranks then still find two micro-batches in the recording."""
RECORDED_MICRO_BATCHES = 12
"""The last ones, at most: fewer tokens would cut more, and all of them would have to be planned."""

EXECUTED = {
    "Qwen3-30B-A3B": None,
    "gpt-oss-20b": "gpt_oss_20b_decode_topk.npz",
    "DeepSeek-V2-Lite": "deepseek_v2_lite_esft_topk.npz",
}
"""Models whose layers are run by the executor's functions, and their recordings; None: its routes are made up."""
EXECUTED_RANKS = 8

TOY = ExpertShape(hidden=32, width=16)
MEMORY_SHARE = 0.8
"""Of the free memory; the allocator loses some to pieces that fit nothing else."""

SLOT_COPIES = 8
OVERLAP_UNIT = (
    f"milliseconds, median: {SLOT_COPIES} copies of one expert's weights into a slot; experts of one rank with an even "
    "load, forward and backward; both at once on two streams. hidden: (copy + compute - together) / copy"
)
OVERLAP_FIGURES = ("copy ms", "compute ms", "together ms", "hidden")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Experts of one size under one kind of routes.

    tokens    per rank and micro-batch
    demand    makes a step from ranks and tokens
    """

    source: str
    shape: ExpertShape
    tokens: int
    demand: Callable[[int, int], ScheduledDemand]


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much is measured: sizes of the group, pairs of micro-batch and layer, repetitions of each time."""

    ranks: tuple[int, ...] = emulated.RANKS
    pairs: int = 4
    repetitions: int = 5


QUICK = Effort(ranks=(8,), pairs=2, repetitions=2)


def settings(data: Path) -> list[Setting]:
    """Return made-up routes for each model of MODELS, and recorded ones where they are."""

    def made_up(ranks: int, tokens: int) -> ScheduledDemand:
        # Four samples of a quarter of the tokens for each rank and micro-batch.
        sizes = {"ranks": ranks, "layers": 4, "experts": EXPERTS, "micro_batches": 4, "samples": 16 * ranks}
        return domain_step(tokens=max(1, tokens // 4), seed=emulated.SEED, top_k=TOP_K, **sizes)

    found = [
        Setting(source=f"{name}, synthetic domains", shape=expert_shape(key), tokens=TOKENS, demand=made_up)
        for name, key in MODELS.items()
    ]
    source, trace = emulated.routes(data)

    def cut(ranks: int, tokens: int) -> ScheduledDemand:
        whole = cut_recorded(trace, ranks * tokens, ranks)
        return select_micro_batches(whole, max(0, len(whole.load_MLE) - RECORDED_MICRO_BATCHES))

    shape = expert_shape("gpt-oss-20b")
    return [*found, Setting(source=source, shape=shape, tokens=RECORDED_TOKENS, demand=cut)]


def as_toy(setting: Setting) -> Setting:
    """Shrink experts and micro-batches until a CPU is done in seconds."""
    return replace(setting, source=f"toy experts, routes of {setting.source}", shape=TOY, tokens=64)


def emulated_rows(setting: Setting, effort: Effort, device: torch.device, limit_bytes: int) -> Iterator[dict]:
    """Check the experts, then time every rank of each size of the group.

    raises    EngineError when the experts differ from float64
    """
    shape = setting.shape
    for ranks in effort.ranks:
        fitted = fitting(setting, ranks, effort.pairs, limit_bytes)
        if fitted is None:
            continue
        tokens, works = fitted
        seconds, error = _timed(works, shape, effort, device)
        facts = {
            "repetitions": effort.repetitions,
            "device": device_name(device),
            "error": error,
            "configuration": f"{device_name(device)}; {tokens:,} tokens per rank, {len(works[0].counts)} pairs of "
            f"micro-batch and layer, {emulated.SLOTS} spare slot per rank, nodes of 8; experts {shape.hidden} x "
            f"{shape.width}, bfloat16",
        }
        yield from emulated.result_rows(works, seconds, setting.source, **facts)


def _timed(
    works: list[emulated.RankWork], shape: ExpertShape, effort: Effort, device: torch.device
) -> tuple[dict[str, Float64[ndarray, "N P R"]], float]:
    """Return seconds and the error of the check; memory is free again afterwards."""
    groups, most = emulated.sizes_needed(works)
    experts = grouped_experts(groups, most, shape.hidden, shape.width, device, torch.bfloat16, emulated.SEED)
    error = experts.check()
    return emulated.measured_seconds(works, experts, effort.repetitions), error


def bytes_needed(groups: int, rows: int, hidden: int, width: int, dtype: torch.dtype) -> int:
    """Return an upper bound on the bytes of a rank's forward and backward: weights, gradients and saved activations.

    Per row: rows, output, their gradients and one spare; gate_up with its gradient, silu, product and theirs.
    """
    weights = 2 * groups * 3 * hidden * width
    return (weights + rows * (5 * hidden + 9 * width)) * dtype.itemsize


def fitting(setting: Setting, ranks: int, number: int, limit_bytes: int) -> tuple[int, list[emulated.RankWork]] | None:
    """Plan at the setting's tokens per rank, or at halves of it until the fullest rank fits; None: none did."""
    shape, tokens = setting.shape, setting.tokens
    while tokens:
        demand = setting.demand(ranks, tokens)
        works = emulated.rank_works(demand, ranks, shape, emulated.choose_pairs(demand, number))
        needed = bytes_needed(*emulated.sizes_needed(works), shape.hidden, shape.width, torch.bfloat16)
        if needed <= limit_bytes:
            return tokens, works
        print(
            f"{setting.source}, EP {ranks}: {tokens:,} tokens per rank need {needed / 2**30:.2f} GiB, there are "
            f"{limit_bytes / 2**30:.2f}: half of the tokens is next",
            file=sys.stderr,
        )
        tokens //= 2
    print(f"skipped: {setting.source}, EP {ranks}, which does not fit into memory", file=sys.stderr)
    return None


def hidden_fraction(copy: float, compute: float, together: float) -> float:
    """Return the share of a copy that took no time of its own: 1 hidden, 0 as if one after the other."""
    return (copy + compute - together) / copy


def overlap_rows(setting: Setting, effort: Effort, device: torch.device, limit_bytes: int) -> Iterator[dict]:
    """Copy slots beside the experts of one rank of 16; needs CUDA, and skips aloud what does not fit."""
    shape, groups = setting.shape, EXPERTS // 16
    counts = emulated.equal_counts(setting.tokens * TOP_K, groups, 1)[0]
    if bytes_needed(groups + 2, sum(counts), shape.hidden, shape.width, torch.bfloat16) > limit_bytes:
        print(f"skipped: copies beside {setting.source}, which do not fit into memory", file=sys.stderr)
        return
    experts = grouped_experts(groups, sum(counts), shape.hidden, shape.width, device, torch.bfloat16, emulated.SEED)
    experts.check()
    compute = experts.work(counts)
    slot = torch.empty(shape.parameters, dtype=torch.bfloat16, device=device)
    homes = {"host to device": torch.empty_like(slot, device="cpu").pin_memory(), "device to device": slot.clone()}
    for way, home in homes.items():

        def copy(home: torch.Tensor = home) -> None:
            for _ in range(SLOT_COPIES):
                slot.copy_(home, non_blocking=True)

        turns = [(copy, None), (None, compute), (copy, compute)]
        found = [[_span(*turn, compute, device=device) for turn in turns] for _ in range(effort.repetitions + 1)]
        alone, computing, together = (statistics.median(times) for times in zip(*found[1:], strict=True))
        yield {
            "case": f"{setting.source.split(',')[0]}, {way}", "label": "measured", "unit": OVERLAP_UNIT,
            "copy ms": 1000 * alone, "compute ms": 1000 * computing, "together ms": 1000 * together,
            **quartiles([1000 * times[2] for times in found[1:]], "together ms"),
            "hidden": hidden_fraction(alone, computing, together), "seed": emulated.SEED,
            "repetitions": effort.repetitions, "device": device_name(device),
            "configuration": f"{device_name(device)}; {SLOT_COPIES} x {shape.weight_bytes / 2**20:.0f} MiB beside "
            f"{groups} experts of {shape.hidden} x {shape.width} with {sum(counts):,} token-slots, bfloat16",
        }  # fmt: skip


def _span(
    copy: Callable[[], None] | None,
    compute: Callable[[], object] | None,
    lead: Callable[[], object],
    *,
    device: torch.device,
) -> float:
    """Return the seconds until both are done; `lead` runs before, so that the host gets ahead of the device.

    A CPU has no second stream: there both come one after the other.
    """
    if device.type == "cpu":
        before = time.thread_time()
        for work in (copy, compute):
            if work is not None:
                work()
        return time.thread_time() - before
    main, side = torch.cuda.current_stream(device), _side_stream(device)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    lead()
    start.record(main)
    side.wait_event(start)
    if copy is not None:
        with torch.cuda.stream(side):
            copy()
    if compute is not None:
        compute()
    main.wait_stream(side)
    end.record(main)
    torch.cuda.synchronize(device)
    return start.elapsed_time(end) / 1000


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def executor_rows(data: Path, effort: Effort, device: torch.device, limit_bytes: int) -> Iterator[dict]:
    """Run the executor's own path of each model of EXECUTED; skips aloud what has no routes, or does not fit."""
    toy = device.type == "cpu"
    for name, recording in EXECUTED.items():
        shape, tokens = (TOY, 64) if toy else (expert_shape(name.lower()), RECORDED_TOKENS if recording else TOKENS)
        model = path_model(name, shape)
        trace = _routes_of(model, recording, data, tokens)
        if trace is None:
            continue
        step = executor_path.cut_step(trace, tokens, EXECUTED_RANKS, layers=4, micro_batches=4)
        instances = model.num_experts // EXECUTED_RANKS + executor_path.SLOTS
        rows = 4 * tokens * trace.top_k  # of a rank with four times the mean load
        if step is None or bytes_needed(instances, rows, shape.hidden, shape.width, torch.bfloat16) > limit_bytes:
            print(
                f"skipped: the executor's path of {name}: its routes are too few, or it does not fit", file=sys.stderr
            )
            continue
        source = f"{name}, {'recorded routes' if recording else 'synthetic domains'}"
        span = functools.partial(_span, device=device)
        for row in executor_path.path_rows(model, source, step, effort.pairs, effort.repetitions, device, span):
            configuration = (
                f"{device_name(device)}; {tokens:,} tokens per rank, {row['pairs']} pairs of micro-batch and layer, "
                f"{executor_path.SLOTS} spare slot per rank, nodes of 8; experts {shape.hidden} x {shape.width}, "
                "bfloat16"
            )
            yield {**row, "device": device_name(device), "configuration": configuration}


def _routes_of(model: PathModel, recording: str | None, data: Path, tokens: int) -> RoutingTrace | None:
    """Return routes of a model; None where its recording is not there, which is said."""
    num_experts = model.num_experts
    if recording is None:
        shape = TraceShape(
            rows_per_sample=[tokens] * 2 * EXECUTED_RANKS, num_layers=4, num_experts=num_experts, top_k=TOP_K
        )
        return domain_trace(shape, np.random.default_rng(emulated.SEED), sigma=1.2)
    if (data / recording).exists():
        return open_trace(data / recording, num_experts)
    print(
        f"skipped: recorded routes of {model.name} for the executor's path, because {data / recording} is not there",
        file=sys.stderr,
    )
    return None


def memory_limit(device: torch.device) -> int:
    """Return the bytes that a case may take: a share of what is free on a GPU, 1 GiB on a CPU."""
    if device.type == "cpu":
        return 1 << 30
    torch.cuda.empty_cache()
    return int(MEMORY_SHARE * torch.cuda.mem_get_info(device)[0])


def device_name(device: torch.device) -> str:
    """Return what the maker calls it; "CPU" for any CPU, which the rows name elsewhere."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _print_overlaps(rows: list[dict]) -> None:
    for row in rows:
        figures = ", ".join(f"{name.removesuffix(' ms')} {row[name]:.3f}" for name in OVERLAP_FIGURES)
        print(f"{row['case']}: {figures}")
    if rows:
        print(OVERLAP_UNIT)


def _print_executed(rows: list[dict]) -> None:
    for row in rows:
        figures = ", ".join(f"{name.removesuffix(' ms')} {row[name]:.3f}" for name in executor_path.FIGURES)
        reached = f"token skew {row['token_skew']:.2f}, straggler {row['straggler']:.2f}, off {row['off']:+.0%}"
        goal = f"goal: within {row['target']:.0%}: {'yes' if row['ok'] else 'no'}"
        print(f"{row['case']}: {figures}; {reached} ({goal}); layer / static {row['layer / static']:.2f}")
    if rows:
        print(executor_path.UNIT)


def main() -> None:
    parser = measurement_options(__doc__, data=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    if options.device == "cpu" and not options.quick:
        raise ConfigError("--device cpu would take hours at real sizes: add --quick for toy sizes, or leave it out")
    if options.device == "cuda" and not torch.cuda.is_available():
        print("skipped: torch sees no CUDA device here, so nothing was measured and no rows were written")
        return
    device = torch.device(options.device)
    effort = QUICK if options.quick else Effort()
    rows, overlaps = [], []
    torch.set_num_threads(1)
    for setting in settings(options.data):
        if device.type == "cpu":
            rows += emulated_rows(as_toy(setting), effort, device, memory_limit(device))
            continue
        rows += emulated_rows(setting, effort, device, memory_limit(device))
        if setting.tokens == TOKENS:
            overlaps += overlap_rows(setting, effort, device, memory_limit(device))
    executed = list(executor_rows(options.data, effort, device, memory_limit(device)))
    if options.json:
        print(json.dumps(rows + overlaps + executed, indent=1))
    else:
        emulated.print_rows(rows)
        _print_overlaps(overlaps)
        _print_executed(executed)
    if not options.quick:
        for name, found in (("gpu", rows), ("gpu_overlap", overlaps), ("gpu_executor", executed)):
            print(write_results(name, found, "make bench-gpu", options.output), file=sys.stderr)
