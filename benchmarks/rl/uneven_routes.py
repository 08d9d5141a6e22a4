"""Policies with uneven routes: experts are numbered by falling load, so that contiguous homes are uneven.

The function of the policy stays the same.
"""

from __future__ import annotations

import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from relibra.calibration.grouped_experts import grouped_experts
from relibra.routing.demand import Demand
from relibra.routing.readers import open_trace

_REPETITIONS = 4
"""The first one is not counted."""


def sort_experts_by_load(policy: Path, run: Path) -> None:
    """Renumber the experts of every layer of a Qwen3-MoE policy by falling load in the last step of a run.

    Rows of the router and experts are permuted alike: every token chooses the same experts under new numbers.
    """
    trace = open_trace(max((run / "traces").iterdir()), None)
    load_LE = _loads(run)
    model: Any = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    with torch.no_grad():
        for layer, load_E in zip(trace.layer_ids.tolist(), load_LE, strict=True):
            order_E = torch.from_numpy(np.argsort(-load_E, kind="stable"))
            block = model.model.layers[layer].mlp
            for parameter in (block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj):
                parameter.copy_(parameter[order_E])
    model.save_pretrained(policy)


def busiest_rank_seconds(run: Path, *, hidden: int, width: int, num_ranks: int, micro_batch_tokens: int) -> float:
    """Time the experts of all ranks, forward and backward, for the loads of the last step of a run; add up the slowest.

    Contiguous homes. Loads are spread evenly over as few micro-batches as hold the tokens of the step. Ranks are
    processes that begin each layer together, as in the run: processes share caches and memory.
    """
    load_LE = _loads(run)
    tokens = open_trace(max((run / "traces").iterdir()), None).num_rows
    micro_batches = max(1, -(-tokens // (num_ranks * micro_batch_tokens)))
    loads_RLE = np.stack(np.split(load_LE // micro_batches, num_ranks, axis=1))
    spawn = get_context("spawn")
    with spawn.Manager() as manager, spawn.Pool(num_ranks) as pool:
        barrier = manager.Barrier(num_ranks)
        jobs = [pool.apply_async(_layer_seconds, (loads_LE, hidden, width, barrier)) for loads_LE in loads_RLE]
        seconds_RXL = np.array([job.get() for job in jobs])
    return micro_batches * float(np.median(seconds_RXL.max(axis=0).sum(axis=1)))


def _layer_seconds(load_LE: np.ndarray, hidden: int, width: int, barrier: Any) -> list[list[float]]:
    """Return seconds of each layer of one rank in each repetition; layers begin when all ranks come to the barrier."""
    torch.set_num_threads(1)
    rows = int(load_LE.sum(axis=1).max())
    experts = grouped_experts(load_LE.shape[1], rows, hidden, width, torch.device("cpu"), torch.float32)
    works = [experts.work(load_E.tolist()) for load_E in load_LE]
    seconds = []
    for _ in range(_REPETITIONS):
        seconds.append([])
        for work in works:
            barrier.wait(timeout=600)
            start = time.perf_counter()
            work()
            seconds[-1].append(time.perf_counter() - start)
    return seconds[1:]


def _loads(run: Path) -> np.ndarray:
    """Return the token-slots of each expert, by layer, in the last step of a run."""
    return Demand.from_trace(open_trace(max((run / "traces").iterdir()), None)).counts_SLE.sum(axis=0)
