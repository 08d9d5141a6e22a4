import copy

import pytest
import torch
from torch import nn

from relibra.errors import EngineError
from relibra.replay import find_routers
from relibra.replay.families import REFUSED
from relibra.replay.routers import RuleChecks, decoder_of
from tests.replay.tiny_models import CONFIGS, tiny_model


@pytest.mark.parametrize("family", CONFIGS)
def test_finds_each_layer_in_order(family):
    model = tiny_model(family)
    sites = find_routers(model)
    dense = 1 if family in ("deepseek_v2", "deepseek_v3", "glm4_moe") else 0
    assert [site.layer_id for site in sites] == list(range(dense, 3))
    assert {(site.num_experts, site.top_k) for site in sites} == {(8, 3 if dense else 2)}
    assert all(model.get_submodule(site.name) is site.module for site in sites)
    assert decoder_of(model, sites[0]) is model.model


def test_finds_a_router_whose_class_fsdp_has_replaced():
    model = tiny_model()
    gate = model.model.layers[0].mlp.gate
    gate.__class__ = type("FSDPQwen3MoeTopKRouter", (type(gate),), {})
    assert len(find_routers(model)) == 3


def test_leaves_draft_layers_out():
    model = tiny_model()
    model.mtp = nn.ModuleDict({"layers": nn.ModuleList([copy.deepcopy(model.model.layers[0])])})
    assert [site.name for site in find_routers(model)] == [f"model.layers.{i}.mlp.gate" for i in range(3)]


def test_refuses_a_dense_model():
    with pytest.raises(EngineError, match="dense model"):
        find_routers(nn.Sequential(nn.Linear(2, 2)))


def test_refuses_an_unknown_router_beside_experts():
    model = tiny_model()
    gate = model.model.layers[1].mlp.gate
    gate.__class__ = type("HomemadeRouter", (nn.Module,), {})
    with pytest.raises(EngineError, match=r"layers\.1\.mlp.*HomemadeRouter"):
        find_routers(model)


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_routers_that_cannot_be_replayed_and_says_why(name):
    model = tiny_model()
    model.model.layers[2].mlp.gate.__class__ = type(name, (nn.Module,), {})
    with pytest.raises(EngineError) as caught:
        find_routers(model)
    assert f"model.layers.2.mlp.gate ({name})" in str(caught.value)
    assert REFUSED[name] in str(caught.value)


def test_refuses_two_decoders_in_one_model():
    both = nn.ModuleDict({"thinker": tiny_model(), "talker": tiny_model()})
    with pytest.raises(EngineError, match=r"thinker\..*talker\..*layer 0"):
        find_routers(both)


def test_refuses_layers_that_choose_differently():
    model = tiny_model()
    model.model.layers[2].mlp.gate.top_k = 3
    with pytest.raises(EngineError, match="choose 2 of 8 and 3 of 8"):
        find_routers(model)


def test_refuses_a_part_of_a_model_without_layer_numbers():
    with pytest.raises(EngineError, match="no decoder layer"):
        find_routers(tiny_model().model.layers[0])


def test_checks_notice_a_router_that_changed():
    model = tiny_model()
    site = find_routers(model)[0]
    output = site.module(torch.randn(5, 32))
    checks = RuleChecks()
    checks.compare(site, output)
    checks.read()
    site.module.norm_topk_prob = not site.module.norm_topk_prob  # another rule, which is checked again
    checks.compare(find_routers(model)[0], output)
    with pytest.raises(EngineError, match=r"layers\.0\.mlp\.gate.*Qwen3MoeTopKRouter.*transformers \d"):
        checks.read()
