"""Configuration: what is refused, what the one sentence about it says, and how presets and settings meet."""

import json
import tomllib
from pathlib import Path

import pytest

from relibra.errors import ConfigError
from relibra.rl.config.defaults import BUILT_IN_MODEL, PRESETS
from relibra.rl.config.rollout_settings import RolloutSettings
from relibra.rl.config.run_config import (
    RunConfig,
    as_toml,
    changed_settings,
    describe_training,
    load_config,
    with_ranks,
)
from relibra.rl.config.settings import ModelSettings

DEMO = Path(__file__).parents[3] / "examples" / "demo.toml"


def refusal(*overrides, path=None):
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


def test_removed_plan_settings_are_read_or_refused():
    defaults = ["plan.static_rows=false", "plan.objective=seconds"]
    assert load_config(None, defaults).plan == load_config(None, []).plan
    assert load_config(None, [], base={"plan": {"objective": "seconds", "slots": 4}}).plan.slots == 4
    assert "plan.static_rows" in refusal("plan.static_rows=true")
    assert 'plan.balancer = "relibra_paper_tokens"' in refusal("plan.objective=tokens")
    assert "allowed are static, balanced, relibra" in refusal("plan.balancer=auto")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("update.lr=1", ("update.lr is not a setting", "override 'update.lr=1'", "learning_rate", "mini_batches")),
        ("nonsense.x=1", ("nonsense is not a setting", "override 'nonsense.x=1'", "rollout", "parallel")),
        ("update.replay=R3", ("update.replay is not a setting", "override 'update.replay=R3'")),
        ("algorithm.replay=R4", ("algorithm.replay", "got 'R4'", "'off', 'R2' or 'R3'")),
        ("algorithm.preset=trpo", ("algorithm.preset", "got 'trpo'", "'ppo', 'tppo', 'grpo', 'dapo' or 'gspo'")),
        ("algorithm.clip_low=1.5", ("algorithm.clip_low", "got 1.5", "less than 1")),
        ("algorithm.kl_estimator=k4", ("algorithm.kl_estimator", "got 'k4'", "'k1', 'k2', 'k3' or 'k3+'")),
        ("model.dtype=float16", ("model.dtype", "got 'float16'", "'float32' or 'bfloat16'")),
        ("plan.sums=exact", ("plan.sums", "got 'exact'", "'fast' or 'canonical'")),
        ("task.name=chess", ("task.name", "got 'chess'", "'arithmetic', 'strings' or 'prompts'")),
        ("run.steps=many", ("run.steps", "got 'many'", "valid integer", "override 'run.steps=many'")),
        ("run.steps=-1", ("run.steps", "got -1", "greater than or equal to 0", "override")),
        ("run.steps.x=3", ("run.steps", "got {'x': 3}", "valid integer", "override 'run.steps.x=3'")),
        ("run.name=../x", ("run.name", "got '../x'", "pattern", "override")),
        ("rollout.temperature=0", ("rollout.temperature", "got 0", "greater than or equal to 0.01")),
        ("update.learning_rate=nan", ("update.learning_rate", "got nan", "finite", "override")),
        ("parallel.timeout_seconds=inf", ("parallel.timeout_seconds", "got inf", "finite", "override")),
        ("run.steps", ("override 'run.steps'", "write section.key=value, as in")),
        ("=3", ("override '=3'", "write section.key=value")),
        ("run..steps=3", ("override 'run..steps=3'", "write section.key=value")),
    ],
)
def test_refused_overrides(override, said):
    sentence = refusal(override)
    for part in said:
        assert part in sentence


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ("parallel.ranks=3",),
            (
                "parallel.ranks 3 does not divide model.num_experts 16",
                "the same number of experts",
                "'parallel.ranks=3'",
            ),
        ),
        (
            ("model.num_experts=0",),
            (
                "algorithm.replay 'R3' needs a model with experts, and model.num_experts is 0",
                "set algorithm.replay=off",
                "has nothing to balance, so plan.* has no effect",
            ),
        ),
        (
            ("model.num_experts=0", "algorithm.replay=R2"),
            ("algorithm.replay 'R2' needs a model with experts", "'algorithm.replay=R2'"),
        ),
        (("model.experts_per_token=99",), ("experts_per_token 99 exceeds num_experts 16",)),
        (("model.num_heads=998",), ("hidden_size", "must be a multiple of 2 x num_heads 998")),
        (("task.name=prompts",), ("task.name 'prompts' needs task.file", ".jsonl or .parquet")),
        (
            ("task.name=prompts", "task.file=x.jsonl"),
            ("task.name 'prompts' needs model.path", "the built-in model"),
        ),
        (
            ("rollout.responses_per_prompt=1",),
            (
                "rollout.responses_per_prompt 1 does not work",
                "algorithm.advantage 'group'",
                "set 2 or more",
                "preset 'ppo'",
            ),
        ),
        (
            ("update.mini_batches=33",),
            ("update.mini_batches 33 exceeds rollout.prompts_per_step 32", "at least one whole group"),
        ),
        (
            ("algorithm.preset=ppo", "rollout.prompts_per_step=2", "update.mini_batches=17"),
            ("update.mini_batches 17 exceeds the 16 responses of a step", "prompts_per_step x"),
        ),
        (
            ("rollout.window=20",),
            ("rollout.window 20 is below rollout.max_response 80", "algorithm.advantage 'group'", "preset 'tppo'"),
        ),
        (
            ("algorithm.preset=tppo", "rollout.window=30"),
            (
                "window 30 does not divide max_response 80",
                "a whole number of windows; set rollout.max_response to 90 or the window to 20",
            ),
        ),
        (
            ("algorithm.preset=tppo", "rollout.window=160"),
            ("window 160 does not divide max_response 80",),
        ),
        (
            ("algorithm.preset=tppo", "rollout.window=20", "algorithm.tail_drop=20"),
            ("algorithm.tail_drop 20 leaves nothing of rollout.window 20",),
        ),
        (
            ("algorithm.preset=tppo", "rollout.window=0", "rollout.refill=true"),
            ("rollout.refill needs rollout.window below rollout.max_response 80", "set a window"),
        ),
        (
            ("algorithm.preset=tppo", "rollout.window=80", "rollout.refill=true"),
            ("rollout.refill needs rollout.window below rollout.max_response 80", "rollout.refill=false"),
        ),
        (
            ("algorithm.preset=tppo", "rollout.window=20", "rollout.refill=true", "rollout.max_batch=127"),
            ("rollout.max_batch 127 is below the 128 responses of a rank", "decodes all of them at once"),
        ),
        (
            (
                *("algorithm.preset=tppo", "rollout.window=20", "rollout.url=http://h:1", "rollout.server_weights=w"),
                *("rollout.refill=true", "rollout.engine=vllm"),
            ),
            ("refill needs engine 'embedded', got 'vllm'", "set refill=false"),
        ),
        (
            ("algorithm.overlong_buffer=81",),
            ("algorithm.overlong_buffer 81 exceeds rollout.max_response 80",),
        ),
        (("algorithm.dual_clip=0.5",), ("dual_clip 0.5 must be above 1, or 0 for none",)),
    ],
)
def test_settings_that_do_not_fit_each_other(overrides, said):
    sentence = refusal(*overrides)
    for part in said:
        assert part in sentence, sentence
    assert f"override {overrides[0]!r}" in sentence or f"override {overrides[-1]!r}" in sentence


