"""Probes at load: models whose sequences depend on neighbours, length, passes or chance are refused."""

import copy
import re
from unittest import mock

import pytest
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from relibra.errors import ConfigError
from relibra.replay.forward_cache import CACHE_NAME
from relibra.rl.model import sharding
from relibra.rl.model.critic import build_critic
from relibra.rl.model.policy import reference_policy
from relibra.rl.model.probes import check_lengths, check_modes
from relibra.rl.model.sharding import without_randomness
from tests.replay.model_zoo import sized_config
from tests.replay.tiny_models import random_tokens, tiny_model
from tests.rl.joined import VOCAB, on_ranks, policy_of, tiny_config

pytestmark = pytest.mark.usefixtures("group")

NATIVE = "algorithm.replay=off"
ROPES = {
    "dynamic": ({"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}, 64),
    "longrope": (
        {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 4,
            "long_factor": [1.0, 2.0, 4.0, 8.0],
            "factor": 2.0,
            "original_max_position_embeddings": 32,
        },
        32,
    ),
}
FIXED = (
    {"rope_type": "default", "rope_theta": 10000.0},
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16},
)


def with_rope(rope, dtype=torch.float32):
    return tiny_model(num_hidden_layers=2, rope_parameters=rope, dtype=dtype).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ROPES)
def test_rope_that_depends_on_the_length_is_refused(kind, dtype):
    rope, limit = ROPES[kind]
    model = with_rope(rope, dtype)
    check_lengths(model, limit, "it")
    with pytest.raises(ConfigError, match=rf"a sequence of more than (\d+) tokens .* up to {3 * limit}: ") as told:
        check_lengths(model, 3 * limit, "it")
    [found] = re.findall(r"to (\d+) together", str(told.value))
    assert limit <= int(found) <= 1.3 * limit, "a little beyond is rounding"
    check_lengths(model, int(found), "it")


def test_fixed_rope_fits_any_length():
    for rope in FIXED:
        check_lengths(with_rope(rope), 100_000, "it")


def test_positions_in_a_table_are_probed_within_it():
    config = transformers.GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=1, n_head=2, n_positions=32)
    check_lengths(transformers.AutoModelForCausalLM.from_config(config).eval(), 1000, "it")


def changed_by(model, change):
    """Let a hook change the logits of a model: change(logits, keywords of the pass)."""

    def hook(_model, _given, named, output):
        output.logits = change(output.logits, named)
        return output

    model.register_forward_hook(hook, with_kwargs=True)
    return model


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda logits, named: logits.roll(named["input_ids"].shape[1] // 12, -1), "alone than behind another"),
        (lambda logits, named: logits.roll(int(named.get(CACHE_NAME) is not None), -1), "keys and values in a cache"),
    ],
)
def test_what_depends_on_neighbours_or_a_cache_is_refused(change, why):
    with pytest.raises(ConfigError, match=f"it cannot be trained: .*{why}"):
        check_lengths(changed_by(tiny_model(num_hidden_layers=1).eval(), change), 100, "it")


def test_what_depends_on_earlier_passes_is_refused():
    passes = iter(range(100))
    model = changed_by(tiny_model(num_hidden_layers=1).eval(), lambda logits, _: logits * (1 + (next(passes) > 5)))
    with pytest.raises(ConfigError, match="depends on the passes before"):
        check_lengths(model, 20, "it")


def seed_oss(folder, **changes):
    """Save a tiny Seed-OSS, which drops out in its residuals too, and return its folder as a setting."""
    config = transformers.SeedOssConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, residual_dropout=0.1, attention_dropout=0.1, **changes,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return f"model.path={folder}"


def logits_of(model):
    with torch.no_grad():
        return model(input_ids=random_tokens(1, 10), use_cache=False).logits


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dropout_of_any_name_is_off(tmp_path, dtype):
    policy = policy_of(tiny_config(seed_oss(tmp_path / "model"), NATIVE, f"model.dtype={dtype}"), tmp_path)
    assert torch.equal(logits_of(policy.trained), logits_of(policy.copy))
    assert policy.copy.config.residual_dropout == 0.1


