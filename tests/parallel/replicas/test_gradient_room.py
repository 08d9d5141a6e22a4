"""Memory for gradients that come home is allocated once, and is nobody else's while something arrives in it."""

import torch

from relibra.parallel.replicas.gradient_room import GradientRoom


def made():
    return GradientRoom({"up": torch.ones(2, 3, 4, dtype=torch.bfloat16), "down": torch.ones(2, 4)})


def test_what_is_given_back_is_used_again():
    room = made()
    first = room.take("up", torch.float32)
    assert (first.shape, first.dtype) == ((3, 4), torch.float32)
    room.give_back("up", [first])
    assert room.take("up", torch.float32) is first


def test_what_is_taken_is_nobody_elses():
    room = made()
    taken = [room.take("up", torch.bfloat16) for _ in range(3)]
    assert len({gradient.data_ptr() for gradient in taken}) == 3
    room.give_back("up", taken[:1])
    others = [room.take("down", torch.float32), room.take("up", torch.float32), room.take("up", torch.bfloat16)]
    assert others[2] is taken[0]
    assert not {gradient.data_ptr() for gradient in others[:2]} & {gradient.data_ptr() for gradient in taken}


def test_zeros_are_one_gradient_that_is_never_taken():
    room = made()
    zeros = room.zeros("up")
    assert zeros is room.zeros("up")
    assert zeros.dtype == torch.bfloat16
    taken = room.take("up", torch.bfloat16).fill_(1)
    room.give_back("up", [taken])
    assert not zeros.any()


def test_cleared_room_keeps_nothing():
    room = made()
    first = room.take("up", torch.float32)
    room.give_back("up", [first])
    room.clear()
    assert room.take("up", torch.float32) is not first