def test_what_just_fits_is_taken():
    load_config(None, ["model.num_experts=0", "algorithm.replay=off", "parallel.ranks=3"])
    load_config(None, ["algorithm.preset=tppo", "rollout.window=20", "algorithm.tail_drop=19"])
    load_config(None, ["algorithm.preset=tppo", "rollout.window=20", "rollout.refill=true", "rollout.max_batch=128"])
    load_config(None, ["algorithm.preset=ppo", "rollout.responses_per_prompt=1", "update.mini_batches=32"])
    load_config(None, ["rollout.window=80", "algorithm.overlong_buffer=80", "update.mini_batches=32"])
    load_config(None, ["model.path=somewhere", "parallel.ranks=3", "model.num_experts=0"])  # sizes are known later


def test_a_model_of_your_own_is_not_warmed_up_unless_asked():
    assert load_config(None, []).warmup.steps > 0
    assert load_config(None, ["model.path=mine", "warmup.batch=4"]).warmup.steps == 0
    assert load_config(None, ["model.path=mine", "warmup.steps=5"]).warmup.steps == 5


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_what_is_left_out_and_nothing_else(name):
    plain = load_config(None, [f"algorithm.preset={name}"]).algorithm
    for key, value in PRESETS[name].items():
        assert getattr(plain, key) == value
        assert key in type(plain).model_fields
    for key, value in PRESETS[name].items():
        if isinstance(value, float) and key != "dual_clip":
            chosen = load_config(None, [f"algorithm.{key}=0.123", f"algorithm.preset={name}"])
            assert getattr(chosen.algorithm, key) == 0.123
            assert all(
                getattr(chosen.algorithm, other) == PRESETS[name][other] for other in PRESETS[name] if other != key
            )


