"""The policy: the models it can be, how they are spread, and its copy."""

import copy
import json
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from relibra.errors import ConfigError
from relibra.parallel import relocate
from relibra.parallel.balanced import balanced_layers
from relibra.parallel.homes.logical_order import full_tensor
from relibra.rl.model.optimizer import clip_gradients, make_optimizer
from relibra.rl.model.policy import save_policy, write_weights
from relibra.rl.model.sharding import full_parameters, is_balanced, save_activations
from relibra.rl.run.checkpoints.checkpoint import load_checkpoint
from relibra.rl.toy.character_tokenizer import CharacterTokenizer
from tests.replay.tiny_models import random_tokens, tiny_model
from tests.rl.checkpoints import save_checkpoint
from tests.rl.joined import VOCAB, on_ranks, policy_of, tiny_config

pytestmark = pytest.mark.usefixtures("group")

NATIVE = "algorithm.replay=off"


def build(folder, *overrides, ranks=1, vocab=VOCAB):
    config = tiny_config(*overrides, ranks=ranks)
    policy = policy_of(config, folder, vocab)
    save_activations(policy.trained, config.update.activations)
    return policy


def saved(folder, family="qwen3_moe", **changes):
    """Save a tiny model of a family and return its folder, as a setting."""
    tiny_model(family, **changes).save_pretrained(folder)
    return f"model.path={folder}"


def loss_of(model, seed=0):
    tokens = random_tokens(2, 10, seed=seed)
    logits = model(input_ids=tokens, use_cache=False).logits.float()
    return -logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None]).mean()


def step(model, ranks=1):
    """Make one optimizer step on two micro-batches, one per rank if there are two; return loss and gradient norm."""
    optimizer = make_optimizer(model, 1e-2)
    seeds = range(2) if ranks == 1 else [dist.get_rank()]
    losses = []
    for seed in seeds:
        loss = loss_of(model, seed)
        (loss * ranks / 2).backward()
        losses.append(float(loss.detach()))
    norm = clip_gradients(model.parameters(), 0.5)
    optimizer.step()
    return losses, norm


def differences(policy):
    """Return the names of parameters in which the copy is not the trained model, in the type of the copy."""
    copies = dict(policy.copy.named_parameters())
    whole = dict(full_parameters(policy.trained))
    assert copies.keys() == whole.keys()
    return [name for name in copies if not torch.equal(whole[name].to(copies[name].dtype), copies[name])]


def test_the_built_in_policy_follows_from_the_seed(tmp_path):
    one, same, other = build(tmp_path), build(tmp_path), build(tmp_path, "run.seed=1")
    assert (one.num_experts, one.layer_ids, one.top_k, one.balanced) == (4, (0, 1), 2, False)
    assert differences(one) == []
    assert all(torch.equal(a, b) for a, b in zip(one.copy.parameters(), same.copy.parameters(), strict=True))
    assert not torch.equal(one.copy.lm_head.weight, other.copy.lm_head.weight)
    assert one.trained.training
    assert not one.copy.training
    assert not any(p.requires_grad for p in one.copy.parameters())
    assert list(tmp_path.iterdir()) == []


def test_a_dense_policy_has_no_layers_to_record(tmp_path):
    policy = build(tmp_path, "model.num_experts=0", NATIVE)
    assert (policy.num_experts, policy.layer_ids, policy.top_k) == (0, (), 0)
    assert isinstance(policy.copy, transformers.Qwen3ForCausalLM)


def test_sync_updates_the_copy_and_leaves_the_reference(tmp_path):
    policy = build(tmp_path)
    reference = copy.deepcopy(policy.copy)
    step(policy.trained)
    assert "lm_head.weight" in differences(policy)
    policy.sync()
    assert differences(policy) == []
    assert not torch.equal(reference.lm_head.weight, policy.copy.lm_head.weight)
    assert not any(p.requires_grad for p in reference.parameters())


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_models_on_disk_are_policies(tmp_path, family):
    path = saved(tmp_path / "model", family, num_hidden_layers=2)
    policy = build(tmp_path, path)
    assert policy.num_experts == 8
    assert policy.layer_ids == ((1,) if family == "deepseek_v3" else (0, 1))
    assert differences(policy) == []
    expected = tiny_model(family, num_hidden_layers=2).eval()
    expected.set_attn_implementation(policy.copy.config._attn_implementation)
    torch.testing.assert_close(loss_of(policy.copy), loss_of(expected))


