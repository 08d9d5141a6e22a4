"""Policies with adapters: what is frozen, saved and merged, and that the reference policy is the model without them."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from relibra.errors import ConfigError
from relibra.parallel.adapters import has_adapters, is_adapter, without_adapters
from relibra.rl.config.run_config import load_config
from relibra.rl.model.optimizer import make_optimizer
from relibra.rl.model.policy import build_policy, save_policy, write_weights
from relibra.rl.run.checkpoints.checkpoint import load_checkpoint
from relibra.rl.toy.character_tokenizer import CharacterTokenizer
from tests.replay.tiny_models import random_tokens, tiny_model
from tests.rl.checkpoints import save_checkpoint
from tests.rl.joined import CPU, VOCAB

pytestmark = pytest.mark.usefixtures("group")


def policy_with_adapters(folder, family="qwen3_moe", *overrides):
    """Return a policy of a tiny model in `folder`, whose B are not 0."""
    tiny_model(family).save_pretrained(folder)
    settings = ("parallel.ranks=1", "algorithm.replay=off", "model.dtype=float32", "lora.rank=8", "lora.alpha=12")
    config = load_config(None, [f"model.path={folder}", *settings, *overrides])
    policy = build_policy(config, VOCAB, folder, CPU)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in policy.trained.named_parameters():
            if name.endswith("lora_B"):
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                local.normal_(std=0.05, generator=generator)
    return policy


def logits_of(model):
    return model(input_ids=random_tokens(2, 9), use_cache=False).logits.detach()


def model_of_files(base, folder):
    """Return the model that the files of peft describe: each matrix W + alpha / r B A, by its path."""
    model, settings = tiny_model(base), json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    weights, rank, seen = dict(model.named_parameters()), settings["r"], set()
    for key, down in tensors.items():
        if not key.endswith(".lora_A.weight"):
            continue
        path = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        up, scale = tensors[key.replace("lora_A", "lora_B")], settings["lora_alpha"] / rank
        one_expert = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj", path)
        with torch.no_grad():
            if one_expert:
                experts, number, kind = one_expert.groups()
                weight = weights[f"{experts}.{'down' if kind == 'down' else 'gate_up'}_proj"][int(number)]
                rows = {"gate": slice(0, len(up)), "up": slice(len(up), None), "down": slice(None)}[kind]
                weight[rows] += scale * up @ down
            elif path.endswith(("experts", "experts.base_layer")):
                weight = weights[
                    f"{path.removesuffix('.base_layer')}.{'gate_up' if 'base_layer' in path else 'down'}_proj"
                ]
                for e in range(len(weight)):
                    weight[e] += (scale * up[:, e :: len(weight)] @ down[e * rank : (e + 1) * rank]).T
            else:
                weights[f"{path}.weight"] += scale * up @ down
                assert path.rpartition(".")[2] in settings["target_modules"]
        seen.add(path)
    assert 2 * len(seen) == len(tensors)
    return model


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_the_saved_adapter_is_what_the_policy_computes(family, tmp_path):
    policy = policy_with_adapters(tmp_path / "base", family)
    save_policy(policy, CharacterTokenizer("01."), tmp_path / "policy")
    expected = logits_of(policy.trained)
    torch.testing.assert_close(logits_of(model_of_files(family, tmp_path / "policy")), expected, rtol=1e-5, atol=5e-6)
    with without_adapters(policy.trained):
        torch.testing.assert_close(logits_of(policy.trained), logits_of(tiny_model(family)), rtol=1e-5, atol=5e-6)
    policy.sync()
    torch.testing.assert_close(logits_of(policy.copy), expected, rtol=1e-5, atol=5e-6)
    write_weights(policy, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    torch.testing.assert_close(logits_of(merged), expected, rtol=1e-5, atol=5e-6)


def test_frozen_weights_are_bfloat16_and_merged_in_float32(tmp_path):
    policy = policy_with_adapters(tmp_path, "qwen3_moe", "model.dtype=bfloat16")
    assert {p.dtype for name, p in policy.trained.named_parameters() if is_adapter(name)} == {torch.float32}
    assert {p.dtype for name, p in policy.trained.named_parameters() if not is_adapter(name)} == {torch.bfloat16}
    policy.sync()
    assert {p.dtype for p in policy.copy.parameters()} == {torch.float32}
    plain = tiny_model("qwen3_moe").get_parameter("model.layers.0.self_attn.q_proj.weight")
    change = policy.copy.get_parameter("model.layers.0.self_attn.q_proj.weight") - plain.bfloat16()
    layer = policy.trained.get_submodule("model.layers.0.self_attn.q_proj")
    up, down = (getattr(layer, name).full_tensor() for name in ("lora_B", "lora_A"))
    torch.testing.assert_close(change, 12 / 8 * up @ down, rtol=0, atol=1e-6)
    loss = policy.trained(input_ids=random_tokens(2, 9), use_cache=False).logits.float().logsumexp(-1).sum()
    loss.backward()
    assert all((p.grad is not None) == is_adapter(name) for name, p in policy.trained.named_parameters())


def test_checkpoints_hold_adapters_and_their_moments(tmp_path):
    policy = policy_with_adapters(tmp_path / "base")
    optimizer = make_optimizer(policy.trained, 1e-2)

    def step():
        logits_of_training = policy.trained(input_ids=random_tokens(2, 9), use_cache=False).logits
        logits_of_training.logsumexp(-1).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    models = {"policy": (policy.trained, optimizer)}
    save_checkpoint(tmp_path, 1, models=models, responses=[], state={}, keep=1)
    names = set()
    for file in (tmp_path / "checkpoints").rglob("shard-*.safetensors"):
        names |= load_file(file).keys()
    adapters = {name for name, _ in policy.trained.named_parameters() if is_adapter(name)}
    assert {name.removeprefix("policy/weights/") for name in names if "/weights/" in name} == adapters
    assert {name.partition("optimizer/")[2].rpartition("/")[0] for name in names if "/optimizer/" in name} == adapters
    step()
    expected = {name: p.detach().clone() for name, p in policy.trained.named_parameters()}
    load_checkpoint(tmp_path, models=models)
    step()
    assert all(torch.equal(p, expected[name]) for name, p in policy.trained.named_parameters())


def test_without_a_rank_there_are_no_adapters(tmp_path):
    assert not has_adapters(policy_with_adapters(tmp_path, "qwen3_moe", "lora.rank=0").trained)


def test_the_built_in_model_takes_no_adapters():
    with pytest.raises(ConfigError, match=r"lora\.rank.*needs model\.path"):
        load_config(None, ["lora.rank=8"])
