"""Measure this machine with one process per rank, all at once, as in training.

Each rank times its experts, a large matrix product, copies in host and device memory, the all-to-all, and products
beside an all-to-all; the result is the time of the slowest rank. Sizes alternate, ascending and descending, so that a
slow moment affects all of them.
"""

from __future__ import annotations

import json
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing.spawn import ProcessException

from relibra.calibration.fit import Machine, Timings
from relibra.calibration.grouped_experts import grouped_experts, seconds_each
from relibra.environment import host_memory
from relibra.errors import ConfigError, EngineError
from relibra.planning.costs.expert_shape import ExpertShape

EXPERTS = 4
"""Experts per rank: several, so that weights are read from memory and not from a cache, as in a layer."""
EXCHANGES = 4
"""Exchanges per reading of the clock: several share the wait for a late rank."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes to time, and how often.

    rows                of each expert
    dense               the large product multiplies dense x dense matrices
    copies, exchange    bytes; for an exchange, to all other ranks together
    repetitions         of each size, at most
    seconds             most for one kind of measurement, unless `MIN_REPETITIONS` of each size take longer
    """

    rows: tuple[int, ...]
    dense: int
    copies: tuple[int, ...]
    exchange: tuple[int, ...]
    repetitions: int
    seconds: float = 40.0


MIN_REPETITIONS = 3
_MIB = 1 << 20
CPU_SIZES = Sizes(
    rows=(1, 2, 4, 8, 16, 32, 64, 128, 256),
    dense=1024,
    copies=(_MIB, 4 * _MIB, 16 * _MIB, 64 * _MIB, 128 * _MIB),
    exchange=(1 << 12, 1 << 16, 1 << 18, _MIB, 4 * _MIB, 16 * _MIB),
    repetitions=9,
)
GPU_SIZES = Sizes(
    rows=tuple(1 << power for power in range(15)),
    dense=8192,
    copies=(_MIB, 4 * _MIB, 16 * _MIB, 64 * _MIB, 256 * _MIB),
    exchange=(1 << 12, 1 << 16, 1 << 18, _MIB, 4 * _MIB, 16 * _MIB, 64 * _MIB, 256 * _MIB),
    repetitions=15,
)
QUICK_SIZES = Sizes(
    rows=(1, 8, 64), dense=256, copies=(_MIB, 16 * _MIB), exchange=(1 << 16, _MIB, 4 * _MIB), repetitions=3
)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One calibration, the same on every rank.

    cuda               each rank has a GPU; else each has one CPU thread
    timeout_seconds    of each collective, and of the whole calibration
    """

    ranks: int
    cuda: bool
    expert: ExpertShape
    sizes: Sizes
    timeout_seconds: float = 900.0

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of weights and rows."""
        return torch.bfloat16 if self.cuda else torch.float32