def tied_model(folder):
    model = tiny_model(tie_word_embeddings=True, num_hidden_layers=1)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(folder)
    return f"model.path={folder}"


def check_tied(policy, folder):
    """Check that the trained model has one parameter, and that all that others see of it is tied."""
    head, embedding = policy.trained.lm_head.weight, policy.trained.model.embed_tokens.weight
    assert head is embedding
    assert "lm_head.weight" not in dict(policy.trained.named_parameters())
    policy.sync()
    assert differences(policy) == []
    assert torch.equal(policy.copy.lm_head.weight, policy.copy.model.embed_tokens.weight)
    write_weights(policy, folder)
    dist.barrier()
    for published in (folder, folder / "copy"):
        if published != folder and dist.get_rank() == 0:
            policy.copy.save_pretrained(published)  # as publish_weights does
        dist.barrier()
        again = transformers.AutoModelForCausalLM.from_pretrained(published)
        assert again.config.tie_word_embeddings
        assert again.lm_head.weight is again.model.embed_tokens.weight
        assert torch.equal(again.lm_head.weight, policy.copy.lm_head.weight.float())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tied_weights_stay_one_parameter(tmp_path, dtype):
    policy = build(tmp_path, tied_model(tmp_path / "model"), f"model.dtype={dtype}")
    before = policy.copy.lm_head.weight.clone()
    for _ in range(2):
        step(policy.trained)
    if dtype == "float32":
        check_tied(policy, tmp_path / "written")
    policy.sync()
    assert not torch.equal(policy.copy.lm_head.weight, before)
    assert torch.equal(policy.copy.lm_head.weight, policy.copy.model.embed_tokens.weight)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_written_policy_has_the_type_that_its_config_names(tmp_path, dtype):
    policy = build(tmp_path, f"model.dtype={dtype}", "model.num_layers=1")
    save_policy(policy, CharacterTokenizer("01."), tmp_path / "policy")
    policy.sync()
    weights = load_file(tmp_path / "policy" / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {getattr(torch, dtype)}
    assert json.loads((tmp_path / "policy" / "config.json").read_text())["dtype"] == dtype
    assert torch.equal(weights["lm_head.weight"], policy.copy.lm_head.weight)
    write_weights(policy, tmp_path / "whole")
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    assert torch.equal(whole["lm_head.weight"], full_tensor(policy.trained.lm_head.weight))


def test_one_rank_gathers_bfloat16_weights_layer_by_layer(tmp_path):
    policy = build(tmp_path, "model.dtype=bfloat16")
    sharded = [module for module in policy.trained.modules() if isinstance(module, FSDPModule)]
    assert sharded == [policy.trained, *policy.trained.model.layers]
    float32 = build(tmp_path)
    assert not isinstance(float32.trained, FSDPModule)
    (_, norm), (_, other) = step(policy.trained), step(float32.trained)
    assert norm == pytest.approx(other, rel=0.02)


def test_weights_that_differ_in_the_files_are_not_tied(tmp_path):
    model = tiny_model(num_hidden_layers=1)
    model.config.tie_word_embeddings = True
    weights = model.state_dict()
    model.save_pretrained(tmp_path / "model", state_dict=weights)
    policy = build(tmp_path, f"model.path={tmp_path / 'model'}")
    assert differences(policy) == []
    assert not torch.equal(policy.copy.lm_head.weight, policy.copy.model.embed_tokens.weight)


def train_tied(folder):
    """Train a tied model on two ranks, save it, train on, and resume; return what came of it."""
    policy = build(folder, f"model.path={folder / 'model'}", ranks=2)
    optimizer = make_optimizer(policy.trained, 1e-2)

    def steps(model, optimizer, number):
        for _ in range(number):
            loss_of(model, dist.get_rank()).backward()
            optimizer.step()
            optimizer.zero_grad()
        return {name: whole.clone() for name, whole in full_parameters(model)}

    layers = balanced_layers(policy.trained)
    relocate(policy.trained, np.stack([np.roll(np.arange(policy.num_experts), 1) for _ in layers]), optimizer)
    steps(policy.trained, optimizer, 2)
    check_tied(policy, folder / "written")
    saved_ = save_checkpoint(folder, 1, models={"policy": (policy.trained, optimizer)}, responses=[], state={}, keep=1)
    states = json.loads((saved_ / "state.json").read_text())["models"]["policy"]["optimizer"]
    assert "lm_head.weight" not in states
    expected = steps(policy.trained, optimizer, 2)
    resumed = build(folder, f"model.path={folder / 'model'}", ranks=2)
    again = make_optimizer(resumed.trained, 1e-2)
    load_checkpoint(folder, models={"policy": (resumed.trained, again)})
    check_tied(resumed, folder / "resumed")
    found = steps(resumed.trained, again, 2)
    check_tied(resumed, folder / "trained on")
    return {"same": all(torch.equal(found[name], expected[name]) for name in expected), "names": sorted(found)}


@pytest.mark.slow
def test_tied_weights_are_one_parameter_in_fsdp_and_checkpoints(tmp_path):
    tied_model(tmp_path / "model")
    for found in on_ranks(2, train_tied, tmp_path):
        assert found["same"]
        assert "lm_head.weight" not in found["names"]


def test_nothing_is_random_in_training(tmp_path):
    path = saved(tmp_path / "model", "mixtral", attention_dropout=0.5, router_jitter_noise=0.5, num_hidden_layers=1)
    policy = build(tmp_path, path)
    with torch.no_grad():
        assert loss_of(policy.trained) == loss_of(policy.trained) == loss_of(policy.copy)
    assert policy.copy.config.attention_dropout == 0.5


@pytest.mark.parametrize(
    "flags",
    [
        {"output_router_logits": True},
        {"output_hidden_states": True},
        {"output_attentions": True, "return_dict": False, "output_router_logits": True},
    ],
)
def test_flags_that_add_outputs_are_off(tmp_path, caplog, flags):
    saved(tmp_path / "plain", num_hidden_layers=1)
    path = saved(tmp_path / "model", num_hidden_layers=1)
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | flags))
    policy = build(tmp_path, path)
    assert caplog.text.count("in config.json, which training does not use") == 1
    assert all(name in caplog.text for name in flags)
    plain = build(tmp_path, f"model.path={tmp_path / 'plain'}")
    tokens = random_tokens(1, 9)
    packed = {"input_ids": tokens, "use_cache": False, "logits_to_keep": torch.tensor([3, 4])}
    for one, other in ((policy.trained, plain.trained), (policy.copy, plain.copy)):
        output = one(**packed)
        assert set(output) == {"logits"}
        assert torch.equal(output.logits, other(**packed).logits)


