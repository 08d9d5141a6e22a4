"""Policies with uneven routes: experts are numbered by falling load, so that contiguous homes are uneven.

The function of the policy stays the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from relibra.calibration.grouped_experts import grouped_experts, seconds_each
from relibra.routing.demand import Demand
from relibra.routing.readers import open_trace


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
    """Time the experts of the busiest rank alone, forward and backward, for the loads of the last step of a run.

    Contiguous homes. Loads are spread evenly over as few micro-batches as hold the tokens of the step.
    """
    torch.set_num_threads(1)
    load_LE = _loads(run)
    tokens = open_trace(max((run / "traces").iterdir()), None).num_rows
    micro_batches = max(1, -(-tokens // (num_ranks * micro_batch_tokens)))
    own = load_LE.shape[1] // num_ranks
    busiest_LE = np.stack([max(np.split(load_E, num_ranks), key=np.sum) for load_E in load_LE]) // micro_batches
    experts = grouped_experts(own, int(busiest_LE.sum(axis=1).max()), hidden, width, torch.device("cpu"), torch.float32)
    works = [experts.work(load_E.tolist()) for load_E in busiest_LE]
    seconds = [sum(seconds_each(works, torch.device("cpu"))) for _ in range(4)]
    return micro_batches * float(np.median(seconds[1:]))


def _loads(run: Path) -> np.ndarray:
    """Return the token-slots of each expert, by layer, in the last step of a run."""
    return Demand.from_trace(open_trace(max((run / "traces").iterdir()), None)).counts_SLE.sum(axis=0)
