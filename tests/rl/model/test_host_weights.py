"""Weights that wait on the host: their device memory is free meanwhile, and they come back as they were."""

import pytest
import torch
from torch import nn

from relibra.rl.config.settings import UpdateSettings
from relibra.rl.model.host_weights import idle_while_sampling, move_to_host, on_device
from tests.rl.joined import on_ranks, policy_of, tiny_config

pytestmark = pytest.mark.usefixtures("group")
GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))


def held_bytes(model):
    storages = [one.untyped_storage() for one in (*model.parameters(), *model.buffers())]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_weights_come_back_from_the_host_as_they_were(device):
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)).to(device)
    model[2].weight = nn.Parameter(model[0].weight.detach().T)  # shares the memory of another one
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        before = {key: value.clone() for key, value in model.state_dict().items()}
        held, objects = held_bytes(model), [*map(id, model.parameters())]
        move_to_host(model)
        move_to_host(model)
        assert (held_bytes(model), held > 0) == (0, True)
        with on_device(model):
            assert held_bytes(model) == held
        assert held_bytes(model) == 0
        with on_device(model):
            assert [*map(id, model.parameters())] == objects
            assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
            model(torch.randn(5, 4, device=device)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            after = {key: value.clone() for key, value in model.state_dict().items()}
        with idle_while_sampling(model, UpdateSettings(offload="all")):
            pass
        assert all(torch.equal(value, after[key]) for key, value in model.state_dict().items())
        assert not torch.equal(model[0].weight, before["0.weight"])


def test_a_frozen_model_is_copied_to_the_host_once():
    model = nn.Linear(4, 4).requires_grad_(False)
    move_to_host(model)
    with on_device(model):
        model.weight.zero_()
    with on_device(model):
        assert model.weight.abs().sum() > 0


def test_only_all_takes_the_policy_from_the_device():
    model = nn.Linear(4, 4)
    for offload, held in (("off", 80), ("moments", 80), ("all", 0)):
        with idle_while_sampling(model, UpdateSettings(offload=offload)):
            assert held_bytes(model) == held
        assert held_bytes(model) == 80


def go_and_come(folder):
    """Return logits of a sharded model before and after it was on the host, and its gradient norm after."""
    model, tokens = policy_of(tiny_config("model.dtype=bfloat16", ranks=2), folder).trained, torch.arange(9)[None]
    logits = [model(input_ids=tokens, use_cache=False).logits.detach()]
    with idle_while_sampling(model, UpdateSettings(offload="all")):
        experts = [one for name, one in model.named_parameters() if "experts" in name]  # others are a mapped file here
        assert sum(one.to_local().untyped_storage().nbytes() for one in experts) == 0
    output = model(input_ids=tokens, use_cache=False).logits
    output.float().square().sum().backward()
    assert all(one.grad.to_local().isfinite().all() for one in model.parameters())
    return [*logits, output.detach()]


@pytest.mark.slow
def test_sharded_weights_come_back_from_the_host(tmp_path):
    for before, after in on_ranks(2, go_and_come, tmp_path):
        assert torch.equal(before, after)
