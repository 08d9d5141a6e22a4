"""Rank skew of the schedules of slime, miles and verl, before and after relibra exchanges samples. Rows go to
results/trainer_schedules.json.

Both recordings; samples are drawn again, seeded, until 16 micro-batches of 8,192 tokens per rank are full, in random
order or with those of a task together. Their schedules are made by the rules of the released code: slime deals bins of
a first fit in order, miles those of a first fit with the longest first, verl divides samples among ranks and then among
micro-batches by largest differences of 24,576 n + n^2. Experts stay at home. The recordings are not part of the
project; the program says so when they are not there.
Run: relibra bench trainer_schedules [--quick] [--json] [--data FOLDER] [--output FOLDER].
A minute. --quick takes 2 micro-batches and writes no rows.
"""

import heapq
import json
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.harness.options import measurement_options
from benchmarks.harness.provenance import write_results
from relibra.integrations.expert_layout import ExpertLayout
from relibra.integrations.repacking import TrainerSchedule, repack_step
from relibra.routing.demand import Demand
from relibra.routing.readers import open_trace

RECORDINGS = {
    "gpt-oss-20b": ("gpt_oss_20b_decode_topk.npz", 32, (2880, 2880, 24, 64, 64)),
    "DeepSeek-V2-Lite": ("deepseek_v2_lite_esft_topk.npz", 64, (2048, 1408, 27, 16, 160)),
}
"""File, experts, and of the published `config.json`: hidden size, width of an expert, layers, heads, mean of the values
of a query and of a value."""
MACHINES = {"8 ranks": (8, 8), "16 ranks": (16, 16), "16 ranks, two groups of 8": (16, 8)}
"""Data-parallel ranks, and ranks that divide the experts."""
LIMIT = 8192
ORDERS = ("random", "by task")


def main() -> None:
    options = measurement_options(__doc__, data=True).parse_args()
    rows = list(_rows(options.data, 2 if options.quick else 16))
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        print_rows(rows)
    if not options.quick and rows:
        print(
            write_results("trainer_schedules", rows, "relibra bench trainer_schedules", options.output), file=sys.stderr
        )


def _rows(data: Path, micro_batches: int) -> Iterator[dict]:
    for name, (file, experts, sizes) in RECORDINGS.items():
        if not (data / file).exists():
            print(f"skipped: {data / file} is not there; name its folder with --data", file=sys.stderr)
            continue
        demand = Demand.from_trace(open_trace(data / file, experts))
        for machine, (ranks, expert_ranks) in MACHINES.items():
            layout = _layout(sizes, experts, ranks, expert_ranks)
            for order in ORDERS:
                drawn = _drawn(demand, ranks * micro_batches * LIMIT, ranks, in_order=order == "by task")
                length_S = demand.length_S[drawn]
                counts_SLE = demand.counts_SLE[drawn]
                share_SLR = counts_SLE.reshape(*counts_SLE.shape[:2], expert_ranks, -1).sum(axis=3).astype(np.float32)
                for trainer in ("slime", "miles", "verl"):
                    schedule = _schedule(trainer, length_S.tolist(), ranks, layout.group_ranks)
                    step = repack_step(
                        share_SLR,
                        length_S,
                        schedule,
                        layout,
                        rank_tokens=LIMIT,
                        since=time.perf_counter(),
                        keep_ranks=trainer == "verl",
                    )
                    yield {
                        "case": f"{name}, {machine}, {order}",
                        "label": "measured",
                        "unit": "busiest / mean expert-parallel rank, token-slots of a step",
                        "seed": 0,
                        "repetitions": 1,
                        "ranks": ranks,
                        "order": order,
                        "trainer": trainer,
                        "skew": step.skew[0],
                        "planned_skew": step.skew[1],
                        "lowest_skew": step.lowest,
                        "attention_skew": step.attention[0],
                        "planned_attention_skew": step.attention[1],
                        "ratio": step.skew[0] / step.skew[1],
                        "max_rank_tokens": step.fullest[1],
                        "token_limit": LIMIT,
                        "seconds": step.seconds,
                        "configuration": f"{len(schedule.step_M)} micro-batches, {len(drawn)} samples",
                    }


def _layout(sizes: tuple[int, ...], experts: int, ranks: int, expert_ranks: int) -> ExpertLayout:
    hidden, width, layers, heads, per_head = sizes
    config = SimpleNamespace(
        num_experts=experts,
        expert_model_parallel_size=expert_ranks,
        hidden_size=hidden,
        moe_ffn_hidden_size=width,
        num_layers=layers,
        num_attention_heads=heads,
        kv_channels=per_head,
    )
    return ExpertLayout.of_megatron(config, data_ranks=ranks)


