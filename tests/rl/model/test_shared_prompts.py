"""Responses behind a prompt that they share attend as each does behind its own: outputs, logits and all gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import masking_utils

from relibra.rl.model import packed_sequences
from relibra.rl.model.attention_sinks import Segment
from relibra.rl.model.packed_sequences import (
    attend_packed,
    can_attend_packed,
    can_share_prompts,
    find_segments,
    sequence_of_each_token,
    use_packed_attention,
)
from tests.replay.tiny_models import CONFIGS, random_tokens, tiny_model
from tests.rl.model.test_attention_sinks import SCALE, eager, made_up
from tests.rl.model.test_attention_sinks import flash as flash_of_lengths

PIECES = st.lists(
    st.tuples(st.integers(1, 9), st.lists(st.integers(0, 9), min_size=1, max_size=4)), min_size=1, max_size=3
)
"""Tokens of a prompt, and rows of each response behind it: a response of one token has none."""


def positions_of(pieces):
    """Return the positions `[1, T]` of pieces, each prompt once."""
    ranges = [rows for p, own in pieces for rows in (range(p), *(range(p, p + n) for n in own))]
    return torch.tensor([[position for rows in ranges for position in rows]])


def rows_alone(pieces):
    """Return (rows of the prompt, rows of the response) of each response in the row of `positions_of`."""
    found, start = [], 0
    for prompt, own in pieces:
        at = start + prompt
        for rows in own:
            found.append((list(range(start, start + prompt)), list(range(at, at + rows))))
            at += rows
        start = at
    return found


def test_segments_follow_from_positions():
    assert find_segments([0, 1, 2, 0, 0, 1]) == [Segment(3, 0, 0), Segment(1, 1, 0), Segment(2, 2, 0)]
    assert find_segments([0, 1, 2, 3, 2, 2, 3]) == [Segment(4, 0, 0), Segment(1, 0, 2), Segment(2, 0, 2)]
    assert find_segments([0, 1, 1, 2]) == [Segment(2, 0, 0), Segment(2, 0, 1)]
    assert find_segments([57]) == [Segment(1, 0, 0)]
    assert find_segments([0, 7, 8, 0]) == [Segment(3, 0, 0), Segment(1, 1, 0)], "a jump is no border"


def assert_as_alone(attend, attend_alone, inputs, pieces):
    """Compare the outputs and gradients of a row with those of each response behind its own prompt, in float64."""
    weight_T = torch.linspace(-1, 1, inputs[0].shape[2], dtype=torch.float64).sin()
    output = attend(inputs)
    ours = torch.autograd.grad((output.double() * weight_T[None, :, None, None]).sum(), inputs)
    exact = [one.detach().double().requires_grad_() for one in inputs]
    total, seen = torch.zeros((), dtype=torch.float64), set()
    for prompt, own in rows_alone(pieces):
        rows = [*prompt, *own]
        expected = attend_alone([one[:, :, rows] if one.ndim == 4 else one for one in exact], len(rows))
        torch.testing.assert_close(output[:, rows].double(), expected, atol=2e-6, rtol=2e-6)
        fresh = [i for i, row in enumerate(rows) if row not in seen]  # the prompt counts once
        total = total + (expected[:, fresh] * weight_T[[rows[i] for i in fresh]][None, :, None, None]).sum()
        seen.update(rows)
    for found, wanted in zip(ours, torch.autograd.grad(total, exact), strict=True):
        torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)


@settings(max_examples=25, deadline=None)
@given(pieces=PIECES, heads=st.sampled_from([(4, 4), (4, 2), (4, 1)]), seed=st.integers(0, 9))
def test_attention_equals_that_of_each_response_alone(pieces, heads, seed):
    query, key, value, _ = made_up([positions_of(pieces).shape[1]], heads, seed=seed)
    module = nn.Module()
    module.num_key_value_groups = heads[0] // heads[1]

    def attend(inputs, positions):
        return attend_packed(module, *inputs, None, position_ids=positions, scaling=SCALE)[0]

    assert_as_alone(
        lambda inputs: attend(inputs, positions_of(pieces)),
        lambda inputs, n: attend(inputs, torch.arange(n)[None]),
        [query, key, value],
        pieces,
    )


@pytest.mark.parametrize("rows", [700, 513])
def test_responses_longer_than_a_block_attend_alike(rows):
    pieces = [(300, [5, rows])]
    inputs = made_up([positions_of(pieces).shape[1]], (2, 1))[:3]
    module = nn.Module()
    module.num_key_value_groups = 2

    def attend(inputs, positions):
        return attend_packed(module, *inputs, None, position_ids=positions, scaling=SCALE)[0]

    assert_as_alone(
        lambda inputs: attend(inputs, positions_of(pieces)),
        lambda inputs, n: attend(inputs, torch.arange(n)[None]),
        inputs,
        pieces,
    )


@settings(max_examples=25, deadline=None)
@given(pieces=PIECES, window=st.sampled_from([None, 1, 3, 8, 64]), seed=st.integers(0, 9))
def test_attention_with_sinks_and_windows_equals_too(pieces, window, seed):
    inputs = made_up([positions_of(pieces).shape[1]], seed=seed)

    def flash(inputs):
        query, key, value, sinks = inputs
        given = {"s_aux": sinks, "position_ids": positions_of(pieces), "sliding_window": window, "scaling": SCALE}
        return packed_sequences.attend_packed_with_sinks(nn.Module(), query, key, value, None, **given)[0]

    assert_as_alone(flash, lambda alone, n: eager(alone, [n], window), inputs, pieces)
    [length] = {one.shape[2] for one in inputs[:3]}
    assert flash_of_lengths(inputs, [length], window).shape == flash(inputs).shape


WINDOWS = {"mixtral_window": ("mixtral", {"sliding_window": 4}), "gpt_oss_window": ("gpt_oss", {"sliding_window": 4})}
FAMILIES = {**{name: (name, {}) for name in CONFIGS}, **WINDOWS}


def logits_of(model, tokens, position_1T):
    packed_sequences.keep_segments(position_1T, find_segments(position_1T[0].tolist()))
    return model(input_ids=tokens, position_ids=position_1T, use_cache=False).logits[0]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_models_equal_each_response_alone_with_gradients(family, packed):
    """The windows are shorter than the prompt; the reference is float64, each response alone."""
    name, changes = FAMILIES[family]
    model = tiny_model(name, num_hidden_layers=2, **changes).eval()
    if packed:
        model.set_attn_implementation("eager" if name == "gpt_oss" else "sdpa")
        if not can_attend_packed(model):
            pytest.skip("it has an attention of its own")
        use_packed_attention(model)
    elif name == "gpt_oss":
        packed_sequences.use_explicit_masks(model, torch.float32)
    assert can_share_prompts(model)
    pieces = [(7, [9, 0, 5]), (7, [3, 6])]  # equal prompts of different groups
    tokens = random_tokens(1, positions_of(pieces).shape[1])
    tokens[0, 7 + 14 : 14 + 14] = tokens[0, :7]
    logits_TV, exact = logits_of(model, tokens, positions_of(pieces)), tiny_model(name, **changes, num_hidden_layers=2)
    exact.set_experts_implementation("eager")  # grouped products know no float64
    exact.double().eval()
    weight_TV = torch.randn(logits_TV.shape, generator=torch.Generator().manual_seed(1))
    total, seen = torch.zeros((), dtype=torch.float64), set()
    for prompt, own in rows_alone(pieces):
        rows = [*prompt, *own]
        alone_NV = exact(input_ids=tokens[:, rows], use_cache=False).logits[0]
        torch.testing.assert_close(logits_TV[rows].double(), alone_NV, atol=1e-4, rtol=1e-5)
        fresh = [i for i, row in enumerate(rows) if row not in seen]
        total = total + (alone_NV[fresh] * weight_TV[[rows[i] for i in fresh]]).sum()
        seen.update(rows)
    (logits_TV * weight_TV).sum().backward()
    total.backward()
    for (at, ours), theirs in zip(model.named_parameters(), exact.parameters(), strict=True):
        if theirs.grad is not None:
            error = (ours.grad.double() - theirs.grad).norm() / theirs.grad.norm().clamp(min=1e-9)
            assert error < 1e-4, (at, float(error))


@pytest.mark.usefixtures("group")
def test_another_response_beside_it_changes_nothing():
    model = tiny_model("mixtral", sliding_window=4, num_hidden_layers=1).double().eval()
    model.set_experts_implementation("eager")  # grouped products know no float64
    model.set_attn_implementation("sdpa")
    use_packed_attention(model)
    pieces, tokens = [(6, [5, 5])], random_tokens(1, 16)
    other = tokens.clone()
    other[0, 6:11] = random_tokens(1, 5, seed=3)
    one, two = (logits_of(model, each, positions_of(pieces)) for each in (tokens, other))
    for rows in (slice(6), slice(11, None)):  # not to the bit: experts have other numbers of rows
        torch.testing.assert_close(one[rows], two[rows], atol=1e-13, rtol=0)
    assert not torch.allclose(one[6:11], two[6:11], atol=1e-2)


def _cut_off(monkeypatch, _model):
    """The masks of transformers: a response begins another sequence, without its prompt."""

    def find(positions):
        return (positions.diff(prepend=positions[:, :1] - 1) != 1).cumsum(-1)

    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", find)


def _adds_rows(_monkeypatch, model):
    """A bias by the row, as by learned positions of the row."""

    def add(_embedding, _args, output):
        return output + 0.3 * torch.arange(output.shape[1])[None, :, None].sin()

    model.get_input_embeddings().register_forward_hook(add)


def _carries_state(_monkeypatch, model):
    """A sum over all rows before, as of recurrent layers."""
    model.get_input_embeddings().register_forward_hook(lambda _module, _args, output: output.cumsum(1) / 4)


def _aligns_upper_left(monkeypatch, _model):
    """The trap of `is_causal`: with more keys than queries the first query sees the first key alone."""
    attend = nn.functional.scaled_dot_product_attention

    def upper_left(query, key, value, *, attn_mask=None, is_causal=False, **settings):
        causal = is_causal or (attn_mask is not None and query.shape[2] < key.shape[2])
        return attend(query, key, value, attn_mask=None if causal else attn_mask, is_causal=causal, **settings)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", upper_left)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("spoil", [_cut_off, _adds_rows, _carries_state, _aligns_upper_left])
def test_a_model_that_computes_otherwise_is_noticed(monkeypatch, spoil):
    model = tiny_model("mixtral", sliding_window=8, num_hidden_layers=2).eval()
    model.set_attn_implementation("sdpa")
    if spoil is _aligns_upper_left:
        model = tiny_model("qwen3_moe", num_hidden_layers=2).eval()
        use_packed_attention(model)
    assert can_share_prompts(model)
    spoil(monkeypatch, model)
    assert not can_share_prompts(model)


def test_masks_show_the_prompt_and_windows_by_position():
    positions = torch.tensor([[0, 1, 2, 3, 2, 3]])
    packed_sequences.keep_segments(positions, find_segments(positions[0].tolist()))
    sees = packed_sequences.sees_sequence(sequence_of_each_token(positions))
    rows = torch.arange(6)
    assert sees(0, 0, rows[:, None], rows[None, :]).int().tolist() == [
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 1],
        [1, 1, 0, 0, 1, 1],
    ], "causality is left to the family's own function of positions"
