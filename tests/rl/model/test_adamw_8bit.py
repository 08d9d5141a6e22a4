"""AdamW with moments of 8 bits: what is quantized, its checkpoints, and rows of experts that move."""

import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from relibra.errors import ConfigError
from relibra.parallel import logical_order, relocate
from relibra.parallel.balanced import balanced_layers
from relibra.rl.config.settings import UpdateSettings
from relibra.rl.model.adamw_8bit import blocks_of
from relibra.rl.model.local_shards import local_shard
from relibra.rl.model.optimizer import StepCount, make_optimizer, step_or_skip
from relibra.rl.run.checkpoints.checkpoint import load_checkpoint
from tests.replay.tiny_models import random_tokens
from tests.rl.checkpoints import save_checkpoint
from tests.rl.joined import on_ranks, policy_of, tiny_config

pytestmark = pytest.mark.usefixtures("group")

UPDATE = UpdateSettings(optimizer="adamw8bit")


def test_without_torchao_a_run_is_refused_in_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(ConfigError, match=r"'adamw8bit' needs the package torchao: pip install .*, or set update.opt"):
        make_optimizer(nn.Linear(2, 2), 0.1, UPDATE)


@pytest.fixture(scope="module")
def _torchao():
    pytest.importorskip("torchao.optim", reason="update.optimizer=adamw8bit needs torchao, which is not installed here")


def small(update=UPDATE):
    torch.manual_seed(0)
    model = nn.ModuleDict({"experts": nn.Bilinear(16, 32, 4), "dense": nn.Linear(512, 3)})
    return model, make_optimizer(model, 0.01, update)


def learn(model, optimizer, steps, first=0):
    count = StepCount(made=first)
    for number in range(first, first + steps):
        for parameter in model.parameters():
            parameter.grad = (parameter.detach() * 100 + number).sin()
        count, _ = step_or_skip(model, optimizer, count, UPDATE, learning_rate=0.01, name="model")


def contents(model, optimizer):
    """Return weights and states of this rank, quantized ones by their blocks."""
    found = {}
    for name, parameter in model.named_parameters():
        for key, value in {"weight": parameter.detach(), **optimizer.state.get(parameter, {})}.items():
            parts = {f"{name} {key} {part}": block for part, block in blocks_of(value).items()}
            found |= {part: local_shard(one).clone() for part, one in (parts or {f"{name} {key}": value}).items()}
    return found


def assert_same(one, other):
    assert one.keys() == other.keys()
    assert [key for key in one if not torch.equal(one[key], other[key])] == []


@pytest.mark.usefixtures("_torchao")
def test_rows_of_whole_blocks_are_quantized_and_train():
    (model, optimizer), (exact, plain) = small(), small(UpdateSettings())
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for pair in ((model, optimizer), (exact, plain)):
        learn(*pair, steps=3)
    quantized = {name for name, one in model.named_parameters() if blocks_of(optimizer.state[one]["exp_avg"])}
    assert quantized == {"experts.weight", "dense.weight"}
    for (name, one), other in zip(model.named_parameters(), exact.parameters(), strict=True):
        moved = (other - before[name]).norm()
        assert (one - other).norm() < (0.1 if name in quantized else 1e-5) * moved, name


@pytest.mark.usefixtures("_torchao")
def test_a_resumed_run_has_the_same_8_bits(tmp_path):
    first, resumed = small(), small()
    learn(*first, steps=2)
    save_checkpoint(tmp_path, 1, models={"model": first}, responses=[], state={}, keep=1)
    learn(*first, steps=2, first=2)
    learn(*resumed, steps=1, first=5)
    load_checkpoint(tmp_path, models={"model": resumed})
    learn(*resumed, steps=2, first=2)
    assert_same(contents(*first), contents(*resumed))
    for update in (UpdateSettings(), UpdateSettings(offload="moments")):
        with pytest.raises(ConfigError, match=r"does not fit the models of this run: .*; resume with"):
            load_checkpoint(tmp_path, models={"model": small(update)})
    learn(*(plain := small(UpdateSettings())), steps=1)
    save_checkpoint(tmp_path, 2, models={"model": plain}, responses=[], state={}, keep=1)
    with pytest.raises(ConfigError, match=r"does not fit the models of this run: .*; resume with"):
        load_checkpoint(tmp_path, models={"model": small()})


def whole_experts(model, optimizer):
    """Return weights and blocks of the moments of experts, gathered whole, by layer and name."""
    found = {}
    for number, layer in enumerate(balanced_layers(model).values()):
        for name in layer.parameter_names:
            parameter = getattr(layer.experts, name)
            for key in ("exp_avg", "exp_avg_sq"):
                for part, block in blocks_of(optimizer.state[parameter][key]).items():
                    found[number, f"{name} {key} {part}"] = block.full_tensor()
            found[number, name] = parameter.detach().full_tensor()
    return found


def train_and_move(folder):
    """Move experts between steps and save; return what their rows were before and after, and the homes."""
    model = policy_of(tiny_config("model.hidden_size=32", ranks=2), folder).trained
    optimizer, count, found = make_optimizer(model, 1e-2, UPDATE), StepCount(), []
    for number in range(3):
        tokens = random_tokens(2, 8, seed=10 * number + dist.get_rank())
        model(input_ids=tokens, use_cache=False).logits.float().square().mean().backward()
        count, _ = step_or_skip(model, optimizer, count, UPDATE, learning_rate=1e-2, name="policy")
        with logical_order(model, optimizer):
            before = whole_experts(model, optimizer)
        rng = np.random.default_rng(number)
        homes = np.stack([rng.permutation(4) for _ in balanced_layers(model)])
        relocate(model, homes, optimizer)
        found.append((before, whole_experts(model, optimizer), homes))
    models = {"policy": (model, optimizer)}
    save_checkpoint(folder, 1, models=models, responses=[], state={}, keep=1)
    saved = contents(model, optimizer)
    load_checkpoint(folder, models=models)
    assert_same(saved, contents(model, optimizer))
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("_torchao")
def test_moments_of_8_bits_follow_experts_to_new_homes(tmp_path):
    for found in on_ranks(2, train_and_move, tmp_path):
        for before, after, homes in found:
            assert len(before) == 2 * 2 * 5  # layers, parameters; itself, codes and scale of two moments
            assert all(torch.equal(after[layer, name], rows[homes[layer]]) for (layer, name), rows in before.items())