def _drawn(demand: Demand, tokens: int, multiple: int, *, in_order: bool) -> np.ndarray:
    """Draw samples again until they have that many tokens; a multiple of the ranks, as verl asks for."""
    length_S = demand.length_S
    drawn = np.random.default_rng(0).integers(len(length_S), size=int(1.5 * tokens / length_S.mean()) + 100)
    drawn = drawn[: int(np.searchsorted(np.cumsum(length_S[drawn]), tokens)) // multiple * multiple]
    return np.sort(drawn) if in_order else drawn


def _schedule(trainer: str, lengths: list[int], ranks: int, group_ranks: int) -> TrainerSchedule:
    """Return the schedule that a trainer makes of one optimizer step, with samples limited to `LIMIT` tokens."""
    batches_of = _divided(lengths, ranks) if trainer == "verl" else _dealt(lengths, ranks, sort=trainer == "miles")
    micro_batch_S, rank_S = np.zeros((2, len(lengths)), dtype=np.int32)
    for rank, batches in enumerate(batches_of):
        for m, samples in enumerate(batches):
            micro_batch_S[samples], rank_S[samples] = m, rank
    return TrainerSchedule(
        micro_batch_S=micro_batch_S,
        rank_S=rank_S,
        step_M=np.zeros(len(batches_of[0]), dtype=np.int32),
        num_ranks=ranks,
        group_ranks=group_ranks,
    )


def _dealt(lengths: list[int], ranks: int, *, sort: bool) -> list[list[list[int]]]:
    """Put each sample into the first bin with room, halve the fullest bins until ranks divide them, and deal them."""
    bins: list[list[int]] = []
    room: list[int] = []
    for sample in sorted(range(len(lengths)), key=lambda s: -lengths[s]) if sort else range(len(lengths)):
        place = next((b for b, left in enumerate(room) if lengths[sample] <= left), len(bins))
        if place == len(bins):
            bins.append([])
            room.append(LIMIT)
        bins[place].append(sample)
        room[place] -= lengths[sample]
    while len(bins) % ranks:
        fullest = max((b for b in bins if len(b) > 1), key=lambda b: sum(lengths[s] for s in b))
        bins.remove(fullest)
        halves: tuple[list[int], list[int]] = ([], [])
        for sample in sorted(fullest, key=lambda s: -lengths[s]):
            min(halves, key=lambda half: sum(lengths[s] for s in half)).append(sample)
        bins += halves
    return [bins[rank::ranks] for rank in range(ranks)]


def _divided(lengths: list[int], ranks: int) -> list[list[list[int]]]:
    """Divide samples among ranks, as many each, and those of a rank among as few micro-batches as the fullest needs."""
    work = [24576 * n + n * n for n in lengths]
    parts = _largest_differences(work, ranks, as_many=True)
    number = max(-(-sum(lengths[s] for s in part) // LIMIT) for part in parts)
    return [
        [[part[place] for place in batch] for batch in _largest_differences([work[s] for s in part], number)]
        for part in parts
    ]


def _largest_differences(work: Sequence[int], parts: int, *, as_many: bool = False) -> list[list[int]]:
    """Divide numbers into parts of nearly equal sums (Karmarkar and Karp).

    as_many   every part has as many numbers
    """
    order = sorted(range(len(work)), key=lambda place: work[place])
    tie = count()
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []

    def push(sets: list[tuple[int, list[int]]]) -> None:
        sets.sort(key=lambda one: -one[0])
        heapq.heappush(heap, (sets[-1][0] - sets[0][0], next(tie), sets))

    for start in range(0, len(order), parts if as_many else 1):
        chosen = order[start : start + (parts if as_many else 1)]
        push([(work[place], [place]) for place in chosen] + [(0, []) for _ in range(parts - len(chosen))])
    while len(heap) > 1:
        (_, _, first), (_, _, second) = heapq.heappop(heap), heapq.heappop(heap)
        push([(a + b, x + y) for (a, x), (b, y) in zip(first, reversed(second), strict=True)])
    return [members for _, members in heap[0][2]]


def print_rows(rows: list[dict]) -> None:
    """Print one line per case and trainer."""
    columns = (
        "skew",
        "planned_skew",
        "lowest_skew",
        "attention_skew",
        "planned_attention_skew",
        "max_rank_tokens",
        "seconds",
    )
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for column in ("case", "trainer"):
        table.add_column(column, no_wrap=True)
    for column in columns:
        table.add_column(column.replace("_", " "), justify="right")
    for row in rows:
        shown = (f"{row[c]:,.3f}" if isinstance(row[c], float) else f"{row[c]:,}" for c in columns)
        table.add_row(row["case"], row["trainer"], *shown)
    Console(width=150).print(table)