def test_activation_checkpointing_changes_no_gradient(tmp_path):
    found = {}
    for how in ("keep", "recompute", "host"):
        model = build(tmp_path, f"update.activations={how}").trained
        loss_of(model).backward()
        assert model.is_activation_checkpointing == (how != "keep")
        found[how] = [parameter.grad for parameter in model.parameters()]
    assert all(map(torch.equal, found["keep"], found["recompute"]))
    assert all(map(torch.equal, found["keep"], found["host"]))


@pytest.mark.parametrize("experts", [4, 0])
def test_bfloat16_computes_narrow_and_keeps_wide(tmp_path, experts):
    policy = build(tmp_path, "model.dtype=bfloat16", f"model.num_experts={experts}", NATIVE)
    tokens = random_tokens(2, 10)
    logits = policy.trained(input_ids=tokens, use_cache=False).logits
    assert logits.dtype == torch.bfloat16
    assert torch.equal(logits, policy.copy(input_ids=tokens, use_cache=False).logits)
    step(policy.trained)
    assert {p.dtype for p in policy.trained.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in policy.trained.parameters()} == {torch.float32}
    assert {p.dtype for p in policy.copy.parameters()} == {torch.bfloat16}
    policy.sync()
    assert differences(policy) == []


def test_written_weights_are_a_plain_folder_in_full_precision(tmp_path):
    policy = build(tmp_path, "model.dtype=bfloat16")
    step(policy.trained)
    write_weights(policy, tmp_path / "written")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "written", dtype=torch.float32)
    for (name, ours), theirs in zip(full_parameters(policy.trained), model.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_what_does_not_fit_is_refused_with_a_sentence(tmp_path):
    dense = saved(tmp_path / "dense", "qwen3_moe", mlp_only_layers=[0, 1, 2])
    experts = saved(tmp_path / "experts", "qwen3_moe", num_hidden_layers=1)
    (tmp_path / "empty").mkdir()
    refused = tmp_path / "llama4"
    transformers.Llama4TextConfig(
        num_hidden_layers=1, hidden_size=32, num_local_experts=4, intermediate_size=32, intermediate_size_mlp=32,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, vocab_size=VOCAB, interleave_moe_layer_step=1,
    ).save_pretrained(refused)  # fmt: skip
    for overrides, vocab, sentence in (
        (["model.path=/no/such/folder"], VOCAB, r"model.path '/no/such/folder' cannot be loaded"),
        ([f"model.path={tmp_path / 'empty'}"], VOCAB, r"model.path '.*empty' cannot be loaded: "),
        ([experts], VOCAB + 1, r"model.path '.*' has embeddings for 64 tokens, but its tokenizer has 65"),
        (
            [dense],
            VOCAB,
            r"algorithm.replay 'R3' needs a model with experts, and model.path '.*dense' has none: set .*plan",
        ),
        ([f"model.path={refused}"], VOCAB, r"algorithm.replay 'R3' does not work with .*; or set algorithm.replay=off"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            build(tmp_path, *overrides, vocab=vocab)
    with pytest.raises(ConfigError, match=r"parallel.ranks 3 does not divide the 8 experts of model.path '.*experts'"):
        build(tmp_path, experts, ranks=3)


def test_weights_that_are_cut_off_are_refused(tmp_path):
    path = saved(tmp_path / "model", num_hidden_layers=1)
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"model.path '.*model' cannot be loaded: "):
        build(tmp_path, path)


def test_python_files_of_a_model_run_only_where_that_is_allowed(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("sys.path", [*sys.path])
    model, trace = tmp_path / "model", tmp_path / "it ran"
    model.mkdir()
    auto = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (model / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": auto}))
    (model / "own.py").write_text(
        f"from pathlib import Path\nfrom transformers import PretrainedConfig\nPath({str(trace)!r}).touch()\n"
        "class OwnConfig(PretrainedConfig):\n    model_type = 'own'\n    vocab_size = 4\n"
    )
    with pytest.raises(ConfigError, match=r"brings Python files of its own, which are not run.*trust_remote_code=true"):
        build(tmp_path, f"model.path={model}")
    assert not trace.exists()
    with pytest.raises(ConfigError, match=r"has embeddings for 4 tokens"):
        build(tmp_path, f"model.path={model}", "model.trust_remote_code=true")
    assert trace.exists()


def test_settings_say_whether_experts_are_balanced():
    cases = {
        (): True,
        ("plan.balancer=static",): False,
        ("plan.balancer=static", "plan.sums=canonical"): True,
        (NATIVE,): False,
        (NATIVE, "plan.balancer=live"): True,
        ("plan.balancer=live",): True,
    }
    for overrides, expected in cases.items():
        assert tiny_config(*overrides, ranks=2).follows_plans is expected
    assert not tiny_config(ranks=1).follows_plans


CASES = {
    "balanced": (),
    "static": ("plan.balancer=static",),
    "native": (NATIVE,),
    "dense": ("model.num_experts=0", NATIVE),
    "sparing": ("update.activations=recompute",),
    "host": ("update.activations=host",),
    "narrow": ("model.dtype=bfloat16",),
    "narrow static": ("model.dtype=bfloat16", "plan.balancer=static"),
    "tied": ("model.path=tied",),
    "gpt_oss": ("model.path=gpt_oss",),
}


def overrides_of(name, folder):
    return [o.replace("model.path=", f"model.path={folder}/") for o in CASES[name]]


def train(folder, ranks):
    """Make one step with each case, homes moved if they can; return what it did and whether the copy follows."""
    found = {}
    for name in CASES:
        policy = build(folder, *overrides_of(name, folder), ranks=ranks)
        assert is_balanced(policy.trained) == policy.balanced
        if policy.balanced:
            layers = balanced_layers(policy.trained)
            relocate(policy.trained, np.stack([np.roll(np.arange(policy.num_experts), 1) for _ in layers]))
        losses, norm = step(policy.trained, ranks)
        off = differences(policy)
        policy.sync()
        with torch.no_grad():
            after = [float(loss_of(model)) for model in (policy.trained, policy.copy)]
        found[name] = {
            "losses": losses,
            "norm": norm,
            "off before": off,
            "off": differences(policy),
            "after": after,
            "weights": {key: whole.clone() for key, whole in full_parameters(policy.trained)},
            "dtypes": {p.dtype for p in policy.trained.parameters()},
            "balanced": policy.balanced,
            "sharded": all(isinstance(p, DTensor) for p in policy.trained.parameters()),
        }
    return found


def refused(folder):
    """Let rank 1 look for the model elsewhere; return what this rank is told."""
    config = tiny_config(ranks=2)
    there = folder / ("tied" if dist.get_rank() == 0 else "elsewhere")
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(there)})})
    with pytest.raises(ConfigError) as told:
        policy_of(config, folder)
    return str(told.value)


