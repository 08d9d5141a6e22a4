import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relibra import ConfigError, Demand
from relibra.planning.costs.expert_shape import EXPERT_SHAPES, ExpertShape
from relibra.simulation import MODEL_SHAPES, counted_model_shape, cut_model, model_shape, model_shape_from_config
from tests.simulation.steps import random_step

PUBLISHED = {  # billions of weights, all and active, as the models' own pages say
    "qwen3-30b-a3b": (30.5, 3.3),
    "qwen3-235b-a22b": (235, 22),
    "glm4.5-106b-a12b": (106, 12),
    "deepseek-v3": (671, 37),
    "deepseek-v2-lite": (15.7, 2.4),
    "gpt-oss-20b": (20.9, 3.6),
    "mixtral-8x7b": (46.7, 12.9),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_weights_of_known_models_add_up(name):
    total, active = PUBLISHED[name]
    assert model_shape(name).parameters / 1e9 == pytest.approx(total, rel=0.01)
    assert model_shape(name).active_parameters / 1e9 == pytest.approx(active, rel=0.1)  # some count the embedding too


def test_every_known_expert_has_its_model():
    assert MODEL_SHAPES.keys() == EXPERT_SHAPES.keys() == PUBLISHED.keys()
    for name, shape in MODEL_SHAPES.items():
        assert shape.expert is EXPERT_SHAPES[name]
        assert shape.name == name


def test_a_cache_of_latents_is_small():
    assert model_shape("qwen3-30b-a3b").cache_bytes_per_token == 48 * 2 * 4 * 128 * 2
    assert model_shape("deepseek-v3").cache_bytes_per_token == 61 * (512 + 64) * 2


def test_a_config_json_gives_the_same_shape():
    qwen = {
        "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "intermediate_size": 6144, "vocab_size": 151_936, "mlp_only_layers": [],
        "max_position_embeddings": 40_960, "tie_word_embeddings": False, "sliding_window": None,
    }  # fmt: skip
    assert model_shape_from_config(qwen, "qwen3-30b-a3b") == model_shape("qwen3-30b-a3b")
    deepseek = {
        "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
        "num_key_value_heads": 128, "head_dim": 192, "n_routed_experts": 256, "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048, "intermediate_size": 18_432, "vocab_size": 129_280, "n_shared_experts": 1,
        "first_k_dense_replace": 3, "max_position_embeddings": 163_840, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    }  # fmt: skip
    assert model_shape_from_config(deepseek, "deepseek-v3") == model_shape("deepseek-v3")
    gpt_oss = {
        "model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4,
        "intermediate_size": 2880, "vocab_size": 201_088, "max_position_embeddings": 131_072, "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
    }  # fmt: skip
    assert model_shape_from_config(gpt_oss, "gpt-oss-20b") == model_shape("gpt-oss-20b")
    with pytest.raises(ConfigError, match="config of 'llama' has no num_experts or num_local_experts"):
        model_shape_from_config({**qwen, "model_type": "llama", "num_experts": None})
    with pytest.raises(ConfigError, match="has no vocab_size: add it"):
        model_shape_from_config({name: value for name, value in qwen.items() if name != "vocab_size"})
    with pytest.raises(ConfigError, match="24 layers, 24 of them dense, so none has experts"):
        model_shape_from_config({**gpt_oss, "first_k_dense_replace": 24})
    assert model_shape_from_config({"text_config": gpt_oss}, "gpt-oss-20b") == model_shape("gpt-oss-20b")


SMALL = {
    "model_type": "small", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 8, "vocab_size": 100,
    "moe_intermediate_size": 32, "intermediate_size": 96, "num_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "moe_layers", "dense_width", "shared_width"),
    [
        ({"decoder_sparse_step": 2}, 4, 96, 0),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1, 2]}, 3, 96, 0),
        ({"interleave_moe_layer_step": 2, "intermediate_size_mlp": 128}, 4, 128, 32),
        ({"moe_layers": [3, 7], "interleave_moe_layer_step": 4, "intermediate_size_mlp": 128}, 2, 128, 32),
        ({"moe_layer_start_index": 2, "moe_layer_end_index": 5, "moe_layer_interval": 1}, 4, 96, 0),
        ({"moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 3}, 2, 96, 0),
        ({"first_k_dense_replace": 2, "moe_layer_freq": 2, "n_shared_experts": 2}, 3, 96, 64),
        ({"expert_layer_period": 2, "expert_layer_offset": 1}, 4, 96, 0),
        ({"num_dense_layers": 3, "num_shared_experts": 1}, 5, 96, 32),
        ({"mlp_layer_types": ["dense"] * 3 + ["sparse"] * 5, "moe_num_shared_experts": 1}, 5, 96, 32),
        ({"shared_intermediate_size": 48}, 8, 0, 48),
    ],
)
def test_layers_with_experts_are_those_of_the_family(keys, moe_layers, dense_width, shared_width):
    shape = model_shape_from_config(SMALL | keys)
    assert (shape.moe_layers, shape.dense_layers) == (moe_layers, 8 - moe_layers)
    assert (shape.dense_width, shape.shared_width) == (dense_width, shared_width)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"attn_layer_period": 8}, "has attn_layer_period 8, which may decide what a layer holds and is not read"),
        ({"layers_block_type": ["mamba", "moe"]}, "has layers_block_type"),
        ({"hybrid_override_pattern": "M*E"}, r"has hybrid_override_pattern 'M\*E'"),
        ({"is_moe": False}, "has is_moe false: give that of a model with experts"),
        ({"enable_moe_block": False}, "has enable_moe_block false"),
        ({"decoder_sparse_step": 9}, "8 layers, 8 of them dense"),
    ],
)
def test_layouts_that_are_not_read_are_refused_by_name(keys, said):
    with pytest.raises(ConfigError, match=said):
        model_shape_from_config(SMALL | keys)


