"""Configuration: what is refused and where, how algorithm, model and settings meet, and where values came from."""

import json
import tomllib
from pathlib import Path

import pytest

from relibra.errors import ConfigError
from relibra.rl.config.defaults import BUILT_IN_MODEL, PRESETS
from relibra.rl.config.messages import ABSENT, CALLED_HERE
from relibra.rl.config.run_config import (
    RunConfig,
    as_toml,
    changed_settings,
    describe_training,
    load_config,
    with_ranks,
)

DEMO = Path(__file__).parents[3] / "examples" / "demo.toml"
TPPO = "algorithm.preset=tppo"
SERVED = ("rollout.engine=vllm", "rollout.url=http://h:1", "rollout.server_weights=w")


def refused(*overrides, path=None):
    """Return the error of settings that are refused, in one line."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("override", "what", "got", "allowed"),
    [
        ("update.lr=1", "update.lr is not a setting", None, "learning_rate"),
        ("nonsense.x=1", "nonsense is not a setting", None, "rollout"),
        ("algorithm.replay=R4", "algorithm.replay", "R4", "'off', 'R2' or 'R3'"),
        ("algorithm.preset=trpo", "algorithm.preset", "trpo", "'ppo', 'tppo', 'grpo', 'dapo' or 'gspo'"),
        ("algorithm.clip_low=1.5", "algorithm.clip_low", 1.5, "less than 1"),
        ("run.steps=many", "run.steps", "many", "integer"),
        ("run.steps=-1", "run.steps", -1, "0"),
        ("run.steps.x=3", "run.steps", {"x": 3}, "integer"),
        ("run.name=../x", "run.name", "../x", "pattern"),
        ("rollout.temperature=0", "rollout.temperature", 0, "0.01"),
        ("parallel.timeout_seconds=inf", "parallel.timeout_seconds", float("inf"), "finite"),
        ("model=3", "model", 3, "dict"),
    ],
)
def test_a_value_that_is_no_setting_is_refused(override, what, got, allowed):
    error = refused(override)
    assert (error.what, error.got, error.where) == (what, got, f"override {override!r}")
    assert allowed in error.allowed


@pytest.mark.parametrize("override", ["run.steps", "=3", "run..steps=3"])
def test_an_override_has_section_key_and_value(override):
    assert repr(override) in refused(override).what


@pytest.mark.parametrize(
    ("what", "overrides"),
    [
        ("parallel.ranks", ("parallel.ranks=3",)),
        ("algorithm.replay", ("model.num_experts=0",)),
        ("algorithm.replay", ("algorithm.replay=R2", "model.num_experts=0")),
        ("model.experts_per_token", ("model.experts_per_token=99",)),
        ("task.name", ("task.name=prompts", "task.file=x.jsonl")),
        ("task.name", ("task.name=prompts", "model.path=x")),
        ("rollout.responses_per_prompt", ("rollout.responses_per_prompt=1",)),
        ("update.mini_batches", ("update.mini_batches=33",)),
        ("update.optimizer", ("update.optimizer=adamw8bit", "update.offload=moments")),
        ("update.offload", ("update.offload=all",)),
        ("update.mini_batches", ("update.mini_batches=17", "rollout.prompts_per_step=2", "algorithm.preset=ppo")),
        ("rollout.window", ("rollout.window=20", "algorithm.group_filter=off")),
        ("algorithm.group_filter", (TPPO, "rollout.window=20", "algorithm.group_filter=mixed")),
        ("rollout.window", ("rollout.window=30", TPPO)),
        ("rollout.window", ("rollout.window=160", TPPO)),
        ("algorithm.tail_drop", ("algorithm.tail_drop=20", TPPO, "rollout.window=20")),
        ("rollout.refill", ("rollout.refill=true", TPPO, "rollout.window=0")),
        ("rollout.max_batch", ("rollout.max_batch=127", "rollout.refill=true", TPPO, "rollout.window=20")),
        ("rollout.refill", ("rollout.refill=true", TPPO, "rollout.window=20", *SERVED)),
        ("rollout.on_update", ("rollout.on_update=keep", TPPO, "rollout.window=0")),
        ("rollout.on_update", ("rollout.on_update=keep", TPPO, "rollout.window=20", *SERVED)),
        ("rollout.max_batch", ("rollout.max_batch=127", "rollout.on_update=keep", TPPO, "rollout.window=20")),
        (
            "algorithm.old_log_probs",
            (
                *("rollout.on_update=keep", TPPO, "rollout.window=20"),
                *("algorithm.loss=ppo", "algorithm.old_log_probs=sampler"),
            ),
        ),
        ("algorithm.overlong_buffer", ("algorithm.overlong_buffer=81",)),
        ("algorithm.dual_clip", ("algorithm.dual_clip=0.5",)),
        ("algorithm.loss", ("algorithm.loss=cispo",)),
        ("algorithm.old_log_probs", ("algorithm.old_log_probs=sampler", "algorithm.preset=gspo")),
        ("algorithm.old_log_probs", ("algorithm.old_log_probs=sampler", "algorithm.replay=R2")),
        ("algorithm.old_log_probs", ("algorithm.old_log_probs=sampler", "algorithm.loss=mine:loss")),
        ("update.on_mismatch", ("update.on_mismatch=fall_back",)),
        ("plan.balancer", ("plan.balancer=auto",)),
        ("rollout.engine", ("rollout.engine=vllm",)),
        ("rollout.url", ("rollout.url=http://h:1", "rollout.engine=serve")),
    ],
)
def test_settings_that_do_not_fit_each_other_are_refused(what, overrides):
    error = refused(*overrides)
    assert error.what == what
    assert error.allowed
    assert any(f"override {one!r}" in error.where for one in overrides)


def test_a_window_that_does_not_divide_names_two_that_do():
    assert refused("rollout.window=30", TPPO).next_step.endswith("rollout.max_response to 90 or the window to 20")


@pytest.mark.parametrize(
    "overrides",
    [
        ("model.num_experts=0", "algorithm.replay=off", "parallel.ranks=3"),
        (TPPO, "rollout.window=20", "algorithm.tail_drop=19"),
        (TPPO, "rollout.window=20", "rollout.refill=true", "rollout.max_batch=128"),
        (TPPO, "rollout.window=20", "rollout.on_update=keep", "rollout.max_batch=128"),
        ("algorithm.preset=ppo", "rollout.responses_per_prompt=1", "update.mini_batches=32"),
        ("rollout.window=80", "algorithm.overlong_buffer=80", "update.mini_batches=32"),
        ("model.path=somewhere", "parallel.ranks=3", "model.num_experts=0"),  # sizes are known later
    ],
)
def test_what_just_fits_is_taken(overrides):
    load_config(None, overrides)


def test_a_rule_names_only_the_overrides_it_is_about():
    error = refused("run.steps=1", "parallel.ranks=3", "model.num_experts=10", "model.experts_per_token=1")
    assert error.where == "override 'parallel.ranks=3' and override 'model.num_experts=10'"


def test_all_mistakes_are_told_at_once():
    error = refused("update.lr=1", "run.steps=-1", "algorithm.preset=grop")
    assert [one.what for one in error.causes] == ["run.steps", "algorithm.preset", "update.lr is not a setting"]
    between = refused("parallel.ranks=3", "task.name=prompts", "rollout.responses_per_prompt=1")
    assert {one.what for one in between.causes} == {"parallel.ranks", "task.name", "rollout.responses_per_prompt"}
    assert refused(*(f"run.x{i}=1" for i in range(12))).next_step == "and 4 more"


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("update.learning_rat=1", "update.learning_rate"),
        ("updte.learning_rate=1", "update"),
        ("learning_rate=1", "warmup.learning_rate or update.learning_rate or critic.learning_rate"),
        ("update.lr=1", "update.learning_rate"),
        ("rollout.num_generations=8", "rollout.responses_per_prompt"),
        ("run.step=3", "run.steps"),
        ("rollout.Max_Prompt=3", "rollout.max_prompt"),
        ("rollout.mini_batches=4", "update.mini_batches"),
        ("algorithm.preset=grop", "grpo"),
        ("algorithm.replay=r3", "R3"),
    ],
)
def test_a_misspelt_setting_gets_a_suggestion(override, meant):
    assert refused(override).next_step == f"did you mean {meant}?"


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("rollout.max_turns=4", "not there yet: a response is one turn"),
        ("evaluation.temperature=0.6", "not there yet: evaluations sample at rollout.temperature"),
        ("algorithm.overlong_filter=true", "not there yet: responses cut at rollout.max_response are trained on"),
        ("rollout.top_p=0.9", "not there yet: rollout.temperature is all"),
        ("evaluation.window=4", ""),
        ("algorithm.clip_ratio=0.2", ""),
        ("model.rope_scaling=2", ""),
        ("nonsense.temperature=1", ""),
        ("algorithm.replay=R4", ""),
    ],
)
def test_unlikely_hints_are_not_given(override, says):
    next_step = refused(override).next_step
    assert next_step.startswith(says)
    assert says or not next_step


def test_names_of_other_trainers_lead_to_ours():
    ours = {f"{section}.{name}" for section, part in RunConfig() for name in type(part).model_fields}
    assert not {name for name in (*ABSENT, *CALLED_HERE) if name in ours}
    assert set(CALLED_HERE.values()) <= ours
    sections = {name.partition(".")[0] for name in ours}
    named = {word.strip(",;") for text in ABSENT.values() for word in text.split()}
    assert {word for word in named if word.partition(".")[0] in sections and "." in word} <= ours


def test_files_are_named(tmp_path):
    path = tmp_path / "run.toml"
    assert str(path) in refused(path=path).what
    for text in (b"[run\nsteps = 3", b"\xff\xfe"):
        path.write_bytes(text)
        assert refused(path=path).what.startswith(f"{path} is not valid TOML")
    path.write_text("[run]\nstep = 3\n")
    assert (refused(path=path).where, refused(path=path).next_step) == (str(path), "did you mean run.steps?")
    path.write_text("run = 3\n")
    assert (refused(path=path).what, refused(path=path).got) == ("run", 3)
    assert str(tmp_path) in refused(path=tmp_path).what


def test_overrides_win_over_the_file_and_the_last_one_wins(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[run]\nsteps = 3\nname = "file"\n[algorithm]\nreplay = "off"\n')
    config = load_config(path, ["run.steps=4", "run.steps=5", "run.name=ab", "task.max_terms=3"])
    assert (config.run.steps, config.run.name, config.algorithm.replay, config.task.max_terms) == (5, "ab", "off", 3)
    assert config.model == load_config(None).model
    assert repr("run.steps.x=2") in refused("run.steps=1", "run.steps.x=2").what


def test_a_resolved_configuration_stays_as_it_is(tmp_path):
    """What a run folder keeps, and what --show-config prints, is complete: nothing changes when it is read again."""
    path = tmp_path / "run.toml"
    for overrides in ([], [TPPO, "algorithm.clip_high=0.9"], ["algorithm.preset=ppo"], ["run.folder=/somewhere"]):
        config = load_config(None, overrides)
        path.write_text(as_toml(config))
        assert load_config(path) == load_config(None, base=config.model_dump(mode="json")) == config
        assert RunConfig.model_validate_json(config.model_dump_json()) == config
        longer = load_config(None, ["run.steps=99"], base=config.model_dump(mode="json"))
        assert (longer.run.steps, longer.algorithm) == (99, config.algorithm)


def test_every_setting_says_what_it_is():
    for name, section in RunConfig():
        for key, field in type(section).model_fields.items():
            assert field.description, f"{name}.{key} has no description"


def test_a_launcher_decides_the_number_of_ranks():
    config = load_config(None, ["run.steps=3", TPPO])
    assert with_ranks(config, 1).parallel.ranks == 1
    assert with_ranks(config, 1).sources == {**config.sources, "parallel.ranks": "the launcher's WORLD_SIZE"}
    with pytest.raises(ConfigError) as caught:
        with_ranks(config, 999)
    assert (caught.value.what, caught.value.where) == ("parallel.ranks", "the launcher's WORLD_SIZE")


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_what_is_left_out_and_nothing_else(name):
    plain = load_config(None, [f"algorithm.preset={name}"]).algorithm
    assert PRESETS[name].items() <= plain.model_dump().items()
    for key in ("clip_low", "clip_high"):
        chosen = load_config(None, [f"algorithm.{key}=0.123", f"algorithm.preset={name}"]).algorithm
        assert chosen == plain.model_copy(update={key: 0.123})


def test_presets_are_the_published_algorithms():
    of = {name: load_config(None, [f"algorithm.preset={name}"]).algorithm for name in PRESETS}
    assert {name for name, settings in of.items() if settings.advantage == "gae"} == {"ppo", "tppo"}
    assert {name for name, settings in of.items() if settings.loss == "gspo"} == {"gspo"}
    assert {name for name, settings in of.items() if settings.group_filter == "mixed"} == {"dapo"}
    assert (of["dapo"].clip_low, of["dapo"].clip_high, of["dapo"].aggregate) == (0.2, 0.28, "token")
    assert (of["tppo"].lambda_policy, of["ppo"].lambda_policy) == ("length_adaptive", 0.95)
    assert load_config(None).algorithm == of["dapo"]


def test_a_preset_of_a_file_yields_to_an_override(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[algorithm]\npreset = "gspo"\nclip_high = 0.5\n')
    settings = load_config(path).algorithm
    assert (settings.loss, settings.clip_low, settings.clip_high) == ("gspo", 3e-4, 0.5)
    settings = load_config(path, ["algorithm.preset=grpo"]).algorithm
    assert (settings.loss, settings.clip_low, settings.clip_high) == ("grpo", 0.2, 0.5)


def test_responses_and_windows_follow_from_the_settings():
    sizes = ["rollout.prompts_per_step=3", "rollout.responses_per_prompt=5", "update.mini_batches=3"]
    rollout = load_config(None, sizes).rollout
    assert (rollout.responses_per_step, rollout.window_tokens) == (15, 80)
    windowed = load_config(None, [TPPO, "rollout.window=16"])
    assert (windowed.rollout.window_tokens, windowed.rollout.max_windows) == (16, 5)
    refilled = load_config(None, ["rollout.refill=true"], base=windowed.model_dump(mode="json"))
    assert refilled.rollout.max_windows == 6, "the first window may be a short one"


@pytest.mark.parametrize(
    ("overrides", "window", "tail_drop"),
    [
        ((), 20, 5),
        (("rollout.max_response=8192",), 2048, 8),
        (("rollout.window=4",), 4, 1),
        (("rollout.window=0",), 0, 8),
        (("rollout.max_response=53",), 0, 8),  # a prime has no windows
        (("rollout.max_response=12", "algorithm.tail_drop=2"), 3, 2),
        (("model.path=mine",), 2048, 8),
    ],
)
def test_preset_tppo_trains_in_windows_that_fit(overrides, window, tail_drop):
    config = load_config(None, [TPPO, *overrides])
    assert (config.rollout.window, config.algorithm.tail_drop) == (window, tail_drop)


def test_a_model_of_the_user_gets_defaults_of_post_training():
    config = load_config(None, ["model.path=mine"])
    assert (config.update.learning_rate, config.critic.learning_rate, config.warmup.steps) == (1e-6, 1e-5, 0)
    assert (config.model.dtype, config.update.activations) == ("bfloat16", "recompute")
    assert (config.rollout.max_prompt, config.rollout.max_response) == (1024, 8192)
    given = load_config(None, ["model.path=mine", "model.dtype=float32", "warmup.steps=5"])
    assert (given.model.dtype, given.warmup.steps) == ("float32", 5)


@pytest.mark.parametrize(
    ("context", "overrides", "lengths"),
    [
        (4096, (), (1024, 3072)),
        (512, (), (256, 256)),
        ("many", (), (1024, 8192)),
        (4096, ("rollout.max_prompt=3000",), (3000, 1096)),
        (None, (TPPO, "rollout.window=1000"), (1024, 8000)),
    ],
)
def test_lengths_fit_the_context_of_the_model(context, overrides, lengths, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"max_position_embeddings": context}}))
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in (tmp_path, "~"):
        rollout = load_config(None, [f"model.path={path}", *overrides]).rollout
        assert (rollout.max_prompt, rollout.max_response) == lengths


def test_the_built_in_model_has_values_of_its_own():
    plain, built_in, stated = RunConfig().model_dump(), load_config(None).model_dump(), tomllib.loads(DEMO.read_text())
    for section, values in BUILT_IN_MODEL.items():
        for key, value in values.items():
            assert built_in[section][key] == value != plain[section][key]
            assert section == "critic" or stated[section][key] == value, "the demo states it"
    assert load_config(DEMO) == load_config(None, ["run.name=demo", "run.steps=40", "trace.keep=40"])


def test_a_file_of_all_settings_says_what_is_built_in():
    note = "This is for the built-in model; for your own the default is"
    text = as_toml(load_config(None, ["rollout.max_response=64"]))
    assert f"Optimizer steps. {note} 0.\nsteps = 320" in text
    assert text.count(note) == 5
    assert note not in as_toml(load_config(None, ["model.path=mine"]))


@pytest.mark.parametrize(
    ("overrides", "steps", "finished"),
    [
        (("algorithm.preset=ppo",), 10, 64),
        (("algorithm.preset=ppo", "rollout.prompts_per_step=4", "rollout.responses_per_prompt=8"), 10, 32),
        ((TPPO,), 10, 64),
        ((TPPO, "rollout.max_response=800", "rollout.window=40"), 20, 64),
        ((TPPO, "rollout.max_response=800", "rollout.window=40", "rollout.refill=true"), 21, 64),
        (("algorithm.preset=grpo",), 0, 1),
    ],
)
def test_presets_with_a_value_model_warm_it_up(overrides, steps, finished):
    critic = load_config(None, overrides).critic
    assert (critic.pretrain_steps, critic.min_finished) == (steps, finished)
    assert critic.explained_variance_gate == (0.0 if steps else None)
    own = load_config(None, [*overrides, "critic.pretrain_steps=3", "critic.explained_variance_gate=off"])
    assert (own.critic.pretrain_steps, own.critic.min_finished) == (3, finished)
    assert own.critic.explained_variance_gate is None
    assert load_config(None, base=tomllib.loads(as_toml(own))) == own


def test_template_variables_come_from_files_and_overrides():
    variables = {"enable_thinking": False, "effort": "low", "date": {"day": 1, "names": ["a", "b"]}}
    given = 'task.template_variables={enable_thinking=false, effort="low", date={day=1, names=["a", "b"]}}'
    config = load_config(None, [given])
    assert config.task.template_variables == variables
    assert load_config(None, base=tomllib.loads(as_toml(config))) == config
    assert load_config(None, base=config.model_dump(mode="json")) == config
    one = load_config(None, ["task.template_variables.enable_thinking=false"])
    assert one.task.template_variables == {"enable_thinking": False}
    with pytest.raises(ConfigError, match=r"task\.template_variables"):
        load_config(None, ["task.template_variables={day=2026-01-01}"])


def test_a_run_begins_with_the_sources_of_its_settings(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[run]\nsteps = 8\n[model]\npath = "mine"\n')
    config = load_config(path, ["algorithm.preset=tppo", "run.seed=0"])
    assert {name: config.sources.get(name) for name in ("run.steps", "algorithm.preset", "run.seed")} == {
        "run.steps": str(path),
        "algorithm.preset": "override 'algorithm.preset=tppo'",
        "run.seed": None,
    }
    assert {config.sources[name] for name in ("algorithm.loss", "rollout.window", "critic.min_finished")} == {
        "algorithm tppo"
    }
    rows = {line.split("  ")[0]: line for line in describe_training(config)}
    assert "run.steps=8 model.path=mine" in rows[str(path)]
    assert "the command line" in rows
    assert len(rows) < 8
    assert load_config(None).sources["update.learning_rate"] == "the built-in model"


def test_a_run_warns_of_what_trains_nothing_or_too_much():
    def warnings(*overrides):
        return [line for line in describe_training(load_config(None, overrides)) if line.startswith("warning")]

    assert not warnings()
    assert not warnings("model.path=mine")
    assert len(warnings("model.path=mine", "update.learning_rate=2e-4")) == 1
    assert len(warnings("algorithm.preset=ppo", "run.steps=3")) == 1
    assert not warnings("algorithm.preset=ppo", "run.steps=30")


@pytest.mark.parametrize(
    ("overrides", "changed"),
    [
        ((), []),
        (("rollout.max_response=80", "algorithm.preset=dapo"), []),
        (("rollout.max_response=64",), ["rollout.max_response"]),
        (("model.path=mine", "update.learning_rate=2e-4"), ["model.path", "update.learning_rate"]),
        ((TPPO, "rollout.max_response=120"), ["rollout.max_response", "algorithm.preset"]),
        ((TPPO, "rollout.window=20"), ["algorithm.preset"]),
        ((TPPO, "rollout.window=40", "algorithm.tail_drop=8"), ["rollout.window", "algorithm.preset"]),
        ((TPPO, "algorithm.clip_low=0.1"), ["algorithm.preset", "algorithm.clip_low"]),
    ],
)
def test_changed_settings_differ_from_their_defaults(overrides, changed):
    assert changed_settings(load_config(None, overrides)) == changed
