"""`ModelShape`: the sizes of a mixture-of-experts transformer that decide seconds and bytes, with presets."""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from jaxtyping import Float64, Int
from numpy import ndarray

from relibra.errors import ConfigError
from relibra.planning.costs.expert_shape import EXPERT_SHAPES, ExpertShape
from relibra.routing.demand import Demand


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Sizes of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values from one narrow vector.

    query_rank   width that queries are made from; 0: from the hidden state at once
    kv_rank      width that keys and values are made from, which is what a cache holds
    rope_dim     width of the part of a key with positions, one for all heads; a cache holds it too
    nope_dim     width per head of the part of a key without positions
    value_dim    width of a value per head
    raises       ConfigError for sizes out of range
    """

    query_rank: int
    kv_rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int

    def __post_init__(self) -> None:
        _check_sizes(self, "latent attention", {"query_rank"})


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder in which `dense_layers` come first and `moe_layers` after them.

    query_heads, kv_heads, head_dim    grouped-query attention; with `latent` only query_heads counts
    experts, top_k, expert             routed experts of a layer, choices per token, size of one
    shared_width                       width of the shared experts; 0: none
    dense_width                        width of the gated feed-forward of a dense layer
    tied_embeddings                    the output matrix is the input embedding
    window, windowed_layers            sliding window in tokens, and the layers that have it; 0: full attention
    part_of                            layers of the model that this is a part of (`cut_model`); 0: it is whole
    other_parameters                   weights outside of routed experts, as counted; 0: they follow from the sizes
    raises                             ConfigError for sizes out of range or that contradict each other
    """

    name: str
    moe_layers: int
    hidden: int
    query_heads: int
    kv_heads: int
    head_dim: int
    experts: int
    top_k: int
    expert: ExpertShape
    vocabulary: int
    dense_layers: int = 0
    dense_width: int = 0
    shared_width: int = 0
    tied_embeddings: bool = False
    window: int = 0
    windowed_layers: int = 0
    part_of: int = 0
    other_parameters: int = 0
    latent: LatentAttention | None = None

    def __post_init__(self) -> None:
        may_be_0 = {"dense_layers", "dense_width", "shared_width", "window", "windowed_layers", "part_of"}
        may_be_0 |= {"other_parameters"}
        _check_sizes(self, f"model {self.name!r}", may_be_0)
        if self.top_k > self.experts:
            raise ConfigError(f"model {self.name!r} picks {self.top_k} of {self.experts} experts: choose fewer")
        if self.expert.hidden != self.hidden:
            raise ConfigError(
                f"model {self.name!r} has hidden {self.hidden} and experts of hidden {self.expert.hidden}: make them "
                "equal"
            )
        if self.dense_layers and not self.dense_width:
            raise ConfigError(f"model {self.name!r} has {self.dense_layers} dense layers: give dense_width too")
        if self.windowed_layers > self.layers or (self.windowed_layers and not self.window):
            raise ConfigError(
                f"model {self.name!r} has a window of {self.window} in {self.windowed_layers} of {self.layers} layers: "
                "give a window of at least 1, in at most all layers"
            )

    @property
    def layers(self) -> int:
        """Return the number of decoder layers, dense and with experts."""
        return self.dense_layers + self.moe_layers

    @property
    def attention_parameters(self) -> int:
        """Return the weights of the attention of one layer: projections, without norms and biases."""
        H, heads = self.hidden, self.query_heads
        if self.latent is None:
            return 2 * H * self.head_dim * (heads + self.kv_heads)
        latent, key = self.latent, self.latent.nope_dim + self.latent.rope_dim
        queries = H * latent.query_rank + latent.query_rank * heads * key if latent.query_rank else H * heads * key
        keys_and_values = H * (latent.kv_rank + latent.rope_dim) + latent.kv_rank * heads * (
            latent.nope_dim + latent.value_dim
        )
        return queries + keys_and_values + heads * latent.value_dim * H

    @property
    def non_expert_parameters(self) -> int:
        """Return the weights of an expert layer that every token uses: attention, router, shared experts."""
        return self.attention_parameters + self.hidden * self.experts + 3 * self.hidden * self.shared_width

    @property
    def dense_layer_parameters(self) -> int:
        """Return the weights of a layer without experts."""
        return self.attention_parameters + 3 * self.hidden * self.dense_width

    @property
    def head_parameters(self) -> int:
        """Return the weights of the output matrix."""
        return self.hidden * self.vocabulary

    @property
    def routed_parameters(self) -> int:
        """Return the weights of all routed experts."""
        return self.moe_layers * self.experts * self.expert.parameters

    @property
    def shared_parameters(self) -> int:
        """Return the weights outside of routed experts, which expert parallelism does not shard."""
        if self.other_parameters:
            return self.other_parameters
        embeddings = self.head_parameters * (1 if self.tied_embeddings else 2)
        return (
            self.moe_layers * self.non_expert_parameters + self.dense_layers * self.dense_layer_parameters + embeddings
        )

    @property
    def parameters(self) -> int:
        """Return all weights; where they follow from sizes, without norms, biases and multi-token prediction heads."""
        return self.routed_parameters + self.shared_parameters

    @property
    def active_parameters(self) -> int:
        """Return the weights that a token is multiplied with: its choices of the experts, no input embedding."""
        chosen = self.moe_layers * self.top_k * self.expert.parameters
        return chosen + self.shared_parameters - (0 if self.tied_embeddings else self.head_parameters)

    @property
    def cache_bytes_per_token(self) -> int:
        """Return the bytes of keys and values, or latents, of a token in all layers; a window makes them no smaller."""
        latent = self.latent
        values = 2 * self.kv_heads * self.head_dim if latent is None else latent.kv_rank + latent.rope_dim
        return self.layers * values * self.expert.bytes_per_value

    def score_flops(
        self, rows_S: Int[ndarray, " S"], attended_S: Int[ndarray, " S"] | None = None
    ) -> Float64[ndarray, " S"]:
        """Return forward flops of attention scores per layer, mean over layers, of each sequence.

        A causal token at position p attends to p + 1 keys, at most its window; each pair costs two flops per element
        of the key and two per element of the value, in each head.

        attended_S   squared tokens (`Demand.attended_S`), for samples that see tokens of others; None: rows squared
        """
        latent = self.latent
        width = 2 * self.head_dim if latent is None else latent.nope_dim + latent.rope_dim + latent.value_dim
        rows = rows_S.astype(np.float64)
        pairs = (rows * rows + rows if attended_S is None else attended_S + rows) / 2
        beyond = np.maximum(0.0, rows - self.window)
        windowed = np.minimum(pairs, rows * (rows + 1) / 2 - beyond * (beyond + 1) / 2)
        share = self.windowed_layers / self.layers
        return 2.0 * self.query_heads * width * (pairs * (1 - share) + windowed * share)


