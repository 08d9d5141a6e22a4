"""Warnings before a run trains, and the sizes of its model."""

import json
from types import SimpleNamespace

import pytest
from torch import nn
from transformers import AutoModelForCausalLM

from relibra.errors import ConfigError
from relibra.rl.config.run_config import load_config
from relibra.rl.run.run_folder import create_run_folder, read_settings, write_config
from relibra.rl.trainer import model_sizes, warn_beyond_context
from tests.replay.tiny_models import tiny_model
from tests.rl.joined import VOCAB, alone, policy_of
from tests.rl.made_up import EXPERTS
from tests.rl.ranks_at_work import run_alone
from tests.rl.runs import make_user_task


def test_responses_beyond_the_context_of_a_model_are_warned_of(caplog):
    model = nn.Module()
    model.config = SimpleNamespace(max_position_embeddings=512)
    for longest, warned in ((513, True), (512, False)):
        caplog.clear()
        warn_beyond_context(longest, model, "mine")
        assert ("513 tokens" in caplog.text and "512" in caplog.text) == warned


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3"])
def test_the_sizes_of_a_run_are_those_of_its_model(family, tmp_path):
    """Of a model of the user, config.json has no sizes of the built-in one, and resumes all the same."""
    with alone():
        tiny_model(family).save_pretrained(tmp_path / "model")
        config = load_config(None, [f"model.path={tmp_path / 'model'}", f"run.folder={tmp_path}", "parallel.ranks=1"])
        policy = policy_of(config, tmp_path, VOCAB)
    run = create_run_folder(config)
    write_config(run, config, model_sizes(policy))
    about = json.loads((run / "config.json").read_text())
    found, text_config = about["model_sizes"], policy.copy.config
    assert found["model_type"] == family
    assert found["parameters"] == sum(parameter.numel() for parameter in policy.copy.parameters())
    assert (found["hidden_size"], found["num_layers"]) == (text_config.hidden_size, text_config.num_hidden_layers)
    assert (found["num_experts"], found["experts_per_token"]) == (EXPERTS, text_config.num_experts_per_tok)
    assert found["num_moe_layers"] == len(policy.layer_ids)
    assert not about["model"].keys() & {"hidden_size", "num_layers", "num_heads", "num_experts", "experts_per_token"}
    (run / "checkpoints" / "step-00001").mkdir(parents=True)
    assert load_config(None, base=read_settings(run)) == config


@pytest.mark.usefixtures("_leave_group")
def test_a_run_beyond_the_limit_of_its_rope_does_not_train(tmp_path):
    make_user_task(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    factors = {"short_factor": [1.0, 1.0], "long_factor": [4.0, 8.0], "original_max_position_embeddings": 16}
    model.config.rope_parameters = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, **factors}
    for parameter in model.parameters():
        parameter.data *= 10.0 if parameter.ndim > 1 else 1.0  # initial weights attend to all positions alike
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"more than 16 tokens .*lower rollout.max_prompt and rollout.max_response"):
        run_alone(
            (f"model.path={tmp_path / 'model'}", "warmup.steps=0", "rollout.max_prompt=40", "rollout.max_response=100"),
            tmp_path / "run",
        )
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