def test_presets_are_the_published_algorithms():
    of = {name: load_config(None, [f"algorithm.preset={name}"]).algorithm for name in PRESETS}
    assert {name for name, settings in of.items() if settings.advantage == "gae"} == {"ppo", "tppo"}
    assert {name for name, settings in of.items() if settings.loss == "gspo"} == {"gspo"}
    assert {name for name, settings in of.items() if settings.group_filter == "mixed"} == {"dapo"}
    assert (of["dapo"].clip_low, of["dapo"].clip_high, of["dapo"].aggregate) == (0.2, 0.28, "token")
    assert (of["tppo"].lambda_mode, of["tppo"].bootstrap) == ("length_adaptive", "hold")
    assert (of["ppo"].lambda_mode, of["ppo"].positive_coefficient) == ("fixed", 0)
    assert RunConfig().algorithm == of["dapo"], "the default preset is resolved like any other"


def test_a_preset_of_a_file_yields_to_an_override_and_keeps_explicit_settings(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[algorithm]\npreset = "gspo"\nclip_high = 0.5\n')
    settings = load_config(path).algorithm
    assert (settings.loss, settings.clip_low, settings.clip_high) == ("gspo", 3e-4, 0.5)
    settings = load_config(path, ["algorithm.preset=grpo"]).algorithm
    assert (settings.loss, settings.clip_low, settings.clip_high) == ("grpo", 0.2, 0.5)


def test_a_resolved_configuration_stays_as_it_is():
    """What a run folder keeps is complete: no preset changes it when the run goes on."""
    config = load_config(None, ["algorithm.preset=tppo", "algorithm.clip_high=0.9"])
    again = load_config(None, (), base=config.model_dump(mode="json"))
    assert again == config
    longer = load_config(None, ["run.steps=99"], base=config.model_dump(mode="json"))
    assert longer.run.steps == 99
    assert longer.algorithm == config.algorithm


def test_a_configuration_as_toml_explains_itself_and_can_be_run(tmp_path):
    config = load_config(None, ["algorithm.preset=gspo", "run.folder=/somewhere", "update.learning_rate=1e-5"])
    text = as_toml(config)
    assert "1 - clip_low.\nclip_low = 0.0003" in text
    path = tmp_path / "run.toml"
    assert "# stop_at =\n" in text + "\n", "what is not set can be filled in"
    path.write_text(text)
    assert load_config(path) == config


def test_every_setting_says_what_it_is():
    for name, section in RunConfig():
        for key, field in type(section).model_fields.items():
            assert field.description, f"{name}.{key} has no description"


def test_responses_and_windows_follow_from_the_settings():
    config = load_config(
        None, ["rollout.prompts_per_step=3", "rollout.responses_per_prompt=5", "update.mini_batches=3"]
    )
    assert config.rollout.responses_per_step == 15
    assert config.rollout.window_tokens == 80
    windowed = load_config(None, ["algorithm.preset=tppo", "rollout.window=16"])
    assert (windowed.rollout.window_tokens, windowed.rollout.max_windows) == (16, 5)
    refilled = load_config(None, ["rollout.refill=true"], base=windowed.model_dump(mode="json"))
    assert refilled.rollout.max_windows == 6, "the first window may be a short one"


def test_an_override_cannot_go_into_a_value():
    assert "'run.steps.x=2' sets a key of 'steps', which is a value" in refusal("run.steps=1", "run.steps.x=2")


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
    told = refusal(path=path)
    assert f"run.step is not a setting (in {path}): did you mean run.steps?" in told
    assert "allowed here: name, folder, seed, steps" in told
    path.write_text("run = 3\n")
    assert f"run, got 3 (in {path})" in refusal(path=path)
    assert "cannot read the configuration" in refusal(path=tmp_path)


def test_overrides_win_over_the_file_and_the_last_one_over_the_others(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[run]\nsteps = 3\nname = "file"\n[algorithm]\nreplay = "off"\n')
    config = load_config(path, ["run.steps=4", "run.steps=5", "run.name=ab", "task.max_terms=3"])
    assert (config.run.steps, config.run.name, config.algorithm.replay, config.task.max_terms) == (5, "ab", "off", 3)
    assert config.model == RunConfig().model


def test_a_configuration_survives_json():
    config = load_config(None, ["run.folder=/somewhere", "update.learning_rate=1e-5"])
    assert RunConfig.model_validate(json.loads(config.model_dump_json())) == config


def test_a_launcher_decides_the_number_of_ranks():
    assert with_ranks(RunConfig(), 1).parallel.ranks == 1
    with pytest.raises(ConfigError, match=r"\(in the launcher's WORLD_SIZE\): parallel.ranks 999 does not divide"):
        with_ranks(RunConfig(), 999)


def test_preset_tppo_trains_in_windows_that_fit():
    def found(*overrides):
        config = load_config(None, ["algorithm.preset=tppo", *overrides])
        return config.rollout.window, config.algorithm.tail_drop

    assert found() == (20, 5)
    assert found("rollout.max_response=8192") == (2048, 8)
    assert found("rollout.window=4") == (4, 1)
    assert found("rollout.window=0") == (0, 8)
    assert found("rollout.max_response=53") == (0, 8), "a prime has no windows"
    assert found("rollout.max_response=12", "algorithm.tail_drop=2") == (3, 2)
    assert load_config(None, ["algorithm.preset=ppo"]).rollout.window == 0


def test_a_model_of_the_user_gets_the_defaults_of_post_training(tmp_path):
    config = load_config(None, ["model.path=mine"])
    assert (config.update.learning_rate, config.critic.learning_rate, config.warmup.steps) == (1e-6, 1e-5, 0)
    assert (config.model.dtype, config.model.activation_checkpointing) == ("bfloat16", True)
    assert (config.rollout.max_prompt, config.rollout.max_response) == (1024, 8192)
    given = load_config(None, ["model.path=mine", "model.dtype=float32", "update.learning_rate=3e-6"])
    assert (given.model.dtype, given.update.learning_rate) == ("float32", 3e-6)
    for context, expected in ((4096, (1024, 3072)), (512, (256, 256)), ("many", (1024, 8192))):
        (tmp_path / "config.json").write_text(json.dumps({"text_config": {"max_position_embeddings": context}}))
        rollout = load_config(None, [f"model.path={tmp_path}"]).rollout
        assert (rollout.max_prompt, rollout.max_response) == expected
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    assert load_config(None, [f"model.path={tmp_path}", "rollout.max_prompt=3000"]).rollout.max_response == 1096
    windowed = load_config(None, ["model.path=mine", "algorithm.preset=tppo"]).rollout
    assert windowed.window == 2048
    odd = load_config(None, ["model.path=mine", "algorithm.preset=tppo", "rollout.window=1000"]).rollout
    assert odd.max_response == 8000
    assert load_config(None, []).update.learning_rate == 2e-4
    with pytest.raises(ConfigError, match="model"):
        load_config(None, ["model=3"])


def test_a_run_says_how_a_model_of_the_user_is_trained():
    assert describe_training(load_config(None, [])) == []
    (line,) = describe_training(load_config(None, ["model.path=mine"]))
    for part in ("mine", "1e-06", "bfloat16", "8,192", "no warm-up"):
        assert part in line
    _, warning = describe_training(load_config(None, ["model.path=mine", "update.learning_rate=2e-4"]))
    assert "20 times" in warning


@pytest.mark.parametrize(
    ("overrides", "steps", "finished"),
    [
        (("algorithm.preset=ppo",), 10, 64),
        (
            (
                "algorithm.preset=ppo",
                "rollout.prompts_per_step=4",
                "rollout.responses_per_prompt=2",
                "update.mini_batches=1",
            ),
            10,
            8,
        ),
        (("algorithm.preset=tppo",), 10, 64),
        (("algorithm.preset=tppo", "rollout.max_response=800", "rollout.window=40"), 20, 64),
        (("algorithm.preset=tppo", "rollout.max_response=800", "rollout.window=40", "rollout.refill=true"), 21, 64),
    ],
)
def test_presets_with_a_value_model_warm_it_up(overrides, steps, finished):
    critic = load_config(None, overrides).critic
    assert (critic.pretrain_steps, critic.min_finished, critic.explained_variance_gate) == (steps, finished, 0.0)
    own = load_config(None, [*overrides, "critic.pretrain_steps=3", "critic.explained_variance_gate=off"])
    assert (own.critic.pretrain_steps, own.critic.min_finished) == (3, finished)
    assert own.critic.explained_variance_gate is None
    again = RunConfig.model_validate(tomllib.loads(as_toml(own)))
    assert again == own, "what --show-config prints gives the same run"
    assert RunConfig.model_validate_json(own.model_dump_json()) == own


def test_presets_without_a_value_model_warm_up_nothing():
    assert load_config(None, ["algorithm.preset=grpo"]).critic.pretrain_steps == 0
    assert load_config(None).critic == RunConfig().critic


def test_a_run_that_trains_only_the_value_model_says_so():
    short, longer = (load_config(None, ["algorithm.preset=ppo", f"run.steps={steps}"]) for steps in (3, 30))
    assert any("the policy is not trained" in line for line in describe_training(short))
    [line] = describe_training(longer)
    assert line.startswith("steps 0 to 9 train the value model alone")
    assert describe_training(load_config(None)) == []


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("update.learning_rat=1", "did you mean update.learning_rate?"),
        ("updte.learning_rate=1", "did you mean update?"),
        ("learning_rate=1", "did you mean warmup.learning_rate?"),
        ("rollout.mini_batches=4", "did you mean update.mini_batches?"),
        ("algorithm.preset=grop", "did you mean grpo?"),
        ("algorithm.replay=r3", "did you mean R3?"),
    ],
)
def test_a_misspelt_setting_gets_a_suggestion(override, meant):
    assert meant in refusal(override)


