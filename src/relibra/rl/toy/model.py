"""The built-in model: a small Qwen3 (dense or MoE) with random weights, made for the run."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from relibra.rl.config.settings import ModelSettings

MAX_POSITIONS = 4096
NUM_HEADS = 4
INITIAL_STD = 0.08
"""Standard deviation of initial weights: with the usual 0.02 a model of width 64 learns half as fast."""


def built_in_config(settings: ModelSettings, vocab_size: int, least_head_dim: int = 0) -> Qwen3MoeConfig | Qwen3Config:
    """Return the `transformers` configuration of the built-in policy; heads are at least as wide as a sampler needs."""
    sizes = {
        "vocab_size": vocab_size,
        "hidden_size": settings.hidden_size,
        "intermediate_size": 2 * settings.hidden_size,
        "num_hidden_layers": settings.num_layers,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_HEADS // 2,
        "head_dim": max(least_head_dim, settings.hidden_size // NUM_HEADS),
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
        "initializer_range": INITIAL_STD,
    }
    if not settings.num_experts:
        return Qwen3Config(**sizes)
    return Qwen3MoeConfig(
        **sizes,
        moe_intermediate_size=settings.expert_width or settings.hidden_size // 2,
        num_experts=settings.num_experts,
        num_experts_per_tok=settings.experts_per_token,
        norm_topk_prob=True,
    )


def initial_model(model_config: Any, seed: int) -> Any:
    """Return a model with random float32 weights, which follow from the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(model_config, dtype=torch.float32)
