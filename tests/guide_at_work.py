"""The blocks of docs/execution.md in two processes, with what the guide takes for granted."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils.logging import disable_progress_bar

from relibra import RoutingTrace
from relibra.timeline import merged, read_timeline
from tests.replay.tiny_models import random_experts, tiny_model

RANKS, SAMPLES, LENGTH = 2, 8, 1024  # so many tokens that moved homes pay


def run_blocks(blocks: list[str], folder: Path) -> dict:
    """Return what rank 0 found out about what the blocks left."""
    tiny_model("qwen3_moe").save_pretrained(folder / "model")
    mp.spawn(_work, ("\n".join(blocks), folder), nprocs=RANKS)
    timeline = merged([read_timeline(folder / f"timeline-{rank}") for rank in range(RANKS)])
    return json.loads((folder / "found.json").read_text()) | {"stages": {event.stage for event in timeline.events}}


def _work(rank: int, program: str, folder: Path) -> None:
    os.chdir(folder)
    torch.set_num_threads(1)
    disable_progress_bar()
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    around = _taken_for_granted(rank)
    exec(compile(program, "docs/execution.md", "exec"), around)
    if rank == 0:
        saved = dict(AutoModelForCausalLM.from_pretrained("checkpoint").named_parameters())
        plan = around["plan"]
        found = {
            "saved": {name: torch.equal(weight, saved[name]) for name, weight in around["weights"].items()},
            "trained": not torch.equal(saved["lm_head.weight"], tiny_model("qwen3_moe").lm_head.weight),
            "replicas": plan.num_copies,
            "homes": bool((plan.physical_to_logical_map != np.arange(plan.num_experts)).any()),
        }
        (folder / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _taken_for_granted(rank: int) -> dict:
    rng, s = np.random.default_rng(0), np.arange(SAMPLES)
    tokens_SN = torch.from_numpy(rng.integers(1, 64, size=(SAMPLES, LENGTH)))
    experts = [random_experts(LENGTH, 3, 8, 2, seed) // (1 + (seed % 4 > 0)) for seed in s.tolist()]
    for of_sample in experts:  # two experts of a token differ; three of four samples take the first half of the experts
        of_sample[..., 1] += (of_sample[..., 1] == of_sample[..., 0]) * np.where(of_sample[..., 1] == 7, -1, 1)
    trace = RoutingTrace.from_samples(experts, num_experts=8, tokens=list(tokens_SN.numpy()))

    def batch_of(samples: np.ndarray) -> tuple[Tensor, Tensor]:
        return tokens_SN[samples], torch.ones_like(tokens_SN[samples])

    def loss_of(model: torch.nn.Module, tokens: Tensor, mask: Tensor) -> Tensor:
        logits = model(tokens, attention_mask=mask, use_cache=False).logits
        return cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    return {
        "np": np, "torch": torch, "AutoModelForCausalLM": AutoModelForCausalLM, "DistributedConfig": DistributedConfig,
        "rank": rank, "trace": trace, "micro_batch_S": s // 4, "rank_S": s // 2 % 2, "batch_of": batch_of,
        "loss_of": loss_of,
    }  # fmt: skip
