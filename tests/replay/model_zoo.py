"""Tiny random models of every family of transformers whose routers can be replayed, built from one list of sizes."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn
from transformers.integrations.heterogeneity.configuration_utils import AmbiguousGlobalPerLayerAttributeError

from tests.replay.router_zoo import modules_by_class
from tests.replay.tiny_models import VOCAB

_LAYERS = 3
_SIZES = {
    **dict.fromkeys(("vocab_size", "unpadded_vocab_size", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(("hidden_size",), 32),
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "prefix_dense_intermediate_size"), 48),
    **dict.fromkeys(("num_hidden_layers", "num_layers"), _LAYERS),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 4),
    **dict.fromkeys(("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "index_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 16),
    **dict.fromkeys(("index_n_heads", "index_topk"), 4),
    **dict.fromkeys(
        (
            "moe_intermediate_size",
            "expert_ffn_hidden_size",
            "shared_expert_intermediate_size",
            "moe_shared_expert_intermediate_size",
            "shared_intermediate_size",
            "hidden_size_per_layer_input",
        ),
        16,
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "moe_num_experts", "n_routed_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_groups"), 1),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), 1),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_d_head", "mamba_head_dim"), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "mamba_num_heads", "mamba_n_heads"), 4),
    "attention_multiplier": 8**-0.5,  # 1 by default: scores of released models are scaled down, as everywhere
    "zero_expert_num": 0,
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": 64,
    "sliding_window": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Names of sizes in all configurations; a family gets those that it has."""
_OF_FAMILY = {
    "JambaForCausalLM": {"expert_layer_offset": 1, "attn_layer_offset": 1},
    "Lfm2MoeForCausalLM": {"layer_types": ["full_attention"] * _LAYERS},
    "GptOssForCausalLM": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "Qwen3NextForCausalLM": {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "Qwen3_5MoeForCausalLM": {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "BailingHybridForCausalLM": {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "LaraMiniForCausalLM": {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "Qwen4ExpForCausalLM": {
        "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "Gemma4ForCausalLM": {
        "global_head_dim": 8,
        "enable_moe_block": True,
        "hidden_size_per_layer_input": 0,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    },
    "NemotronHForCausalLM": {"layers_block_type": ["attention", "moe", "moe"]},
}


CAUSAL_MODELS = (
    "AXK1ForCausalLM", "AXK2ForCausalLM", "AfmoeForCausalLM", "AriaTextForCausalLM", "BailingHybridForCausalLM",
    "Cohere2MoeForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV32ForCausalLM", "DeepseekV3ForCausalLM",
    "Dots1ForCausalLM", "Ernie4_5_MoeForCausalLM", "ExaoneMoeForCausalLM", "FlexOlmoForCausalLM",
    "FlintForCausalLM", "Gemma4ForCausalLM",
    "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM", "GlmMoeDsaForCausalLM", "GptOssForCausalLM",
    "GraniteMoeForCausalLM", "GraniteMoeSWAForCausalLM", "GraniteMoeSharedForCausalLM", "HYV3ForCausalLM",
    "HYV4ForCausalLM", "HunYuanMoEV1ForCausalLM", "Inkling2ForCausalLM", "JambaForCausalLM", "LagunaForCausalLM",
    "LaraMiniForCausalLM",
    "Lfm2MoeForCausalLM", "LongcatFlashForCausalLM", "MellumForCausalLM", "MiniMaxForCausalLM",
    "MiniMaxM2ForCausalLM", "MiniMaxM3VLForCausalLM", "MixtralForCausalLM", "NemotronHForCausalLM",
    "OlmoeForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM",
    "Qwen3_5MoeForCausalLM", "Qwen4ExpForCausalLM", "SolarOpenForCausalLM",
)  # fmt: skip
"""Classes of transformers that build at these sizes and run in a moment; a class of routers each."""


def sized_config(config_class: Any, **changes: Any) -> Any:
    """Return a configuration of a class with the sizes that it has a name for."""
    known = config_class()
    return config_class(**({key: value for key, value in _SIZES.items() if _has(known, key)} | changes))


def _has(config: Any, name: str) -> bool:
    try:
        return hasattr(config, name)
    except AmbiguousGlobalPerLayerAttributeError:  # it has one of each layer
        return True


def tiny_causal_model(name: str, seed: int = 0) -> nn.Module:
    """Return a random model of a class, with weights large enough that experts differ."""
    model_class = getattr(importlib.import_module(modules_by_class()[name]), name)
    config = sized_config(model_class.config_class, **_OF_FAMILY.get(name, {}))
    config._attn_implementation = "eager"
    config.use_cache = False  # caches of hybrids want an attention layer
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config)
        for path, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if path.endswith("e_score_correction_bias"):
                tensor.data.uniform_(-0.2, 0.2)
            elif tensor.ndim > 1 and tensor.is_floating_point():
                tensor.data.normal_(std=0.2)
    return model.eval()
