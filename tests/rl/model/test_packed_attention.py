"""Sequences laid end to end attend one by one: the same outputs and gradients as with a mask, in less work."""

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from relibra.replay.forward_cache import CACHE_NAME
from relibra.rl.model.packed_sequences import (
    PACKED,
    attend_packed,
    can_attend_packed,
    mixes_sequences,
    packed_mask,
    use_packed_attention,
)
from tests.replay.tiny_models import CONFIGS, random_tokens, tiny_model

pytestmark = pytest.mark.usefixtures("group")

PACKS = ("qwen3_moe", "mixtral", "deepseek_v3")
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def _positions(lengths):
    return torch.cat([torch.arange(length) for length in lengths])[None]


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    heads=st.sampled_from([(4, 4), (4, 2), (4, 1)]),
    seed=st.integers(0, 99),
)
def test_it_equals_attention_under_a_mask_over_all_pairs(lengths, heads, seed):
    torch.manual_seed(seed)
    query, key, value = (torch.randn(1, h, sum(lengths), 8) for h in (heads[0], heads[1], heads[1]))
    sequence_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    mask_TT = (sequence_T[:, None] == sequence_T) & torch.ones(sum(lengths), sum(lengths), dtype=torch.bool).tril()
    groups = heads[0] // heads[1]
    repeated = [one.repeat_interleave(groups, dim=1) for one in (key, value)]
    expected = scaled_dot_product_attention(query, *repeated, attn_mask=mask_TT, scale=0.3).transpose(1, 2)
    module = torch.nn.Module()
    module.num_key_value_groups = groups
    output, weights = attend_packed(module, query, key, value, None, position_ids=_positions(lengths), scaling=0.3)
    assert weights is None
    assert output.shape == expected.shape
    torch.testing.assert_close(output, expected)


def assert_same_passes(masked, packed, lengths):
    """Compare logits and gradients of two models on packed sequences of these lengths; norms alone are in float32."""
    for model in (masked, packed):
        model.double().set_experts_implementation("eager")  # grouped products know no float64
    tokens, positions = random_tokens(1, sum(lengths)), _positions(lengths)
    outputs = [model(input_ids=tokens, position_ids=positions, use_cache=False).logits for model in (masked, packed)]
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-5)
    for logits in outputs:
        logits.square().sum().backward()
    for (name, ours), (_, theirs) in zip(packed.named_parameters(), masked.named_parameters(), strict=True):
        torch.testing.assert_close(
            ours.grad, theirs.grad, atol=2e-4, rtol=2e-4, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("family", PACKS)
def test_models_give_the_same_logits_and_gradients(family):
    masked, packed = tiny_model(family), tiny_model(family)
    use_packed_attention(packed)
    assert packed.config._attn_implementation == PACKED
    assert_same_passes(masked, packed, [5, 1, 17, 8])


@pytest.mark.parametrize("family", [*CONFIGS])
def test_a_family_that_attends_in_its_own_way_keeps_it(family):
    model = tiny_model(family, num_hidden_layers=2).eval()
    before = model.config._attn_implementation
    assert can_attend_packed(model) == (before == "sdpa" or family == "gpt_oss")
    assert model.config._attn_implementation == before
    if can_attend_packed(model):
        use_packed_attention(model)
        assert not mixes_sequences(model)


@pytest.mark.parametrize("name", ["GPTBigCode", "Persimmon", "CTRL", "Moshi"])
def test_family_whose_attention_gets_no_positions_keeps_its_mask(name):
    """Its mask is made from positions and keeps sequences apart; without the mask nothing would."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{name}Config")(**SIZES)).eval()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.data.normal_(std=0.3)
    assert model.config._attn_implementation == "sdpa"
    assert not mixes_sequences(model)
    assert not can_attend_packed(model)
    use_packed_attention(model)
    assert mixes_sequences(model)


@pytest.mark.parametrize("broken", ["packed attention lets the second sequence see the first", "its scale is wrong"])
def test_packed_attention_that_goes_wrong_is_noticed(monkeypatch, broken):
    def attend(*arguments, position_ids=None, **settings):
        if "scale" in broken:
            return attend_packed(*arguments, position_ids=position_ids, **{**settings, "scaling": 0.9})
        return attend_packed(*arguments, position_ids=torch.arange(position_ids.shape[1])[None], **settings)

    monkeypatch.setitem(AttentionInterface._global_mapping, PACKED, attend)
    assert not can_attend_packed(tiny_model("qwen3_moe").eval())


@pytest.mark.parametrize("family", PACKS)
def test_padded_rows_and_rows_with_a_cache_are_treated_as_before(family):
    plain, packed = tiny_model(family).eval(), tiny_model(family).eval()
    plain.set_attn_implementation("sdpa")
    use_packed_attention(packed)
    tokens = random_tokens(3, 12)
    padding = torch.ones_like(tokens)
    padding[0, :4] = 0
    with torch.no_grad():
        for extra in ({}, {"attention_mask": padding}):
            ours, theirs = (model(input_ids=tokens, **extra).logits for model in (packed, plain))
            assert torch.equal(ours, theirs)
        caches = [model(input_ids=tokens[:1], use_cache=True)[CACHE_NAME] for model in (packed, plain)]
        steps = [
            model(input_ids=tokens[:1, :1], **{CACHE_NAME: cache}).logits
            for model, cache in zip((packed, plain), caches, strict=True)
        ]
        torch.testing.assert_close(*steps, atol=1e-6, rtol=1e-5)


def test_layers_with_a_window_keep_their_mask():
    plain, packed = (tiny_model("mixtral", sliding_window=4, num_hidden_layers=2).eval() for _ in range(2))
    use_packed_attention(packed)
    tokens, positions = random_tokens(1, 24), _positions([10, 14])
    with torch.no_grad():
        ours, theirs = (
            model(input_ids=tokens, position_ids=positions, use_cache=False).logits for model in (packed, plain)
        )
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert packed_mask(1, 24, 24, local_size=4) is not None
    assert packed_mask(1, 24, 24) is None