def _check_sizes(shape: object, owner: str, may_be_0: Set[str]) -> None:
    for field in fields(shape):  # type: ignore[arg-type]
        value, least = getattr(shape, field.name), 0 if field.name in may_be_0 else 1
        most = 40 if field.name.endswith("parameters") else 30  # 2^40 for a sum over the model, 2^30 for a size
        if field.type == "int" and not least <= value <= 1 << most:
            raise ConfigError(f"{owner} has {field.name} {value}: allowed are sizes from {least} to 2^{most}")


def model_shape(name: str) -> ModelShape:
    """Return the shape of a known model; see `MODEL_SHAPES`.

    raises    ConfigError for an unknown name

    >>> round(model_shape("qwen3-30b-a3b").parameters / 1e9, 1)
    30.5
    """
    if name not in MODEL_SHAPES:
        raise ConfigError(
            f"model {name!r} is unknown: allowed are {', '.join(MODEL_SHAPES)}; for another one give its config.json "
            "to model_shape_from_config"
        )
    return MODEL_SHAPES[name]


def cut_model(model: ModelShape, demand: Demand) -> ModelShape:
    """Return the part of a model that was routed: the layers, experts and choices per token of a demand.

    Of the rest (dense layers, layers with a window, vocabulary, other parameters) it keeps about as large a share as of
    the layers, so that shares of a step are about those of the whole model.

    >>> from relibra.routing.demand import Demand
    >>> counts_SLE = np.ones((1, 4, 256), dtype=np.int32)
    >>> demand = Demand(counts_SLE=counts_SLE, layer_ids=np.arange(4), sample_ids=np.arange(1), top_k=8)
    >>> part = cut_model(model_shape("deepseek-v3"), demand)
    >>> part.layers, part.part_of
    (4, 61)
    """
    L, E = demand.counts_SLE.shape[1:]
    dense = round(model.dense_layers * min(1.0, L / model.moe_layers))
    share = (L + dense) / model.layers
    return replace(
        model,
        moe_layers=L,
        dense_layers=dense,
        windowed_layers=round(model.windowed_layers * share),
        vocabulary=max(1, round(model.vocabulary * min(1.0, share))),
        experts=E,
        top_k=demand.top_k or model.top_k,
        part_of=(model.part_of or model.layers) if share < 1 else model.part_of,
        other_parameters=round(model.other_parameters * share),
    )


