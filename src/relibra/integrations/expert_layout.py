"""`ExpertLayout`: which ranks hold the experts of a Megatron model, and whose samples meet there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float64, Int
from numpy import ndarray

from relibra.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ExpertLayout:
    """Experts of one model on the ranks of one expert-parallel group, as Megatron orders them.

    num_experts     logical experts of a layer
    expert_ranks    ranks that divide them, each with a run of consecutive experts
    group_ranks     consecutive data-parallel ranks whose samples meet in one group of `expert_ranks`
    token_price     FLOPs of a token's attention projections in all layers / of one token-slot in one layer, on one rank
    pair_price      price of a pair of tokens in attention, likewise
    """

    num_experts: int
    expert_ranks: int
    group_ranks: int
    token_price: float
    pair_price: float

    @classmethod
    def of_megatron(cls, config: Any, *, data_ranks: int, parallel: Any = None) -> ExpertLayout:
        """Return the layout that Megatron gives a model with this configuration.

        In a pipeline stage rank numbers run over tensor first, then context, then data; for experts over expert-tensor,
        then expert, then data. So EP x ETP consecutive ranks hold all experts, and feed them with the samples of
        EP x ETP / (TP x CP) data-parallel ranks.

        config       arguments of Megatron (slime), or its `TransformerConfig` (verl)
        data_ranks   data-parallel ranks
        parallel     what holds the sizes of its groups; None: `config`
        raises       ConfigError where no schedule makes loads of experts more even, or a size does not divide another
        """
        parallel = config if parallel is None else parallel
        experts = getattr(config, "num_experts", None) or getattr(config, "num_moe_experts", None)
        if not experts:
            raise ConfigError("the model has no experts")
        tensor_ranks, expert_ranks = (_size(parallel, f"{it}_parallel_size") for it in ("tensor_model", "expert_model"))
        expert_tensor = _size(parallel, "expert_tensor_parallel_size", tensor_ranks)
        ranks_per_sample = tensor_ranks * _size(parallel, "context_parallel_size")
        if expert_ranks == 1:
            raise ConfigError("every rank has all experts (expert_model_parallel_size is 1): no schedule is more even")
        if experts % expert_ranks:
            raise ConfigError(f"{experts} experts are not divided evenly among {expert_ranks} expert-parallel ranks")
        ranks_per_expert_group = expert_ranks * expert_tensor
        if ranks_per_expert_group % ranks_per_sample and ranks_per_sample % ranks_per_expert_group:
            raise ConfigError(
                f"{ranks_per_expert_group} ranks share a group of experts and {ranks_per_sample} ranks a sample: one "
                "number must divide the other"
            )
        group_ranks = max(1, ranks_per_expert_group // ranks_per_sample)
        if data_ranks % group_ranks:
            raise ConfigError(f"{data_ranks} data-parallel ranks are no whole groups of {group_ranks} sharing experts")
        width = int(getattr(config, "moe_ffn_hidden_size", None) or config.ffn_hidden_size)
        slot_flops = 6.0 * config.hidden_size * width / expert_tensor
        slots_per_flop = config.num_layers / ranks_per_sample / slot_flops
        return cls(
            num_experts=experts,
            expert_ranks=expert_ranks,
            group_ranks=group_ranks,
            token_price=slots_per_flop * 8.0 * config.hidden_size**2,
            pair_price=slots_per_flop * 4.0 * _score_width(config),
        )

    def attention_prices(self, length_S: Int[ndarray, " S"]) -> Float64[ndarray, " S"]:
        """Return the price of each sample's attention in all layers, in token-slots of an expert-parallel rank.

        Projections (4 hidden^2 weights per token) and scores, as `sample_attention_seconds` counts them.
        """
        n_S = length_S.astype(np.float64)
        return self.token_price * n_S + self.pair_price * n_S * (n_S + 1) / 2


def _size(config: Any, name: str, default: int = 1) -> int:
    return int(getattr(config, name, None) or default)


def _score_width(config: Any) -> float:
    """Return the mean of two widths, each summed over all heads: that of queries and that of values."""
    if getattr(config, "multi_latent_attention", False):
        per_head = (config.qk_head_dim + config.qk_pos_emb_head_dim + config.v_head_dim) / 2
        return float(config.num_attention_heads * per_head)
    per_head = getattr(config, "kv_channels", None) or config.hidden_size / config.num_attention_heads
    return float(config.num_attention_heads * per_head)
