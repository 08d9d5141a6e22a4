"""Configuration: what is refused, and what the one sentence about it says."""

import json

import pytest

from relibra.errors import ConfigError
from relibra.rl.config import RunConfig, load_config, with_ranks


def refusal(*overrides, path=None):
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("update.lr=1", ("update.lr is not a setting", "override 'update.lr=1'", "learning_rate", "mini_batches")),
        ("nonsense.x=1", ("nonsense is not a setting", "override 'nonsense.x=1'", "rollout", "parallel")),
        ("update.replay=R2", ("update.replay", "got 'R2'", "'off' or 'R3'", "override 'update.replay=R2'")),
        ("run.steps=many", ("run.steps", "got 'many'", "valid integer", "override 'run.steps=many'")),
        ("run.steps=-1", ("run.steps", "got -1", "greater than or equal to 0", "override")),
        ("run.steps.x=3", ("run.steps", "got {'x': 3}", "valid integer", "override 'run.steps.x=3'")),
        ("run.name=../x", ("run.name", "got '../x'", "pattern", "override")),
        ("update.learning_rate=nan", ("update.learning_rate", "got nan", "finite", "override")),
        ("parallel.timeout_seconds=inf", ("parallel.timeout_seconds", "got inf", "finite", "override")),
        (
            "parallel.ranks=999",
            ("parallel.ranks 999 does not divide model.num_experts", "in override 'parallel"),
        ),
        (
            "model.experts_per_token=999",
            ("experts_per_token 999 exceeds num_experts", "in override 'model.experts"),
        ),
        (
            "model.num_heads=998",
            ("hidden_size", "must be a multiple of 2 x num_heads 998", "in override 'model.num_h"),
        ),
        ("update.mini_batches=999", ("mini_batches 999 exceeds rollout.prompts_per_step", "override 'update.mini_b")),
        ("run.steps", ("override 'run.steps'", "write section.key=value, as in")),
        ("=3", ("override '=3'", "write section.key=value")),
        ("run..steps=3", ("override 'run..steps=3'", "write section.key=value")),
    ],
)
def test_refused_overrides(override, said):
    sentence = refusal(override)
    for part in said:
        assert part in sentence


def test_an_override_cannot_go_into_a_value():
    assert "'run.steps.x=2' goes into 'steps', which is a value" in refusal("run.steps=1", "run.steps.x=2")


def test_a_rule_between_settings_names_only_the_overrides_it_is_about():
    sentence = refusal("run.steps=1", "parallel.ranks=3", "model.num_experts=10", "model.experts_per_token=1")
    assert "in override 'parallel.ranks=3' and override 'model.num_experts=10')" in sentence


def test_files_are_named(tmp_path):
    path = tmp_path / "run.toml"
    assert f"cannot read the configuration {path}: No such file" in refusal(path=path)
    path.write_text("[run\nsteps = 3")
    assert f"{path} is not valid TOML: " in refusal(path=path)
    path.write_bytes(b"\xff\xfe")
    assert f"{path} is not valid TOML: " in refusal(path=path)
    path.write_text("[run]\nstep = 3\n")
    assert f"run.step is not a setting (in {path}); allowed here: name, folder, seed, steps" in refusal(path=path)
    path.write_text("run = 3\n")
    assert f"run, got 3 (in {path})" in refusal(path=path)
    assert "cannot read the configuration" in refusal(path=tmp_path)


def test_overrides_win_over_the_file_and_the_last_one_over_the_others(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[run]\nsteps = 3\nname = "file"\n[update]\nreplay = "off"\n')
    config = load_config(path, ["run.steps=4", "run.steps=5", "run.name=ab", "task.max_terms=3"])
    assert (config.run.steps, config.run.name, config.update.replay, config.task.max_terms) == (5, "ab", "off", 3)
    assert config.model == RunConfig().model


def test_a_configuration_survives_json():
    config = load_config(None, ["run.folder=/somewhere", "update.learning_rate=1e-5"])
    assert RunConfig.model_validate(json.loads(config.model_dump_json())) == config


def test_a_launcher_decides_the_number_of_ranks():
    assert with_ranks(RunConfig(), 1).parallel.ranks == 1
    with pytest.raises(ConfigError, match=r"\(in the launcher's WORLD_SIZE\): parallel.ranks 999 does not divide"):
        with_ranks(RunConfig(), 999)
