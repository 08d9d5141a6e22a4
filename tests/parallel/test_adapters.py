"""Adapters of linear layers and experts: they equal W + s B A, also under plans, and frozen experts cost nothing."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from relibra.errors import ConfigError
from relibra.parallel.adapters import (
    LoraLinear,
    adapted_modules,
    add_adapters,
    is_adapter,
    merged,
    without_adapters,
)
from relibra.rl.model.adapter_values import initialize_adapters, merge_adapters
from tests.parallel.against_dense import losses
from tests.parallel.lora import ALPHA, RANK, gradients_on_rank, train_merged, train_on_rank
from tests.parallel.ranks_at_work import on_ranks
from tests.parallel.steps import resident_step, step
from tests.parallel.test_training import of
from tests.parallel.trainings import moved, plans_of
from tests.replay.tiny_models import random_tokens, tiny_model


def adapted(family, seed=0):
    """Return a tiny model with adapters, whose B are not 0."""
    model = tiny_model(family)
    add_adapters(model, RANK, ALPHA)
    initialize_adapters(model, seed)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B"):
                parameter.normal_(std=0.05, generator=generator)
    return model


def logits_of(model):
    return model(random_tokens(2, 9), use_cache=False).logits


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_products_equal_merged_weights(family):
    plain, model = tiny_model(family), adapted(family)
    found = logits_of(model)
    assert not torch.allclose(found, logits_of(plain), atol=1e-3)
    with without_adapters(model):
        torch.testing.assert_close(logits_of(model), logits_of(plain), rtol=1e-5, atol=5e-6)
    weights = dict(merged(model, [(name, p.detach()) for name, p in model.named_parameters()]))
    assert weights.keys() == dict(plain.named_parameters()).keys()
    plain.load_state_dict(weights, strict=False)
    torch.testing.assert_close(found, logits_of(plain), rtol=1e-5, atol=5e-6)
    merge_adapters(model)
    assert not any(adapted_modules(model))
    assert torch.equal(logits_of(model), logits_of(plain))


def test_all_but_routers_have_adapters_and_only_they_are_trained():
    model = adapted("deepseek_v3")
    names = {name.partition("layers.")[2].partition(".")[2] for name, _ in adapted_modules(model)}
    attention = {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
    dense = {f"mlp.{part}{name}_proj" for part in ("", "shared_experts.") for name in ("gate", "up", "down")}
    assert names == {f"self_attn.{name}" for name in attention} | dense | {"mlp.experts"}
    assert all(is_adapter(name) == p.requires_grad for name, p in model.named_parameters())


def test_a_dense_model_has_adapters_too():
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(3, 5)]), "head": nn.Linear(5, 7)})
    add_adapters(model, RANK, ALPHA)
    initialize_adapters(model, 0)
    assert type(model["layers"][0]) is LoraLinear
    assert type(model["head"]) is nn.Linear
    with pytest.raises(ConfigError, match="linear layer"):
        add_adapters(nn.ModuleDict({"head": nn.Linear(3, 5)}), RANK, ALPHA)


def test_experts_that_are_not_stacked_are_refused():
    block = nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(3, 5)])})
    with pytest.raises(ConfigError, match="grouped product"):
        add_adapters(nn.ModuleDict({"layers": nn.ModuleList([block])}), RANK, ALPHA)


def test_initial_values_follow_from_seed_name_and_expert():
    one, same, other = (adapted("qwen3_moe", seed).state_dict() for seed in (0, 0, 1))
    name = "model.layers.0.mlp.experts.gate_up_proj_lora_A"
    assert all(torch.equal(one[key], same[key]) for key in one)
    assert not torch.equal(one[name], other[name])
    assert not torch.equal(one[name][0], one[name][1])
    assert not torch.equal(one[name], one[name.replace("layers.0", "layers.1")])
    assert float(one[name].abs().max()) <= 32**-0.5
    assert float(one[name].var()) == pytest.approx(1 / (3 * 32), rel=0.1)


def assert_trains_as_merged(cases, found):
    for name, results_R in found.items():
        expected = train_merged(cases[name])
        np.testing.assert_allclose(losses(results_R), expected["losses"], rtol=1e-6, err_msg=name)
        for result in results_R:
            for parameter, weight in expected["weights"].items():
                torch.testing.assert_close(
                    result["weights"][parameter], weight, rtol=0, atol=1e-6, msg=f"{name}: {parameter}"
                )
        changed = [float(one.abs().max()) for key, one in expected["weights"].items() if key.endswith("lora_B")]
        assert min(changed) > 1e-4, name


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_plans_train_adapters_as_merged_weights(tmp_path, num_ranks):
    cases = {}
    for family in ("qwen3_moe", "gpt_oss"):
        case = step(num_ranks, family=family, schedule=([0, 0, 1, 1], [0, 1, 0, num_ranks - 1]))
        case = replace(case, num_steps=4, plans=plans_of(case, moved(case, 1), moved(case, 2)))
        cases |= {family: case, f"{family}, canonical": replace(case, sums="canonical", checkpointing=True)}
    resident = resident_step(3, num_ranks, slots=2)
    plans = [replace(plan, group_M=resident.plan.group_M) for plan in plans_of(resident, moved(resident, 1))]
    plans = (*plans, replace(plans[0], resident=True))
    cases["resident"] = replace(resident, num_steps=3, plans=plans)
    assert_trains_as_merged(cases, on_ranks(num_ranks, cases, tmp_path, train_on_rank))


@pytest.mark.slow
def test_frozen_experts_are_pushed_once_and_have_no_gradients(tmp_path):
    replicas = [(1, 0, 0, 0.5), (1, 1, 3, 0.5), (0, 0, 6, 0.5)]
    case = step(replicas=replicas)
    case = replace(case, plan=replace(case.plan, resident=True, group_M=np.array([0, 1], np.int32)))
    case = replace(case, num_steps=2, plans=(case.plan,))
    adapter = 4 * RANK * (32 + 2 * 16 + 16 + 32)  # bytes of A and B, of gate and up, and of down
    frozen = 4 * (2 * 16 * 32 + 32 * 16)
    found = on_ranks(2, {"resident": case}, tmp_path, train_on_rank)["resident"]
    for rank, result in enumerate(found):
        sent = sum(home == rank for home in (0, 0, 1))  # experts 0 and 3 are at home on rank 0
        pushed, returned = [], []
        for timeline in result["timelines"]:
            for m in range(2):
                pushed.append(sum(event.bytes for event in of(timeline, "push", m, 1)))
                returned.append(sum(event.bytes for event in of(timeline, "return", m, 1)))
        # Passes over both micro-batches twice without gradients, then a group of each; and all that once more.
        assert pushed[0] == sent * (frozen + 2 * adapter)
        assert set(pushed[1:]) <= {sent * adapter, sent * 2 * adapter, 0}
        assert set(returned) <= {0, (3 - sent) * adapter}


@pytest.mark.slow
def test_frozen_experts_cost_no_weight_gradient(tmp_path):
    case = step(replicas=[(1, 0, 0, 0.5), (0, 0, 6, 0.5)])
    cases = {"fast": case, "canonical": replace(case, sums="canonical")}
    for name, results_R in on_ranks(2, cases, tmp_path, gradients_on_rank).items():
        for result in results_R:
            assert result["trained"], name
            assert all(is_adapter(one) for one in result["trained"]), name
            assert result["shapes"], name
            assert all(RANK in shape[1:] for shape in result["shapes"]), (name, result["shapes"])