def test_weights_that_were_counted_go_before_sizes():
    shape = counted_model_shape(SMALL | {"attn_layer_period": 8}, 8, 8, 2, ExpertShape(hidden=64, width=32), 12_345)
    assert shape.shared_parameters == 12_345
    assert shape.parameters == 8 * 8 * 3 * 64 * 32 + 12_345
    assert cut_model(shape, routed(4, 8, 2)).shared_parameters == round(12_345 / 2)


VARIED = ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval", "first_k_dense_replace")
"""Keys that are also tried as 2."""


def counted_families():
    """Yield each causal family of transformers with experts, its configuration, and its counted weights."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as FAMILIES

    for family, varied in itertools.product(sorted(FAMILIES), ("", *VARIED)):
        try:
            config = CONFIG_MAPPING[family](**{varied: 2} if varied else {})
            text = config.get_text_config().to_dict()
            if not any("expert" in key for key in text) or (
                varied and varied not in CONFIG_MAPPING[family]().to_dict()
            ):
                continue
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config)
        except Exception:  # noqa: BLE001 - defaults that build no model
            continue
        experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
        yield f"{family} {varied}", text, sum(p.numel() for p in model.parameters()), experts


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_sizes_of_all_causal_families_are_those_of_the_models():
    right, wrong, refused = [], {}, []
    for name, config, total, experts in counted_families():
        try:
            shape = model_shape_from_config(config)
        except ConfigError:
            refused.append(name)
            continue
        off = shape.parameters / total - 1, shape.routed_parameters / max(1, experts) - 1
        (right.append(name) if abs(off[0]) < 0.04 and abs(off[1]) < 0.01 else wrong.update({name: off}))
    assert not wrong
    assert len(right) > 40
    assert len(refused) < 15, refused


@pytest.mark.slow
def test_a_real_config_of_transformers_can_be_read():
    from transformers import MixtralConfig

    shape = model_shape_from_config(MixtralConfig().to_dict(), "mixtral-8x7b")
    assert replace(shape, vocabulary=32_000) == model_shape("mixtral-8x7b")


@given(st.integers(0, 40), st.integers(0, 12))
def test_scores_count_pairs_of_a_token_and_the_tokens_it_sees(rows, window):
    plan, _, _, model = random_step(0, layers=2)
    model = replace(model, moe_layers=2, window=window, windowed_layers=1 if window else 0)
    full = sum(p + 1 for p in range(rows))
    seen = sum(min(p + 1, window) for p in range(rows)) if window else full
    flops = 2 * 2 * (2 + 2) * (full + seen) / 2  # 2 heads, keys and values of 2, mean over two layers
    assert model.score_flops(np.array([rows]))[0] == pytest.approx(flops)
    assert len(plan.layer_ids) == 2


def routed(layers, experts, top_k):
    counts_SLE = np.ones((2, layers, experts), dtype=np.int32)
    return Demand(counts_SLE=counts_SLE, layer_ids=np.arange(layers), sample_ids=np.arange(2), top_k=top_k)


@pytest.mark.parametrize("name", MODEL_SHAPES)
def test_a_part_of_a_model_keeps_the_shares_of_the_whole_one(name):
    whole = model_shape(name)
    assert cut_model(whole, routed(whole.moe_layers, whole.experts, whole.top_k)) == whole
    for layers in (1, 4, whole.moe_layers // 2):
        cut = cut_model(whole, routed(layers, whole.experts, whole.top_k))
        assert cut.moe_layers == layers
        assert cut.head_parameters / cut.layers == pytest.approx(whole.head_parameters / whole.layers, rel=0.01)
        assert cut.dense_layers == pytest.approx(whole.dense_layers * layers / whole.moe_layers, abs=0.5)
        assert cut.windowed_layers == pytest.approx(whole.windowed_layers * layers / whole.moe_layers, abs=0.5)
        assert cut.part_of == whole.layers
        again = cut_model(cut, routed(1, whole.experts, whole.top_k))
        assert (again.layers, again.part_of) == (1, whole.layers)


def test_routes_say_which_experts_and_how_many_layers_there_are():
    model = cut_model(model_shape("gpt-oss-20b"), routed(4, 16, 2))
    assert (model.experts, model.top_k, model.windowed_layers) == (16, 2, 2)
    more = cut_model(model_shape("gpt-oss-20b"), routed(48, 32, None))
    assert (more.moe_layers, more.windowed_layers, more.top_k) == (48, 24, 4)
    assert more.vocabulary == model_shape("gpt-oss-20b").vocabulary
    assert more.part_of == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_attention_heads": 0}, "has query_heads 0: allowed are sizes from 1 to"),
        ({"layer_types": 3}, "has layer_types 3: it must be a list"),
        ({"mlp_only_layers": 2}, "has mlp_only_layers 2: it must be a list"),
        ({"num_experts": "8"}, "has num_experts '8': it must be a whole number"),
        ({"kv_lora_rank": 8, "q_lora_rank": "a"}, "has q_lora_rank 'a': it must be a whole number"),
        ({"kv_lora_rank": 8, "qk_rope_head_dim": -1}, "latent attention has rope_dim -1"),
    ],
)
def test_damaged_configs_get_a_sentence(change, message):
    config = {
        "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "moe_intermediate_size": 32,
        "num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 100, "max_position_embeddings": 128,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    }  # fmt: skip
    assert model_shape_from_config(config).moe_layers == 2
    with pytest.raises(ConfigError, match=message):
        model_shape_from_config(config | change)


def test_impossible_shapes_are_refused():
    shape = model_shape("mixtral-8x7b")
    with pytest.raises(ConfigError, match=r"model .gpt-5. is unknown: allowed are qwen3-30b-a3b, .* model_shape_from"):
        model_shape("gpt-5")
    with pytest.raises(ConfigError, match="has hidden 0"):
        replace(shape, hidden=0)
    with pytest.raises(ConfigError, match="picks 9 of 8 experts: choose fewer"):
        replace(shape, top_k=9)
    with pytest.raises(ConfigError, match="experts of hidden 5: make them equal"):
        replace(shape, expert=ExpertShape(hidden=5, width=1))
    with pytest.raises(ConfigError, match="has 2 dense layers: give dense_width too"):
        replace(shape, dense_layers=2)
    with pytest.raises(ConfigError, match="a window of 0 in 3 of 32 layers"):
        replace(shape, windowed_layers=3)