def test_nested_settings_are_found():
    config = without_randomness(
        transformers.DbrxConfig(attn_config={"attn_pdrop": 0.5}, ffn_config={"moe_jitter_eps": 0.1})
    )
    assert config.attn_config.attn_pdrop == 0.0
    assert config.ffn_config.moe_jitter_eps == 0.0
    assert config.attn_config.clip_qkv == transformers.DbrxConfig().attn_config.clip_qkv


def keep_randomness(config):
    return config


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_module_that_stays_random_is_named(tmp_path, monkeypatch, dtype):
    config = tiny_config(seed_oss(tmp_path / "model"), NATIVE, f"model.dtype={dtype}")
    named = r"cannot be trained: model.layers.0.self_attn \(SeedOssAttention\) is random"
    with monkeypatch.context() as patch:
        patch.setattr(sharding, "without_randomness", keep_randomness)
        with pytest.raises(ConfigError, match=rf"^model.path '.*' {named}"):
            policy_of(config, tmp_path)
    policy = policy_of(config, tmp_path)
    monkeypatch.setattr(sharding, "without_randomness", keep_randomness)
    with pytest.raises(ConfigError, match=rf"^the value model of model.path '.*' {named}"):
        build_critic(config.model, policy, tmp_path, torch.device("cpu"))


def test_a_reference_that_is_random_is_refused(tmp_path, monkeypatch):
    config = tiny_config(seed_oss(tmp_path / "model"), NATIVE)
    policy = policy_of(config, tmp_path)
    given = {"settings": config.model, "write": True}
    reference_policy(policy, tmp_path / "reference", torch.device("cpu"), **given)
    forward = transformers.models.seed_oss.modeling_seed_oss.SeedOssMLP.forward
    monkeypatch.setattr(
        "transformers.models.seed_oss.modeling_seed_oss.SeedOssMLP.forward",
        lambda module, x: torch.nn.functional.dropout(forward(module, x), 0.1),
    )
    with pytest.raises(ConfigError, match=r"the reference policy .* model.layers.0.mlp \(SeedOssMLP\) is random"):
        reference_policy(policy, tmp_path / "reference", torch.device("cpu"), **given)


def test_noise_of_inputs_to_routers_is_off(tmp_path):
    config = transformers.PhimoeConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, input_jitter_noise=0.1, max_position_embeddings=64,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    policy = policy_of(tiny_config(f"model.path={tmp_path / 'model'}", NATIVE), tmp_path)
    assert torch.equal(logits_of(policy.trained), logits_of(policy.trained))


def refused_on_two(folder):
    with mock.patch.object(sharding, "without_randomness", keep_randomness), pytest.raises(ConfigError) as told:
        policy_of(tiny_config(f"model.path={folder / 'model'}", NATIVE, ranks=2), folder)
    return str(told.value)


@pytest.mark.slow
def test_all_ranks_refuse_with_one_sentence(tmp_path):
    seed_oss(tmp_path / "model")
    one, other = on_ranks(2, refused_on_two, tmp_path)
    assert one == other
    assert "(SeedOssAttention) is random" in one


def random_settings(config):
    """Set every dropout and noise of a configuration, and return whether there is one."""
    names = [name for name, value in vars(config).items() if type(value) in (float, int) and is_random(name)]
    for name in names:
        vars(config)[name] = 0.3
    return bool(names)


def is_random(name):
    return any(part in name for part in ("dropout", "pdrop", "jitter", "noise"))


@pytest.mark.slow
def test_no_causal_family_stays_random_in_training(subtests):
    """Families that do not build at these sizes, or do not run on tokens alone, are left out."""
    tried = 0
    for config_class, model_class in MODEL_FOR_CAUSAL_LM_MAPPING.items():
        try:
            config = sized_config(config_class)
            assert random_settings(config)
            model = model_class(without_randomness(copy.deepcopy(config))).eval()
            logits_of(model)
        except Exception:  # noqa: BLE001
            continue
        tried += 1
        with subtests.test(msg=model_class.__name__):
            check_modes(model, "it", "float32")
    assert tried > 90, tried