def choose_job(ranks: int | None, expert: ExpertShape, *, quick: bool = False) -> Job:
    """Return a job for so many ranks; None: for all GPUs of this machine, or two processes of one thread without any.

    raises    ConfigError when ranks exceed the number of GPUs, or for one rank on a CPU
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus and (ranks or 0) > gpus:
        raise ConfigError(f"--ranks {ranks}: this machine has {gpus} GPU(s), each is one rank; ask for {gpus} at most")
    if not gpus and ranks == 1:
        raise ConfigError("--ranks 1: on a CPU the exchange is measured between processes; ask for 2 or more")
    sizes = QUICK_SIZES if quick else GPU_SIZES if gpus else CPU_SIZES
    return Job(ranks=ranks or gpus or 2, cuda=gpus > 0, expert=expert, sizes=sizes)


def describe_machine(job: Job) -> Machine:
    """Return the name and description of the machine; no process is started."""
    if job.cuda:
        properties = torch.cuda.get_device_properties(0)
        words = f"{job.ranks} x {properties.name}, bfloat16"
        memory = int(properties.total_memory)
    else:
        words = f"{_processor()}, {job.ranks} processes of 1 thread, float32"
        memory = int(host_memory(free=False) or 0) // job.ranks
    kind = "gpu" if job.cuda else "cpu"
    return Machine(
        name=f"calibrated-{kind}-x{job.ranks}",
        ranks=job.ranks,
        memory_bytes=memory,
        description=f"{words}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}",
    )


def measure_machine(job: Job) -> Timings:
    """Run all ranks and return the seconds of the slowest.

    raises    EngineError when a rank dies or does not finish in time
    """
    with tempfile.TemporaryDirectory() as folder:
        _run_ranks(job, Path(folder))
        found = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(job.ranks)]
    return Timings(
        num_experts=EXPERTS,
        experts={rows: _slowest([item["experts"][n] for item in found]) for n, rows in enumerate(job.sizes.rows)},
        dense_flops=2.0 * job.sizes.dense**3,
        dense=_slowest([item["dense"] for item in found]),
        copies={size: _slowest([item["copies"][n] for item in found]) for n, size in enumerate(job.sizes.copies)},
        memory_bytes=2.0 * max(job.sizes.copies),
        memory=_slowest([item["memory"] for item in found]),
        exchange={
            bytes_to_others(size, job.ranks): [
                max(of_ranks) for of_ranks in zip(*(item["exchange"][n] for item in found), strict=True)
            ]
            for n, size in enumerate(job.sizes.exchange if job.ranks > 1 else ())
        },
        product_alone=_slowest([item["overlap"][0] for item in found]),
        exchange_alone=_slowest([item["overlap"][1] for item in found]),
        together=_slowest([item["overlap"][2] for item in found]),
    )


def bytes_to_others(size: int, ranks: int) -> int:
    """Return a size rounded down: each other rank gets the same number of bytes, a multiple of 4 and at least 4.

    >>> bytes_to_others(1000, 4)
    996
    """
    return max(4, size // (ranks - 1) // 4 * 4) * (ranks - 1)


def _slowest(of_ranks: Sequence[Sequence[float]]) -> Sequence[float]:
    """Return the seconds of the rank with the largest median."""
    return max(of_ranks, key=lambda seconds: median(seconds) if seconds else 0.0)


def _run_ranks(job: Job, folder: Path) -> None:
    processes = mp.spawn(measure_rank, args=(job, folder), nprocs=job.ranks, join=False)  # type: ignore[attr-defined]
    deadline = time.monotonic() + job.timeout_seconds
    try:
        while not processes.join(timeout=max(0.0, deadline - time.monotonic())):
            if time.monotonic() >= deadline:
                raise EngineError(
                    f"the ranks of the calibration did not finish within {job.timeout_seconds:g} s: the machine is too "
                    "busy, or a rank hangs; try again, or use fewer ranks"
                )
    except ProcessException as error:
        reason = str(error).strip().splitlines()[-1]
        raise EngineError(
            f"rank {error.error_index} of the calibration failed: {reason}; nothing was written"
        ) from error
    finally:
        for process in processes.processes:
            if process.is_alive():
                process.kill()
            process.join()


def measure_rank(rank: int, job: Job, folder: Path) -> None:
    """Measure on one rank, in a process of its own, and write the seconds to `<rank>.json`; collective."""
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if job.cuda else torch.device("cpu")
    if job.cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if job.cuda else "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=job.ranks,
        timeout=timedelta(seconds=job.timeout_seconds),
    )
    found: dict[str, object] = {}
    *found["experts"], found["dense"] = _time_products(job, device)
    dist.barrier()
    found["copies"] = _time_copies(job, device)
    dist.barrier()
    found["memory"] = _time_memory(job, device)
    dist.barrier()
    found["exchange"] = _time_exchange(job, device) if job.ranks > 1 else []
    found["overlap"] = _time_overlap(job, device) if job.ranks > 1 else [[], [], []]
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _time_products(job: Job, device: torch.device) -> list[list[float]]:
    """Return seconds of the experts for each number of rows, then of the large product."""
    shape, sizes = job.expert, job.sizes
    experts = grouped_experts(EXPERTS, EXPERTS * max(sizes.rows), shape.hidden, shape.width, device, job.dtype)
    experts.check()
    left, right = (torch.randn(sizes.dense, sizes.dense, device=device).to(job.dtype) for _ in range(2))
    works = [*(experts.work([rows] * EXPERTS) for rows in sizes.rows), lambda: (left @ right,)]
    return repeat_in_turns(len(works), lambda order: seconds_each([works[n] for n in order], device), sizes)


def _time_copies(job: Job, device: torch.device) -> list[list[float]]:
    """Return seconds of copies in host memory, or between host and GPU in the slower direction.

    Each copy uses the next piece of memory, so that small copies do not read from a cache.
    """
    sizes = job.sizes
    host = torch.zeros(2 * max(sizes.copies), dtype=torch.uint8, pin_memory=job.cuda)
    other = torch.zeros_like(host, device=device)
    host.fill_(1)  # touches all pages
    other.fill_(1)
    begin = 0

    def time_copy(size: int) -> float:
        nonlocal begin
        begin = begin if begin + size <= len(host) else 0
        there, here = other[begin : begin + size], host[begin : begin + size]
        begin += size
        seconds = []
        for target, source in ((there, here), (here, there)) if job.cuda else ((there, here),):
            start = _now(device)
            target.copy_(source, non_blocking=job.cuda)
            seconds.append(_now(device) - start)
        return max(seconds)

    return repeat_in_turns(len(sizes.copies), lambda order: [time_copy(sizes.copies[n]) for n in order], sizes)


def _time_memory(job: Job, device: torch.device) -> list[float]:
    """Return seconds of copies inside device memory, for the largest size."""
    source = torch.ones(max(job.sizes.copies), dtype=torch.uint8, device=device)
    target = torch.ones_like(source)

    def time_round(_: list[int]) -> list[float]:
        start = _now(device)
        target.copy_(source)
        return [_now(device) - start]

    return repeat_in_turns(1, time_round, job.sizes)[0]


def _time_exchange(job: Job, device: torch.device) -> list[list[float]]:
    """Return seconds of an all-to-all in which each rank sends the same to every other rank, and nothing to itself."""
    own, sizes = dist.get_rank(), [bytes_to_others(size, job.ranks) for size in job.sizes.exchange]
    sent = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    received = torch.zeros_like(sent)

    def time_exchange(size: int) -> float:
        each = [0 if rank == own else size // (job.ranks - 1) for rank in range(job.ranks)]
        dist.barrier()
        start = _now(device)
        for _ in range(EXCHANGES):
            dist.all_to_all_single(received[:size], sent[:size], each, each)
        return (_now(device) - start) / EXCHANGES

    def enough(elapsed: float) -> bool:  # all ranks stop after the same repetition
        slowest = torch.tensor(elapsed)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return float(slowest) > job.sizes.seconds

    return repeat_in_turns(len(sizes), lambda order: [time_exchange(sizes[n]) for n in order], job.sizes, enough)


def _time_overlap(job: Job, device: torch.device) -> list[list[float]]:
    """Return seconds of products alone, of the largest exchange alone, and of both at once.

    Each rank computes so many products that they take about as long as the exchange.
    """
    size = bytes_to_others(max(job.sizes.exchange), job.ranks)
    each = [0 if rank == dist.get_rank() else size // (job.ranks - 1) for rank in range(job.ranks)]
    sent = torch.zeros(size, dtype=torch.uint8, device=device)
    received = torch.zeros_like(sent)
    left, right = (torch.randn(256, 256, device=device).to(job.dtype) for _ in range(2))

    def run(products: int, *, exchanges: bool) -> float:
        dist.barrier()
        start = _now(device)
        work = dist.all_to_all_single(received, sent, each, each, async_op=True) if exchanges else None
        for _ in range(products):
            left @ right
        if work is not None:
            work.wait()
        return _now(device) - start

    def alone(products: int, *, exchanges: bool) -> float:
        return min(run(products, exchanges=exchanges) for _ in range(MIN_REPETITIONS))

    products = max(1, int(16 * alone(0, exchanges=True) / alone(16, exchanges=False)))
    cases = ((products, False), (0, True), (products, True))

    def time_round(order: list[int]) -> list[float]:
        return [run(cases[n][0], exchanges=cases[n][1]) for n in order]

    return repeat_in_turns(len(cases), time_round, job.sizes, lambda _: True)


def repeat_in_turns(
    number: int,
    time_round: Callable[[list[int]], list[float]],
    sizes: Sizes,
    enough: Callable[[float], bool] | None = None,
) -> list[list[float]]:
    """Return seconds by size; a first round warms up, and later rounds run the sizes in ascending or descending order.

    number       sizes to time
    time_round   returns the seconds of the sizes of these indices, timed in this order
    enough       whether to stop after so many seconds, asked from `MIN_REPETITIONS` on; None: after `sizes.seconds`
    """
    seconds: list[list[float]] = [[] for _ in range(number)]
    time_round(list(range(number)))
    start = time.perf_counter()
    for repetition in range(sizes.repetitions):
        order = list(range(number))[:: -1 if repetition % 2 else 1]
        for n, spent in zip(order, time_round(order), strict=True):
            seconds[n].append(spent)
        elapsed = time.perf_counter() - start
        if repetition + 1 >= MIN_REPETITIONS and (enough(elapsed) if enough else elapsed > sizes.seconds):
            break
    return seconds


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or "unknown processor"