_LAYOUT_KEY = re.compile(
    r"(moe|expert|sparse|dense|mlp|attn).*_(layers?|step|freq|interval|period|offset|pattern|index|indices|types)(_|$)"
    r"|.*(block_types?|hybrid\w*pattern|kv_channels)$"
)
_READ = {
    *("mlp_layer_types", "mlp_only_layers", "moe_layers", "first_k_dense_replace", "num_dense_layers"),
    *("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval", "moe_layer_freq"),
    *("decoder_sparse_step", "interleave_moe_layer_step", "expert_layer_period", "expert_layer_offset"),
}
_SHARED_WIDTHS = (
    *("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_experts_intermediate_size"),
    *("shared_intermediate_size", "share_expert_dim"),
)
_DENSE_WIDTHS = (
    "intermediate_size_mlp",
    "prefix_dense_intermediate_size",
    "dense_intermediate_size",
    "intermediate_size",
)
_MOST_LAYERS = 10_000
_SHARED_COUNTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert")


def model_shape_from_config(config: Mapping[str, Any], name: str = "", *, moe_layers: int | None = None) -> ModelShape:
    """Read the sizes of a model from its `config.json`, as `transformers` writes it for families with experts.

    name         of the shape; "": the model type of the configuration
    moe_layers   layers with experts, where they were counted; None: as the configuration says
    raises       ConfigError when a size is missing or no whole number, the model has no experts, or a key that is not
                 read may decide which layers have them
    """
    name = name or str(config.get("model_type", "model"))
    if isinstance(config.get("text_config"), Mapping):  # of a multimodal model
        config = config["text_config"]

    def size(*keys: str, default: int | None = None) -> int:
        key = next((key for key in keys if config.get(key) is not None), "")
        value = config[key] if key else default
        if value is None:
            of_experts = any("expert" in key for key in keys)
            advice = "give that of a model with experts" if of_experts else "add it, as transformers writes it"
            raise ConfigError(f"config of {name!r} has no {' or '.join(keys)}: {advice}")
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"config of {name!r} has {key} {value!r}: it must be a whole number")
        return value

    def listed(key: str) -> list[object]:
        value = config.get(key)
        if value is not None and not isinstance(value, list | tuple):
            raise ConfigError(f"config of {name!r} has {key} {value!r}: it must be a list")
        return list(value or ())

    hidden, heads, layers = size("hidden_size"), size("num_attention_heads"), size("num_hidden_layers")
    if layers > _MOST_LAYERS:  # each is looked at
        raise ConfigError(f"config of {name!r} has num_hidden_layers {layers}: allowed are up to {_MOST_LAYERS:,}")
    width = size("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")

    def has_experts(layer: int) -> bool:
        first = max(
            size("first_k_dense_replace", "num_dense_layers", default=0), size("moe_layer_start_index", default=0)
        )
        step = size("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval", default=1)
        last, period = size("moe_layer_end_index", default=-1) % layers, size("expert_layer_period", default=1)
        return (
            first <= layer <= last
            and (layer + 1) % max(1, step) == 0
            and layer % max(1, size("moe_layer_freq", default=1)) == 0
            and layer % max(1, period) == size("expert_layer_offset", default=0) % max(1, period)
            and layer not in listed("mlp_only_layers")
        )

    if moe_layers is None:
        unread = [key for key, value in config.items() if value and key not in _READ and _LAYOUT_KEY.match(key)]
        if unread:
            raise ConfigError(
                f"config of {name!r} has {unread[0]} {config[unread[0]]!r}, which may decide what a layer holds and is "
                "not read: take the sizes of another model, or HIDDENxWIDTH of one expert"
            )
        types = listed("mlp_layer_types")
        moe_layers = len(listed("moe_layers")) or (
            sum(kind != "dense" for kind in types) if types else sum(map(has_experts, range(layers)))
        )
        off = next((key for key in ("is_moe", "enable_moe_block") if config.get(key) is False), "")
        if off:
            raise ConfigError(f"config of {name!r} has {off} false: give that of a model with experts")
    dense = layers - moe_layers
    shared = size(*_SHARED_WIDTHS, default=0) or size(*_SHARED_COUNTS, default=0) * width
    if "interleave_moe_layer_step" in config:  # Llama 4: one shared expert
        shared = width
    windowed = listed("layer_types").count("sliding_attention")
    if not 0 <= dense < layers:
        raise ConfigError(
            f"config of {name!r} has {layers} layers, {dense} of them dense, so none has experts: give that of a model "
            "with experts"
        )
    latent = None
    if config.get("kv_lora_rank"):
        latent = LatentAttention(
            query_rank=size("q_lora_rank", default=0),
            kv_rank=size("kv_lora_rank"),
            rope_dim=size("qk_rope_head_dim"),
            nope_dim=size("qk_nope_head_dim"),
            value_dim=size("v_head_dim"),
        )
    return ModelShape(
        name=name,
        moe_layers=layers - dense,
        dense_layers=dense,
        hidden=hidden,
        query_heads=heads,
        kv_heads=size("num_key_value_heads", default=heads),
        head_dim=size("head_dim", default=hidden // max(1, heads)),
        experts=size("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
        top_k=size("num_experts_per_tok", "moe_topk", "moe_top_k", "moe_k", "num_experts_per_token"),
        expert=ExpertShape(hidden=hidden, width=width),
        dense_width=size(*_DENSE_WIDTHS) if dense else 0,
        shared_width=shared,
        vocabulary=size("vocab_size"),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        window=size("sliding_window", default=0) if windowed else 0,
        windowed_layers=windowed,
        latent=latent,
    )


def counted_model_shape(
    config: Mapping[str, Any], moe_layers: int, experts: int, top_k: int, expert: ExpertShape, others: int = 0
) -> ModelShape:
    """Return the sizes of a model whose experts were counted in its weights; all others are from its `config.json`.

    moe_layers   layers with experts; the rest are dense
    top_k        0: not known, taken as 1
    others       weights outside of routed experts; 0: not counted
    raises       as `model_shape_from_config`
    """
    layers = config.get("num_hidden_layers") or moe_layers
    counted = {
        "num_hidden_layers": layers,
        "num_experts": experts,
        "num_experts_per_tok": max(1, top_k),
        "moe_intermediate_size": expert.width,
        "intermediate_size": config.get("intermediate_size") or expert.width,
    }
    shape = model_shape_from_config({**config, **counted}, moe_layers=moe_layers)
    return replace(shape, expert=expert, other_parameters=others)


def _preset(
    name: str, layers: int, heads: tuple[int, int, int], choices: tuple[int, int], vocabulary: int, **more: Any
) -> ModelShape:
    """Return a shape: layers with experts; heads (query, key, width); (experts, top k)."""
    return ModelShape(
        name=name,
        moe_layers=layers,
        hidden=EXPERT_SHAPES[name].hidden,
        query_heads=heads[0],
        kv_heads=heads[1],
        head_dim=heads[2],
        experts=choices[0],
        top_k=choices[1],
        expert=EXPERT_SHAPES[name],
        vocabulary=vocabulary,
        **more,
    )


_V3 = LatentAttention(query_rank=1536, kv_rank=512, rope_dim=64, nope_dim=128, value_dim=128)
_V2_LITE = LatentAttention(query_rank=0, kv_rank=512, rope_dim=64, nope_dim=128, value_dim=128)
MODEL_SHAPES: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        _preset("qwen3-30b-a3b", 48, (32, 4, 128), (128, 8), 151_936),
        _preset("qwen3-235b-a22b", 94, (64, 4, 128), (128, 8), 151_936),
        _preset(
            "glm4.5-106b-a12b", 45, (96, 8, 128), (128, 8), 151_552,
            dense_layers=1, dense_width=10_944, shared_width=1408,
        ),
        _preset(
            "deepseek-v3", 58, (128, 128, 192), (256, 8), 129_280,
            dense_layers=3, dense_width=18_432, shared_width=2048, latent=_V3,
        ),
        _preset(
            "deepseek-v2-lite", 26, (16, 16, 192), (64, 6), 102_400,
            dense_layers=1, dense_width=10_944, shared_width=2816, latent=_V2_LITE,
        ),
        _preset("gpt-oss-20b", 24, (64, 8, 64), (32, 4), 201_088, window=128, windowed_layers=12),
        _preset("mixtral-8x7b", 32, (32, 8, 128), (8, 2), 32_000),
    )
}  # fmt: skip
"""Sizes by name, of the models with a preset in `planning.costs.expert_shape`, from their published `config.json`."""
