"""Sequences laid end to end: who keeps them apart, who needs masks, who cannot."""

import pytest
import torch
import transformers

from relibra.errors import ConfigError
from relibra.replay.forward_cache import CACHE_NAME
from relibra.rl.model.packed_sequences import mixes_sequences, use_explicit_masks
from tests.replay.tiny_models import CONFIGS, random_tokens, tiny_model
from tests.rl.joined import VOCAB, policy_of, tiny_config

pytestmark = pytest.mark.usefixtures("group")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", [*CONFIGS])
def test_only_gpt_oss_of_the_tiny_families_needs_masks(family, dtype):
    model = tiny_model(family, dtype=dtype, num_hidden_layers=2).eval()
    assert mixes_sequences(model) == (family == "gpt_oss")
    use_explicit_masks(model, dtype)
    assert not mixes_sequences(model)


def test_masks_change_nothing_else(tmp_path):
    plain, masked = tiny_model("gpt_oss").eval(), tiny_model("gpt_oss").eval()
    use_explicit_masks(masked, torch.float32)
    tokens = random_tokens(2, 40)  # longer than the window of the sliding layers
    padded = torch.ones_like(tokens)
    padded[0, :7] = 0
    with torch.no_grad():
        for settings in ({}, {"attention_mask": padded}, {"position_ids": torch.arange(40)[None]}):
            ours, theirs = (model(input_ids=tokens, **settings) for model in (masked, plain))
            assert torch.equal(ours.logits, theirs.logits)
        step = {"input_ids": tokens[:, :1], "position_ids": torch.full((2, 1), 40)}
        ours, theirs = (model(**step, **{CACHE_NAME: model(tokens)[CACHE_NAME]}) for model in (masked, plain))
        assert torch.equal(ours.logits, theirs.logits)


def test_a_model_with_a_running_state_is_refused(tmp_path):
    changes = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8}
    config = transformers.Qwen3NextConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
        layer_types=["linear_attention", "full_attention"], linear_value_head_dim=8, **changes,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"cannot be trained: .*Qwen3NextFor.*attention-only"):
        policy_of(tiny_config(f"model.path={tmp_path / 'model'}"), tmp_path)
