"""Number the experts of a policy by falling load, so that contiguous homes are uneven; the function stays the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from relibra.routing.demand import Demand
from relibra.routing.readers import open_trace


def sort_experts_by_load(policy: Path, run: Path) -> None:
    """Renumber the experts of every layer of a Qwen3-MoE policy by falling load in the last step of a run.

    Rows of the router and experts are permuted alike: every token chooses the same experts under new numbers.
    """
    trace = open_trace(max((run / "traces").iterdir()), None)
    load_LE = Demand.from_trace(trace).counts_SLE.sum(axis=0)
    model: Any = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    with torch.no_grad():
        for layer, load_E in zip(trace.layer_ids.tolist(), load_LE, strict=True):
            order_E = torch.from_numpy(np.argsort(-load_E, kind="stable"))
            block = model.model.layers[layer].mlp
            for parameter in (block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj):
                parameter.copy_(parameter[order_E])
    model.save_pretrained(policy)
