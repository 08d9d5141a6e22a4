"""AdamW groups, warm-up of its rate, clipping."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from relibra.errors import EngineError
from relibra.parallel.homes.logical_order import full_tensor
from relibra.rl.config.settings import UpdateSettings
from relibra.rl.model import optimizer as optimizers
from relibra.rl.model.optimizer import StepCount, clip_gradients, make_optimizer, set_learning_rate, step_or_skip
from tests.replay.tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("group")


def test_only_trained_parameters_are_optimized():
    model = tiny_model("gpt_oss", num_hidden_layers=1)
    model.model.norm.weight.requires_grad_(False)
    [group] = make_optimizer(model, 1e-3).param_groups
    assert {id(one) for one in group["params"]} == {id(one) for one in model.parameters() if one.requires_grad}
    assert group["weight_decay"] == 0


def test_tensors_of_several_meshes_go_together():
    def trained(fused):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(4)))
        for part, shape in zip(model, [(1,), (1, 1), (1,), (1,)], strict=True):
            part.weight = nn.Parameter(distribute_tensor(part.weight.detach(), init_device_mesh("cpu", shape)))
        optimizer = make_optimizer(model, 0.1)
        [group] = optimizer.param_groups
        assert group["fused"]
        group["fused"] = fused
        for parameter in model.parameters():
            parameter.grad = parameter.detach().sin()
        optimizer.step()
        return [full_tensor(parameter.detach()) for parameter in model.parameters()]

    for one, other in zip(trained(True), trained(False), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_the_learning_rate_rises_evenly_and_stays():
    optimizer = make_optimizer(nn.Linear(2, 2), 0.0)

    def rate(step, warmup_steps):
        set_learning_rate(optimizer, 0.8, step, warmup_steps)
        (found,) = {group["lr"] for group in optimizer.param_groups}
        return found

    assert [rate(step, 4) for step in range(6)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8])
    assert rate(0, 0) == 0.8


@given(st.integers(0, 1000), st.floats(0.01, 10), st.floats(1e-3, 1e3))
def test_clipping_is_that_of_torch(seed, max_norm, scale):
    generator = torch.Generator().manual_seed(seed)
    ours = [nn.Parameter(torch.zeros(shape)) for shape in ((3, 4), (5,), (2,))]
    for parameter in ours[:2]:
        parameter.grad = scale * torch.randn(parameter.shape, generator=generator)
    theirs = copy.deepcopy(ours[:2])
    for parameter, clipped in zip(ours, theirs, strict=False):
        clipped.grad = parameter.grad.clone()
    norm = clip_gradients(ours, max_norm)
    assert norm == pytest.approx(float(nn.utils.clip_grad_norm_(theirs, max_norm)), rel=1e-5)
    for one, other in zip(ours[:2], theirs, strict=False):
        torch.testing.assert_close(one.grad, other.grad)
    assert ours[2].grad is None


def test_no_gradients_have_no_norm():
    assert clip_gradients([nn.Parameter(torch.zeros(2))], 1.0) == 0.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_steps_without_finite_gradient_are_skipped_up_to_a_limit(bad, monkeypatch):
    monkeypatch.setattr(optimizers, "MOST_SKIPPED", 2)
    model = nn.Linear(2, 1, bias=False)
    optimizer, update = make_optimizer(model, 1.0), UpdateSettings()
    before = model.weight.detach().clone()
    count = StepCount(rl_step=3, made=7)

    def take(value):
        model.weight.grad = torch.tensor([[1.0, value]])
        return step_or_skip(model, optimizer, count, update, learning_rate=0.1, name="policy")

    for skipped in (1, 2):
        count, norm = take(bad)
        assert (count, norm) == (StepCount(rl_step=3, made=7, skipped_in_a_row=skipped), None)
        assert model.weight.grad is None
    torch.testing.assert_close(model.weight, before, rtol=0, atol=0)
    with pytest.raises(EngineError, match=r"step 3: the gradient of the policy has the norm (nan|inf), 3 times in a"):
        take(bad)
    count, norm = take(1.0)
    assert count == StepCount(rl_step=3, made=8), "a step that is made ends the row"
    assert norm == pytest.approx(2**0.5)
    assert (model.weight != before).all()
