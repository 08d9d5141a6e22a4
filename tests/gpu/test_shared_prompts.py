"""Responses behind a shared prompt on a GPU: outputs and gradients as exact as those of each response alone."""

import pytest
import torch

from relibra.rl.model.packed_sequences import attend_packed, attend_packed_with_sinks
from tests.rl.model.test_attention_sinks import made_up
from tests.rl.model.test_shared_prompts import positions_of, rows_alone

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")

PIECES = [(300, [700, 1, 0, 129]), (65, [64]), (8, [513, 40])]
SIZES = {"heads": (16, 4), "size": 64}


def attend(inputs, positions, window):
    module = torch.nn.Module()
    module.num_key_value_groups = inputs[0].shape[1] // inputs[1].shape[1]
    given = {"position_ids": positions.to("cuda"), "scaling": 0.125}
    if len(inputs) == 3:
        return attend_packed(module, *inputs, None, **given)[0]
    return attend_packed_with_sinks(module, *inputs[:3], None, s_aux=inputs[3], sliding_window=window, **given)[0]


@pytest.mark.parametrize(("dtype", "sinks", "window"), [
    (torch.bfloat16, False, None),
    (torch.float32, False, None),
    (torch.bfloat16, True, None),
    (torch.bfloat16, True, 128),
    (torch.bfloat16, True, 1),
])  # fmt: skip
def test_it_equals_each_response_alone(dtype, sinks, window):
    inputs = made_up([positions_of(PIECES).shape[1]], **SIZES, dtype=dtype, device="cuda")[: 4 if sinks else 3]
    output = attend(inputs, positions_of(PIECES), window)
    weight_T = torch.linspace(-1, 1, output.shape[1], device="cuda").sin().to(dtype)
    ours = torch.autograd.grad((output * weight_T[None, :, None, None]).float().sum(), inputs)
    total, seen = torch.zeros((), device="cuda"), set()
    for prompt, own in rows_alone(PIECES):
        rows = [*prompt, *own]
        alone = attend([one[:, :, rows] for one in inputs[:3]] + inputs[3:], torch.arange(len(rows))[None], window)
        error = (output[:, rows] - alone).float().norm() / alone.float().norm()
        assert error < (5e-3 if dtype == torch.bfloat16 else 1e-5)
        fresh = [i for i, row in enumerate(rows) if row not in seen]
        total = total + (alone[:, fresh] * weight_T[[rows[i] for i in fresh]][None, :, None, None]).float().sum()
        seen.update(rows)
    for found, wanted in zip(ours, torch.autograd.grad(total, inputs), strict=True):
        error = (found - wanted).float().norm() / wanted.float().norm()
        print(dtype, sinks, window, f"{float(error):.1e}")
        assert error < (2e-2 if dtype == torch.bfloat16 else 1e-4)