def test_all_mistakes_are_told_at_once():
    sentence = refusal("update.lr=1", "run.steps=-1", "algorithm.preset=grop")
    assert sentence.startswith("3 mistakes in the settings: (1) ")
    for part in ("update.lr is not a setting", "run.steps, got -1", "did you mean grpo?", "(3) "):
        assert part in sentence
    between = refusal("parallel.ranks=3", "task.name=prompts", "rollout.responses_per_prompt=1")
    for part in ("does not divide model.num_experts", "; also: task.name 'prompts' needs", "; also: rollout.responses"):
        assert part in between
    assert "; and 4 more" in refusal(*(f"run.x{i}=1" for i in range(12)))


def test_defaults_that_a_reader_sees_are_those_of_post_training():
    """The values of the built-in model stand beside it, and differ from the defaults of the fields."""
    defaults = {name: section.annotation.model_fields for name, section in RunConfig.model_fields.items()}
    assert defaults["update"]["learning_rate"].default == 1e-6
    assert defaults["critic"]["learning_rate"].default == 1e-5
    assert (defaults["model"]["dtype"].default, defaults["warmup"]["steps"].default) == ("bfloat16", 0)
    assert defaults["model"]["activation_checkpointing"].default is True
    assert (defaults["rollout"]["max_prompt"].default, defaults["rollout"]["max_response"].default) == (1024, 8192)
    built_in = RunConfig().model_dump()
    for section, values in BUILT_IN_MODEL.items():
        for key, value in values.items():
            assert built_in[section][key] == value != defaults[section][key].default
    config = RunConfig(model=ModelSettings(num_layers=2), rollout=RolloutSettings(max_batch=8))
    assert (config.model.dtype, config.model.num_layers) == ("float32", 2)
    assert (config.rollout.max_response, config.rollout.max_batch) == (80, 8)


