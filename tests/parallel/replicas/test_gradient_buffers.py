"""Memory for gradients that come home is allocated once, and is nobody else's while something arrives in it."""

import torch

from relibra.parallel.replicas.gradient_buffers import GradientBuffers


def made():
    return GradientBuffers({"up": torch.ones(2, 3, 4, dtype=torch.bfloat16), "down": torch.ones(2, 4)})


def test_what_is_given_back_is_used_again():
    buffers = made()
    first = buffers.take("up", torch.float32)
    assert (first.shape, first.dtype) == ((3, 4), torch.float32)
    buffers.give_back("up", [first])
    assert buffers.take("up", torch.float32) is first


def test_what_is_taken_is_nobody_elses():
    buffers = made()
    taken = [buffers.take("up", torch.bfloat16) for _ in range(3)]
    assert len({gradient.data_ptr() for gradient in taken}) == 3
    buffers.give_back("up", taken[:1])
    others = [
        buffers.take("down", torch.float32),
        buffers.take("up", torch.float32),
        buffers.take("up", torch.bfloat16),
    ]
    assert others[2] is taken[0]
    assert not {gradient.data_ptr() for gradient in others[:2]} & {gradient.data_ptr() for gradient in taken}


def test_zeros_are_one_gradient_that_is_never_taken():
    buffers = made()
    zeros = buffers.zeros("up")
    assert zeros is buffers.zeros("up")
    assert zeros.dtype == torch.bfloat16
    taken = buffers.take("up", torch.bfloat16).fill_(1)
    buffers.give_back("up", [taken])
    assert not zeros.any()


def test_cleared_room_keeps_nothing():
    buffers = made()
    first = buffers.take("up", torch.float32)
    buffers.give_back("up", [first])
    buffers.clear()
    assert buffers.take("up", torch.float32) is not first
