"""AdamW with its moments on the host: the same bits as without, in checkpoints too, and where experts move."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from relibra.parallel import relocate
from relibra.parallel.balanced import balanced_layers
from relibra.rl.config.settings import UpdateSettings
from relibra.rl.model import host_adamw
from relibra.rl.model.host_adamw import HostAdamW
from relibra.rl.model.local_shards import local_shard
from relibra.rl.model.optimizer import StepCount, make_optimizer, step_or_skip
from relibra.rl.run.checkpoints.checkpoint import load_checkpoint
from tests.replay.tiny_models import random_tokens
from tests.rl.checkpoints import save_checkpoint
from tests.rl.joined import on_ranks, policy_of, tiny_config

pytestmark = pytest.mark.usefixtures("group")

MODES = {mode: UpdateSettings(offload=mode, max_grad_norm=0.7) for mode in ("off", "moments")}
GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))


def small(mode, device="cpu"):
    """Return a model whose parameters have several meshes, or none, with an optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 40), nn.Linear(40, 5, bias=False), nn.LayerNorm(5), nn.Linear(5, 1)).to(device)
    for part, shape in ((model[0], (1,)), (model[1], (1, 1))):
        mesh = init_device_mesh("cpu", shape)
        part.weight = nn.Parameter(distribute_tensor(part.weight.detach(), mesh) if device == "cpu" else part.weight)
    model[3].bias.requires_grad_(False)
    return model, make_optimizer(model, 0.1, MODES[mode])


def learn(model, optimizer, steps, first=0):
    """Make optimizer steps with made-up gradients, which are clipped."""
    count = StepCount(made=first)
    for number in range(first, first + steps):
        for parameter in model.parameters():
            if parameter.requires_grad and (number or parameter.ndim > 1):
                parameter.grad = (parameter.detach() + number).sin()
        count, norm = step_or_skip(model, optimizer, count, MODES["off"], learning_rate=0.1, name="model")
        assert norm > MODES["off"].max_grad_norm
        assert all(parameter.grad is None for parameter in model.parameters())


def contents(model, optimizer):
    """Return weights and states of this rank."""
    found = {}
    for name, parameter in model.named_parameters():
        named = {"weight": parameter, **optimizer.state.get(parameter, {})}
        found |= {f"{name} {key}": local_shard(value.detach()).cpu().clone() for key, value in named.items()}
    return found


def assert_same(one, other):
    assert one.keys() == other.keys()
    assert [key for key in one if not torch.equal(one[key], other[key])] == []


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("piece", [7, host_adamw.PIECE_VALUES])
def test_moments_on_the_host_change_no_bit(piece, device, monkeypatch):
    monkeypatch.setattr(host_adamw, "PIECE_VALUES", piece)
    plain, offloaded = small("off", device), small("moments", device)
    assert isinstance(offloaded[1], HostAdamW)
    for first in (0, 2, 4):
        learn(*plain, steps=2, first=first)
        learn(*offloaded, steps=2, first=first)
        assert_same(contents(*plain), contents(*offloaded))
    for parameter, state in offloaded[1].state.items():
        assert state["exp_avg"].device.type == "cpu"
        assert isinstance(state["exp_avg"], DTensor) == isinstance(parameter, DTensor)
        assert local_shard(state["exp_avg"]).is_pinned() == (device == "cuda")


@pytest.mark.parametrize(("saving", "loading"), [("moments", "moments"), ("moments", "off"), ("off", "moments")])
def test_each_mode_resumes_what_the_other_saved(saving, loading, tmp_path):
    first, resumed = small(saving), small(loading)
    learn(*first, steps=2)
    save_checkpoint(tmp_path, 1, models={"model": first}, responses=[], state={}, keep=1)
    learn(*first, steps=2, first=2)
    learn(*resumed, steps=3, first=5)  # whatever it knew is forgotten
    load_checkpoint(tmp_path, models={"model": resumed})
    learn(*resumed, steps=2, first=2)
    assert_same(contents(*first), contents(*resumed))


def train_and_move(folder):
    """Train a policy in each mode while its experts move, and through a checkpoint; return contents by mode."""
    found = {}
    for mode, update in MODES.items():
        (run := folder / f"{mode}-{dist.get_world_size()}").mkdir(exist_ok=True)
        model = policy_of(tiny_config(ranks=2), folder).trained
        optimizer, count = make_optimizer(model, 1e-2, update), StepCount()
        for number in range(4):
            tokens = random_tokens(2, 8, seed=10 * number + dist.get_rank())
            model(input_ids=tokens, use_cache=False).logits.float().square().mean().backward()
            count, _ = step_or_skip(model, optimizer, count, update, learning_rate=1e-2, name="policy")
            rng = np.random.default_rng(number)
            relocate(model, np.stack([rng.permutation(4) for _ in balanced_layers(model)]), optimizer)
            if number == 1:
                models = {"policy": (model, optimizer)}
                save_checkpoint(run, 1, models=models, responses=[], state={}, keep=1)
                before = contents(model, optimizer)
                optimizer.state.clear()
                load_checkpoint(run, models=models)
                assert_same(before, contents(model, optimizer))
        found[mode] = contents(model, optimizer)
    return found


@pytest.mark.slow
def test_moments_on_the_host_follow_experts_to_new_homes(tmp_path):
    for found in on_ranks(2, train_and_move, tmp_path):
        assert_same(found["off"], found["moments"])