def train_on_two(folder):
    return {"told": refused(folder)} | train(folder, 2)


@pytest.mark.slow
def test_two_ranks_train_as_one_does_and_the_copies_follow(tmp_path):
    saved(tmp_path / "tied", tie_word_embeddings=True, num_hidden_layers=2)
    saved(tmp_path / "gpt_oss", "gpt_oss", num_hidden_layers=2)
    one = train(tmp_path, 1)
    both = on_ranks(2, train_on_two, tmp_path)
    told = [found["told"] for found in both]
    assert told[0] == told[1]
    assert "elsewhere' cannot be loaded" in told[0]
    for name, alone_ in one.items():
        narrow = name.startswith("narrow")
        tolerance = {"rtol": 5e-2, "atol": 5e-2} if narrow else {"rtol": 1e-4, "atol": 1e-5}
        for rank, found in enumerate(ranks[name] for ranks in both):
            assert found["sharded"], name
            assert found["balanced"] == (name not in ("static", "native", "dense", "narrow static")), name
            assert found["dtypes"] == {torch.float32}, name
            assert found["off before"], name
            assert found["off"] == [], name
            assert found["losses"][0] == pytest.approx(alone_["losses"][rank], rel=1e-2 if narrow else 1e-5), name
            assert found["norm"] == pytest.approx(alone_["norm"], rel=5e-2 if narrow else 1e-4), name
            assert found["after"][0] == pytest.approx(found["after"][1], rel=1e-2 if narrow else 1e-5), name
            if not narrow:  # AdamW's first step is all sign
                same = [
                    torch.isclose(whole, alone_["weights"][key], **tolerance) for key, whole in found["weights"].items()
                ]
                assert torch.cat([part.flatten() for part in same]).float().mean() > 0.999, name
        torch.testing.assert_close(both[0][name]["weights"], both[1][name]["weights"], rtol=0, atol=0)
