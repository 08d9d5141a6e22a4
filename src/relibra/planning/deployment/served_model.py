"""`ServedModel`: the sizes of a mixture-of-experts model that decide seconds and bytes of decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy import ndarray
from pydantic import Field

from relibra.errors import ConfigError
from relibra.field_checks import check_fields

Size = Annotated[int, Field(ge=1, le=1 << 40)]
SizeOr0 = Annotated[int, Field(ge=0, le=1 << 40)]
BYTES = 2
"""Bytes of a value: bf16."""


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """Sizes of a decoder whose layers with experts all look alike.

    layers                    layers with experts
    hidden                    width of a row that goes to an expert
    experts, top_k, width     routed experts of a layer, choices per token, width of one
    up_matrices               matrices from `hidden` to `width`: 2 with a gate
    qkv_width                 columns of the projections to queries, keys and values, together
    output_rows               rows of the output projection
    cache_values              values that the cache holds per token and layer
    cache_ways                ways that tensor parallelism can cut the cache: key-value heads; 1: latent attention
    score_flops               flops of attention scores per token and token attended, in one layer
    shared_width              width of shared experts, computed beside attention
    dense_layers, dense_width layers without experts
    head_values               weights of embedding and output matrix
    output_values             of these, weights that every token is multiplied with
    window, windowed_layers   sliding window in tokens, and the layers that have it, of all layers
    raises                    ConfigError for sizes out of range
    """

    name: str
    layers: Size
    hidden: Size
    experts: Size
    top_k: Size
    width: Size
    qkv_width: Size
    output_rows: Size
    cache_values: Size
    cache_ways: Size
    score_flops: Size
    up_matrices: Size = 2
    shared_width: SizeOr0 = 0
    dense_layers: SizeOr0 = 0
    dense_width: SizeOr0 = 0
    head_values: SizeOr0 = 0
    output_values: SizeOr0 = 0
    window: SizeOr0 = 0
    windowed_layers: SizeOr0 = 0

    def __post_init__(self) -> None:
        """Raise ConfigError for sizes out of range."""
        check_fields(ServedModel, vars(self), f"model {self.name!r}", ConfigError)
        if self.top_k > self.experts:
            raise ConfigError(f"model {self.name!r} picks {self.top_k} of {self.experts} experts: choose fewer")
        if self.windowed_layers > self.layers + self.dense_layers or (self.windowed_layers and not self.window):
            raise ConfigError(
                f"model {self.name!r} has a window of {self.window} in {self.windowed_layers} of "
                f"{self.layers + self.dense_layers} layers: give a window of at least 1, in at most all layers"
            )

    @property
    def attention_values(self) -> int:
        """Return the weights that an attention node holds: all but the routed experts (`P_a`)."""
        projections = self.hidden * (self.qkv_width + self.output_rows)
        gated = (self.up_matrices + 1) * self.hidden
        return (
            (self.layers + self.dense_layers) * projections
            + self.layers * gated * self.shared_width
            + self.dense_layers * gated * self.dense_width
            + self.head_values
        )

    @property
    def expert_values(self) -> int:
        """Return the weights of one expert over all layers (`P_e`)."""
        return self.layers * (self.up_matrices + 1) * self.hidden * self.width

    def attended(self, context: int | float | ndarray) -> Any:
        """Return the tokens that a token attends to, mean over layers."""
        layers = self.layers + self.dense_layers
        windowed = self.windowed_layers / layers
        return (1 - windowed) * context + windowed * np.minimum(context, self.window)

    def cache_bytes(self, context: int | float) -> float:
        """Return the bytes of keys and values of one request over all layers."""
        return float(BYTES * (self.layers + self.dense_layers) * self.cache_values * self.attended(context))


def _of_paper(name: str, layers: int, hidden: int, choices: tuple[int, int], width: int, group: int) -> ServedModel:
    """Return a model as the paper counts it: no embeddings, all heads as wide as a row, `group` queries per key."""
    return ServedModel(
        name=name,
        layers=layers,
        hidden=hidden,
        experts=choices[0],
        top_k=choices[1],
        width=width,
        qkv_width=hidden + 2 * hidden // group,
        output_rows=hidden,
        cache_values=2 * hidden // group,
        cache_ways=8,
        score_flops=4 * hidden,
    )


PAPER_MODELS = {
    one.name: one
    for one in (
        _of_paper("mixtral-8x22b", 56, 6144, (8, 2), 16384, 6),
        _of_paper("dbrx", 40, 6144, (16, 4), 10752, 6),
        _of_paper("scaled-moe", 48, 8192, (32, 4), 8192, 8),
    )
}
"""Models of MegaScale-Infer (arXiv 2504.02263), section 7; widths of Mixtral and DBRX from their configurations, of
Scaled-MoE from its 317 billion weights, its 8 query heads per key assumed."""
