"""Tiny random MoE models of several families, and routes for them; they fit into a test of a fraction of a second."""

from __future__ import annotations

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from relibra.routing.trace import RoutingTrace

VOCAB = 64
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LATENT = {  # multi-head latent attention of DeepSeek
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_GROUPED = {
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}

CONFIGS = {
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            "moe_intermediate_size": 16,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "head_dim": 8,
            "norm_topk_prob": True,
        },
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}),
    "olmoe": ("OlmoeConfig", {"num_experts": 8, "num_experts_per_tok": 2}),
    "deepseek_v2": (
        "DeepseekV2Config",
        _LATENT
        | _GROUPED
        | {
            "moe_intermediate_size": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "topk_method": "group_limited_greedy",
        },
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        _LATENT
        | _GROUPED
        | {"moe_intermediate_size": 16, "n_routed_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 3},
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        _GROUPED | {"moe_intermediate_size": 16, "n_routed_experts": 8, "num_experts_per_tok": 3, "head_dim": 8},
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "head_dim": 8,
            "sliding_window": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},  # its own default warns at this size
        },
    ),
}
"""Family -> (configuration class of transformers, what differs from the common tiny model)."""


def tiny_model(family: str = "qwen3_moe", *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes) -> nn.Module:
    """Return a random model of a family with weights large enough that experts differ, selection biases included."""
    config_class, settings = CONFIGS[family]
    config = getattr(transformers, config_class)(**(_COMMON | settings | changes))
    config._attn_implementation = "eager"
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("e_score_correction_bias"):
                tensor.data.uniform_(-0.2, 0.2)
            elif tensor.ndim > 1 or name.endswith("router.bias"):
                tensor.data.normal_(std=0.2)
    return model.to(dtype)


def random_tokens(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Return token ids `[rows, columns]`, none of them a special token."""
    return torch.from_numpy(np.random.default_rng(seed).integers(3, VOCAB, size=(rows, columns)))


def random_experts(rows: int, layers: int, num_experts: int, top_k: int, seed: int = 0) -> np.ndarray:
    """Return ids `[rows, layers, top_k]`, different within each row."""
    keys = np.random.default_rng(seed).random((rows, layers, num_experts))
    return keys.argsort(axis=-1)[..., :top_k]


def random_trace(
    lengths: list[int],
    *,
    layer_ids: list[int],
    num_experts: int = 8,
    top_k: int = 2,
    tokens: list[np.ndarray] | None = None,
    seed: int = 0,
) -> RoutingTrace:
    """Return a trace of random choices whose samples have these lengths; the last row of each is not valid."""
    return RoutingTrace.from_samples(
        [random_experts(n, len(layer_ids), num_experts, top_k, seed + s) for s, n in enumerate(lengths)],
        num_experts=num_experts,
        layer_ids=layer_ids,
        valid=[np.arange(n) < n - 1 for n in lengths],
        tokens=tokens,
    )
