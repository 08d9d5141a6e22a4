"""Attention with sinks by the GPU's flash attention: packed sequences, windows, gradients; bfloat16, as in training."""

import pytest
import torch

from relibra.rl.model.attention_sinks import attend_with_sinks
from relibra.rl.model.packed_sequences import (
    PACKED_SINKS,
    can_attend_packed,
    mixes_sequences,
    packed_mask,
    use_explicit_masks,
    use_packed_attention,
)
from tests.replay.tiny_models import random_tokens, tiny_model
from tests.rl.joined import alone
from tests.rl.model.test_attention_sinks import (
    NAMES,
    eager,
    flash,
    made_up,
    positions_of,
    segments_and_rows,
    with_gradients,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")

LENGTHS = (1000, 1, 37, 128, 515)
GPT_OSS = {"heads": (64, 8), "size": 64}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 128, 1, 4096])
def test_it_is_as_exact_as_eager_attention(window, dtype):
    inputs = made_up(LENGTHS, **GPT_OSS, dtype=dtype, device="cuda")
    exact = with_gradients(eager, [one.detach().double().requires_grad_() for one in inputs], LENGTHS, window)
    by_eager, by_flash = (with_gradients(attend, inputs, LENGTHS, window) for attend in (eager, flash))
    for name, ours, theirs, expected in zip(("output", *NAMES), by_flash, by_eager, exact, strict=True):
        error, allowed = (float((one - expected).norm() / expected.norm()) for one in (ours, theirs))
        print(f"window {window}, {dtype}, {name}: flash {error:.2e}, eager {allowed:.2e}")
        assert error <= max(1.3 * allowed, 0.006), (name, error, allowed)  # 1.28 for queries that see themselves alone


@pytest.mark.parametrize("window", [None, 128])
def test_packed_sequences_equal_each_alone(window):
    inputs = made_up(LENGTHS, **GPT_OSS, dtype=torch.bfloat16, device="cuda")
    together, start = flash(inputs, LENGTHS, window), 0
    for length in LENGTHS:
        rows = slice(start, start + length)
        alone = flash([*(one[:, :, rows] for one in inputs[:3]), inputs[3]], (length,), window)
        torch.testing.assert_close(together[:, rows], alone, rtol=0, atol=0)
        start += length


@pytest.mark.parametrize("window", [None, 128])
def test_memory_grows_with_tokens_and_not_with_their_square(window):
    tokens = 16384
    inputs = made_up([tokens], **GPT_OSS, dtype=torch.bfloat16, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    flash(inputs, [tokens], window).sum().backward()
    grown = torch.cuda.max_memory_allocated() - before
    query_bytes = inputs[0].numel() * 2
    print(f"window {window}: {grown / query_bytes:.1f} times the queries")
    assert grown <= 16 * query_bytes, grown  # all scores of one head in bfloat16 alone are 4 times the queries


@pytest.mark.parametrize("window", [None, 128])
def test_the_host_does_not_wait(window):
    query, key, value, sinks = made_up(LENGTHS, **GPT_OSS, dtype=torch.bfloat16, device="cuda")
    where = segments_and_rows(LENGTHS, "cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        output = attend_with_sinks(query[0], key[0], value[0], sinks, **where, window=window, scale=0.125)
        output.backward(torch.ones_like(output))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.isfinite(one.grad).all() for one in (query, key, value, sinks))


def test_models_give_the_same_logits_and_gradients():
    lengths = [5, 1, 40, 18]
    masked, packed = (tiny_model("gpt_oss", dtype=torch.bfloat16).to("cuda") for _ in range(2))
    use_explicit_masks(masked, torch.bfloat16)
    with alone():
        assert can_attend_packed(packed)
        use_packed_attention(packed)
        assert packed.config._attn_implementation == PACKED_SINKS
        assert not mixes_sequences(packed)
    tokens, positions = random_tokens(1, sum(lengths)).to("cuda"), positions_of(lengths, "cuda")
    exact = tiny_model("gpt_oss", dtype=torch.bfloat16).float().to("cuda")
    use_explicit_masks(exact, torch.float32)
    sinks = []
    for model in (exact, masked, packed):
        logits = model(input_ids=tokens, position_ids=positions, use_cache=False).logits.float()
        logits.square().sum().backward()
        sinks.append((logits.detach(), model.model.layers[0].self_attn.sinks.grad.float()))
    for expected, theirs, ours in zip(*sinks, strict=True):
        # Most tokens: some change their expert by rounding.
        errors = [float((one - expected).abs().median() / expected.std()) for one in (ours, theirs)]
        assert errors[0] <= max(1.5 * errors[1], 0.05), errors


def test_float32_keeps_masks():
    """The kernel takes half precision only."""
    given = {"device": torch.device("cuda"), "sinks": True}
    assert packed_mask(1, 8, 8, dtype=torch.bfloat16, **given) is None
    assert packed_mask(1, 8, 8, dtype=torch.float32, **given).shape == (1, 1, 8, 8)
    model = tiny_model("gpt_oss").to("cuda")
    use_explicit_masks(model, torch.float32)
    tokens, positions = random_tokens(1, 40).to("cuda"), positions_of([17, 23], "cuda")
    with torch.no_grad():
        before = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
        use_packed_attention(model)
        after = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(after, before, atol=1e-4, rtol=1e-4)
