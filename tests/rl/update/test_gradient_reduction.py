"""Gradients that are summed in each micro-batch, and those that wait for the last."""

from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from relibra.rl.update import gradient_reduction
from relibra.rl.update.gradient_reduction import each_micro_batch, reduces_each_micro_batch, whole_gradient_bytes
from tests.replay.tiny_models import random_tokens
from tests.rl.joined import on_ranks, policy_of, tiny_config


def test_whole_gradients_wait_where_they_are_few():
    assert not reduces_each_micro_batch(1 << 50, None), "a CPU"
    dense = 1_540_000_000 * 4 * 7 // 8  # Qwen3-30B-A3B on 8 ranks: all but the experts
    assert [reduces_each_micro_batch(dense, gigabytes * 10**9) for gigabytes in (80, 141)] == [True, False]
    assert not each_micro_batch(nn.Linear(2, 2))
    assert whole_gradient_bytes(nn.Linear(2, 2)) == 0


def accumulate(folder):
    """Return the gradients of two micro-batches, summed once and in each, and whether they were."""
    found = {}
    for dtype in ("float32", "bfloat16"):
        for memory in (None, 1):
            model = policy_of(tiny_config(f"model.dtype={dtype}", ranks=2), folder).trained
            assert whole_gradient_bytes(model) > 0
            decide = partial(reduces_each_micro_batch, device_bytes=memory)
            with mock.patch.object(gradient_reduction, "reduces_each_micro_batch", lambda size, _, f=decide: f(size)):
                each = each_micro_batch(model)
            assert each == (memory is not None)
            for number in range(3):
                model.set_requires_gradient_sync(each or number == 2)
                tokens = random_tokens(1, 9, seed=2 * number + dist.get_rank())
                model(input_ids=tokens, use_cache=False).logits.float().square().mean().backward()
            found[dtype, each] = {name: one.grad.to_local().clone() for name, one in model.named_parameters()}
    return found


@pytest.mark.slow
def test_gradients_summed_in_each_micro_batch_are_the_same(tmp_path):
    for found in on_ranks(2, accumulate, tmp_path):
        for dtype in ("float32", "bfloat16"):
            for name, gradient in found[dtype, False].items():
                torch.testing.assert_close(found[dtype, True][name], gradient, rtol=1e-5, atol=1e-6, msg=name)
