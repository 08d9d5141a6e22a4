"""Attention with sinks by flash attention: equal to eager attention, gradients of the sinks too, without its scores."""

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AttentionInterface
from transformers.masking_utils import (
    and_masks,
    eager_mask,
    packed_sequence_mask_function,
    sliding_window_causal_mask_function,
)
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from relibra.replay.forward_cache import CACHE_NAME
from relibra.rl.model.attention_sinks import attend_with_sinks
from relibra.rl.model.packed_sequences import (
    LENGTH,
    PACKED_SINKS,
    attend_packed_with_sinks,
    can_attend_packed,
    last_logits,
    mixes_sequences,
    same_logits,
    segment_rows,
    segments_of,
    use_explicit_masks,
    use_packed_attention,
)
from tests.replay.tiny_models import random_tokens, tiny_model
from tests.rl.model.test_packed_attention import assert_same_passes

SCALE = 0.3
NAMES = ("query", "key", "value", "sinks")


def made_up(lengths, heads=(4, 2), size=8, dtype=torch.float32, device="cpu", seed=0):
    """Return query, key, value `[1, heads, T, size]` and sinks, which all want gradients."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1, number, sum(lengths), size) for number in (heads[0], heads[1], heads[1])]
    drawn = [torch.randn(shape, generator=generator) for shape in (*shapes, heads[:1])]
    return [one.to(device, dtype).requires_grad_() for one in drawn]


def positions_of(lengths, device="cpu"):
    return torch.cat([torch.arange(length) for length in lengths])[None].to(device)


def segments_and_rows(lengths, device="cpu"):
    """Return where sequences of these lengths are, for `attend_with_sinks`."""
    positions = positions_of(lengths, device)
    return {"segments": segments_of(positions), "rows": segment_rows(positions)}


def eager(inputs, lengths, window):
    """Return what gpt-oss computes in transformers from all scores: `[1, T, heads, size]`."""
    query, key, value, sinks = inputs
    module = torch.nn.Module()
    module.num_key_value_groups, module.sinks = query.shape[1] // key.shape[1], sinks
    of_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None].to(query.device)
    seen = sliding_window_causal_mask_function(window or sum(lengths))
    seen = and_masks(seen, packed_sequence_mask_function(of_T))
    mask = eager_mask(1, sum(lengths), sum(lengths), mask_function=seen, dtype=query.dtype, device=query.device)
    return eager_attention_forward(module, query, key, value, mask, scaling=SCALE)[0]


def flash(inputs, lengths, window):
    """Return the same by the function of packed sequences."""
    query, key, value, sinks = inputs
    positions = positions_of(lengths, query.device)
    given = {"s_aux": sinks, "position_ids": positions, "sliding_window": window, "scaling": SCALE}
    return attend_packed_with_sinks(torch.nn.Module(), query, key, value, None, **given)[0]


def with_gradients(attend, inputs, lengths, window):
    """Return output and gradients, in float64."""
    output = attend(inputs, lengths, window)
    weight = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).sin().view_as(output)
    found = torch.autograd.grad(output, inputs, weight.to(output))
    return [output.detach().double(), *(one.double() for one in found)]


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    heads=st.sampled_from([(4, 4), (4, 2), (4, 1)]),
    window=st.sampled_from([None, 1, 3, 8, 64]),
    seed=st.integers(0, 99),
)
def test_it_equals_eager_attention_with_all_gradients(lengths, heads, window, seed):
    inputs = made_up(lengths, heads, seed=seed)
    exact = with_gradients(eager, [one.detach().double().requires_grad_() for one in inputs], lengths, window)
    for name, ours, expected in zip(
        ("output", *NAMES), with_gradients(flash, inputs, lengths, window), exact, strict=True
    ):
        assert (ours - expected).abs().max() <= 1e-6 * max(1.0, expected.abs().max()), name


def test_blocks_of_long_sequences_equal_eager_attention():
    """Longer than a block, and with a window that is no part of one."""
    for window in (None, 600, 130):
        inputs = made_up([700, 3, 650], (2, 1))
        exact = with_gradients(eager, [one.detach().double().requires_grad_() for one in inputs], [700, 3, 650], window)
        for ours, expected in zip(with_gradients(flash, inputs, [700, 3, 650], window), exact, strict=True):
            assert (ours - expected).abs().max() <= 2e-6 * max(1.0, expected.abs().max())


@pytest.mark.parametrize("window", [None, 16])
def test_in_bfloat16_it_is_as_exact_as_eager_attention(window):
    lengths = [90, 7, 40]
    inputs = made_up(lengths, size=16, dtype=torch.bfloat16)
    exact = with_gradients(eager, [one.detach().double().requires_grad_() for one in inputs], lengths, window)
    by_eager, by_flash = (with_gradients(attend, inputs, lengths, window) for attend in (eager, flash))
    for name, ours, theirs, expected in zip(("output", *NAMES), by_flash, by_eager, exact, strict=True):
        error, allowed = (float((one - expected).norm() / expected.norm()) for one in (ours, theirs))
        assert error <= max(1.2 * allowed, 0.008), (name, error, allowed)


@pytest.mark.parametrize("window", [None, 32])
def test_nothing_as_large_as_the_scores_is_kept(window):
    saved = []
    inputs = made_up([1024], (8, 2))
    with torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(one.untyped_storage().nbytes()) or one, id):
        flash(inputs, [1024], window)
    assert max(saved) <= 8 * 1024 * 8 * 4  # heads, tokens and values of a head in float32


def test_a_sinks_gradient_is_minus_its_share_of_the_output():
    """With one key, y = v p: dy/ds = -p (1 - p) v."""
    query, key, value, sinks = made_up([1], (1, 1))
    output = attend_with_sinks(query[0], key[0], value[0], sinks, **segments_and_rows([1]), window=None, scale=SCALE)
    output.sum().backward()
    share = torch.sigmoid((query * key).sum() * SCALE - sinks)
    torch.testing.assert_close(output[0, 0], value[0, 0, 0] * share)
    torch.testing.assert_close(sinks.grad, -share * (1 - share) * value.sum())


@pytest.mark.usefixtures("group")
def test_models_give_the_same_logits_and_gradients():
    masked, packed = tiny_model("gpt_oss"), tiny_model("gpt_oss")
    use_explicit_masks(masked, torch.float64)
    assert can_attend_packed(packed)
    use_packed_attention(packed)
    assert packed.config._attn_implementation == PACKED_SINKS
    assert not mixes_sequences(packed)
    assert_same_passes(masked, packed, [5, 1, 40, 18])  # the window has 16 tokens


def test_padded_rows_and_rows_with_a_cache_are_as_before():
    plain, packed = tiny_model("gpt_oss").eval(), tiny_model("gpt_oss").eval()
    use_packed_attention(packed)
    tokens = random_tokens(3, 40)
    padding = torch.ones_like(tokens)
    padding[0, :4] = 0
    with torch.no_grad():
        for extra in ({}, {"attention_mask": padding}):
            ours, theirs = (model(input_ids=tokens, **extra).logits for model in (packed, plain))
            torch.testing.assert_close(ours[padding > 0], theirs[padding > 0], atol=1e-5, rtol=1e-5)
        caches = [model(input_ids=tokens[:1], use_cache=True)[CACHE_NAME] for model in (packed, plain)]
        steps = [
            model(input_ids=tokens[:1, :2], **{CACHE_NAME: cache}).logits
            for model, cache in zip((packed, plain), caches, strict=True)
        ]
        torch.testing.assert_close(*steps, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("broken", ["s_aux", "scaling", "position_ids"])
def test_attention_that_goes_wrong_is_noticed(monkeypatch, broken):
    wrong = {"s_aux": torch.zeros(4), "scaling": 0.9, "position_ids": torch.arange(12)[None]}

    def attend(*arguments, **given):
        size = arguments[1].shape[2]
        change = wrong[broken][:, :size] if broken == "position_ids" else wrong[broken]
        return attend_packed_with_sinks(*arguments, **{**given, broken: change})

    monkeypatch.setitem(AttentionInterface._global_mapping, PACKED_SINKS, attend)
    model = tiny_model("gpt_oss").eval()
    for layer in model.model.layers:
        layer.self_attn.sinks.data.fill_(3.0)
    assert not can_attend_packed(model)
    assert model.config._attn_implementation == "eager"


@pytest.mark.usefixtures("group")
def test_rounding_that_grows_over_layers_changes_no_attention():
    """In bfloat16, with random weights: the largest of many logits moves far by rounding in each layer."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 1, "num_key_value_heads": 1}
    config = transformers.GptOssConfig(num_hidden_layers=24, vocab_size=50_000, **sizes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    own = last_logits(model, (2, range(LENGTH)))
    assert can_attend_packed(model)
    use_packed_attention(model)
    assert not same_logits(model, own, last_logits(model, (2, range(LENGTH))))


@pytest.mark.usefixtures("group")
def test_a_family_that_passes_no_sinks_keeps_its_attention(monkeypatch):
    def attend(*arguments, s_aux=None, **given):
        return attend_packed_with_sinks(*arguments, **given)

    monkeypatch.setitem(AttentionInterface._global_mapping, PACKED_SINKS, attend)
    assert not can_attend_packed(tiny_model("gpt_oss").eval())
