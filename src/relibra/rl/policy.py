"""The policy: a tiny Qwen3-MoE-shaped model, sharded by FSDP2 and expert parallelism, and its full copies."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils import logging as transformers_logging

from relibra.rl.config import ModelSettings

MAX_POSITIONS = 4096
INITIAL_STD = 0.08
"""Of weights: the usual 0.02 suits wide models and makes one 64 wide learn half as fast."""


@dataclass(frozen=True)
class Policy:
    """The trained model and its full copy on this rank.

    trained   sharded over the ranks (plain on one rank); holds parameters and gradients
    copy      whole, in evaluation mode, without gradients; what the rollout engine samples from
    """

    trained: nn.Module
    copy: nn.Module

    def sync(self) -> None:
        """Copy the trained weights, gathered whole and in logical expert order, into the full copy; collective."""
        for module in self.trained.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # after a forward pass without backward the root still shows its gathered parameters
        targets = dict(self.copy.named_parameters())
        with torch.no_grad():
            for name, parameter in self.trained.named_parameters():
                targets[name].copy_(full_tensor(parameter))


def build_policy(settings: ModelSettings, vocab_size: int, seed: int, folder: Path, device: torch.device) -> Policy:
    """Initialise weights from the seed on rank 0 and shard them over all ranks; collective.

    folder   where the initial weights pass through, and are removed again
    """
    transformers_logging.disable_progress_bar()
    # Two gathers instead of one for expert tensors: known, and cheap at this size.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    config = model_config(settings, vocab_size)
    num_ranks = dist.get_world_size()
    path = folder / ".initial-weights"
    if dist.get_rank() == 0:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            Qwen3MoeForCausalLM(config).save_pretrained(path)
    dist.barrier()
    distributed = DistributedConfig(fsdp_size=num_ranks, ep_size=num_ranks, ep_implementation="all_to_all")
    trained = Qwen3MoeForCausalLM.from_pretrained(
        path, dtype=torch.float32, **({"distributed_config": distributed} if num_ranks > 1 else {})
    ).to(device)
    copy = Qwen3MoeForCausalLM.from_pretrained(path, dtype=torch.float32).to(device).eval().requires_grad_(False)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path)
    trained.train()
    return Policy(trained, copy)


def model_config(settings: ModelSettings, vocab_size: int) -> Qwen3MoeConfig:
    """Return the `transformers` configuration of the built-in policy."""
    return Qwen3MoeConfig(
        vocab_size=vocab_size,
        hidden_size=settings.hidden_size,
        intermediate_size=2 * settings.hidden_size,
        moe_intermediate_size=settings.hidden_size // 2,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=settings.num_heads,
        num_key_value_heads=settings.num_heads // 2,
        head_dim=settings.hidden_size // settings.num_heads,
        num_experts=settings.num_experts,
        num_experts_per_tok=settings.experts_per_token,
        norm_topk_prob=True,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,  # transformers 5.23 unties them silently under FSDP2: copies would drift
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        initializer_range=INITIAL_STD,
    )


def full_tensor(parameter: Tensor) -> Tensor:
    """Return the whole of a parameter that may be sharded; collective if it is."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    """Scale gradients down to a global norm over all shards of all ranks, and return the norm before; collective.

    torch's own `clip_grad_norm_` cannot mix the meshes of dense and expert parameters. Every shard lives on exactly
    one rank, so the local squares add up over the ranks to the whole.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    local = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    total = torch.stack([gradient.float().square().sum() for gradient in local]).sum()
    dist.all_reduce(total)
    norm = total.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in local:
        gradient.mul_(scale)
    return float(norm)