def test_the_demo_states_the_values_of_the_built_in_model():
    stated = tomllib.loads(DEMO.read_text())
    for section, values in BUILT_IN_MODEL.items():
        if section != "critic":  # its algorithm has none
            assert values.items() <= stated[section].items()
    assert load_config(DEMO) == load_config(None, ["run.name=demo", "run.steps=40", "trace.keep=40"])
    _, warning = describe_training(load_config(DEMO, ["model.path=mine"]))
    assert warning.startswith("warning: update.learning_rate 0.0002 is more than 20 times")


def test_changed_settings_are_those_that_differ_from_the_defaults_of_the_model_and_preset(tmp_path):
    def changed(*overrides):
        return changed_settings(load_config(None, overrides))

    assert changed() == changed("rollout.max_response=80", "algorithm.preset=dapo") == []
    assert changed("rollout.max_response=64") == ["rollout.max_response"]
    assert changed("model.path=mine") == ["model.path"]
    assert changed("model.path=mine", "update.learning_rate=2e-4") == ["model.path", "update.learning_rate"]
    assert changed("algorithm.preset=tppo", "rollout.max_response=120") == ["rollout.max_response", "algorithm.preset"]
    assert "rollout.window" in changed("algorithm.preset=tppo", "rollout.max_response=120", "rollout.window=40")
    assert changed("algorithm.preset=tppo", "algorithm.clip_low=0.1") == ["algorithm.preset", "algorithm.clip_low"]
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 512}))
    assert changed(f"model.path={tmp_path}", "algorithm.preset=ppo") == ["model.path", "algorithm.preset"]


def test_a_configuration_as_toml_says_which_values_are_those_of_the_built_in_model():
    note = "This is for the built-in model; for your own the default is"
    text = as_toml(load_config(None, ["rollout.max_response=64"]))
    assert f"Optimizer steps. {note} 0.\nsteps = 320" in text
    assert f"{note} 1e-06.\nlearning_rate = 0.0002" in text
    assert text.count(note) == 5
    assert note not in as_toml(load_config(None, ["model.path=mine"]))


def test_a_model_in_the_home_folder_is_found_for_its_context(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 512}))
    assert load_config(None, ["model.path=~"]).rollout.max_response == 256
    assert load_config(None, ["model.path=~nobody-of-that-name/x"]).rollout.max_response == 8192
