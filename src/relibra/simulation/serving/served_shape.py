"""The `ServedModel` of a `ModelShape`: the same sizes as a deployment search takes them."""

from __future__ import annotations

from relibra.planning.deployment.served_model import ServedModel
from relibra.simulation.model_shape import ModelShape


def served_model(shape: ModelShape) -> ServedModel:
    """Return the sizes of a model for decoding.

    With latent attention the cache holds one narrow vector per token, which every GPU of a node needs whole, and scores
    are computed with that vector in every head (the absorbed form of DeepSeek-V2, arXiv 2405.04434).
    """
    heads, latent = shape.query_heads, shape.latent
    if latent is None:
        output_rows = heads * shape.head_dim
        cache_values, cache_ways = 2 * shape.kv_heads * shape.head_dim, shape.kv_heads
        score_flops = 4 * heads * shape.head_dim
    else:
        output_rows = heads * latent.value_dim
        cache_values, cache_ways = latent.kv_rank + latent.rope_dim, 1
        score_flops = 2 * heads * (2 * latent.kv_rank + latent.rope_dim)
    return ServedModel(
        name=shape.name,
        layers=shape.moe_layers,
        hidden=shape.hidden,
        experts=shape.experts,
        top_k=shape.top_k,
        width=shape.expert.width,
        up_matrices=shape.expert.matrices - 1,
        qkv_width=max(1, shape.attention_parameters // shape.hidden - output_rows),
        output_rows=output_rows,
        cache_values=cache_values,
        cache_ways=cache_ways,
        score_flops=score_flops,
        shared_width=shape.shared_width,
        dense_layers=shape.dense_layers,
        dense_width=shape.dense_width,
        head_values=shape.head_parameters * (1 if shape.tied_embeddings else 2),
        output_values=shape.head_parameters,
        window=shape.window,
        windowed_layers=shape.windowed_layers,
    )
