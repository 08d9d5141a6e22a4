"""Every setting of the version with 118 is read, or refused with the name of what replaces it."""

import json
import re
from pathlib import Path

import pytest

from relibra.errors import ConfigError
from relibra.rl.config.removed import REMOVED
from relibra.rl.config.run_config import (
    RunConfig,
    changed_settings,
    describe_training,
    drop_operational,
    load_config,
)

RUNS = json.loads((Path(__file__).parent / "settings_before.json").read_text())
"""By kind of run: the overrides that made it, and its resolved configuration, as commit 7339a76 wrote it."""
BEFORE = {f"{section}.{key}": value for section, part in RUNS["dapo"]["config"].items() for key, value in part.items()}
TODAY = {f"{section}.{key}" for section, part in RunConfig() for key in type(part).model_fields}
OTHERS = {int: 7, float: 0.25, str: "other", type(None): 1}


@pytest.mark.parametrize("kind", RUNS)
def test_a_run_folder_of_then_is_the_same_run_today(kind):
    again, today = load_config(None, base=RUNS[kind]["config"]), load_config(None, RUNS[kind]["overrides"])
    assert again == today
    assert changed_settings(again) == changed_settings(today)


def test_all_settings_of_then_are_settings_or_in_the_table():
    assert len(BEFORE) == 118
    assert set(BEFORE) <= TODAY | set(REMOVED)
    assert not TODAY & set(REMOVED)


@pytest.mark.parametrize("name", sorted(set(BEFORE) & set(REMOVED)))
def test_a_removed_setting_is_read_at_its_default_only(name):
    section, key = name.split(".")
    assert load_config(None, base={section: {key: BEFORE[name]}}) == load_config(None)
    value = not BEFORE[name] if isinstance(BEFORE[name], bool) else OTHERS[type(BEFORE[name])]
    with pytest.raises(ConfigError) as caught:
        load_config(None, base={section: {key: value}})
    assert (caught.value.what, caught.value.got, caught.value.allowed) == (name, value, REMOVED[name][1])


@pytest.mark.parametrize("name", REMOVED)
def test_what_replaces_a_setting_is_one_or_a_reason(name):
    instead = REMOVED[name][1]
    assert instead.startswith("is gone: ") or re.match(r"[a-z]+\.[a-z_]+", instead)[0] in TODAY


def test_a_ratio_of_then_is_read_where_its_loss_has_it():
    assert load_config(None, ["algorithm.preset=gspo", "algorithm.ratio=sequence"]).algorithm.loss == "gspo"
    assert load_config(None, base={"plan": {"objective": "seconds", "slots": 4}}).plan.slots == 4


def test_a_run_resumes_without_operational_settings_of_then():
    base = {
        "parallel": {"threads_per_rank": 4, "ranks": 2},
        "rollout": {"retry_seconds": 600.0},
        "task": {"max_letters": 9},
        "model": {"activation_checkpointing": True},
    }
    warned = drop_operational(base)
    assert base == {
        "parallel": {"ranks": 2},
        "rollout": {},
        "task": {"max_letters": 9, "prompt_format": "text"},  # what the run did before there was a choice
        "model": {},
    }
    gone = ["model.activation_checkpointing", "rollout.retry_seconds", "parallel.threads_per_rank"]
    assert [line.split()[1] for line in warned] == gone


def test_a_resumed_run_keeps_the_format_of_its_prompts():
    base = {"task": {"prompt_format": "chat"}}
    assert drop_operational(base) == []
    assert base == {"task": {"prompt_format": "chat"}}


def test_lambda_of_a_tppo_run_of_then_keeps_its_meaning():
    then = {"algorithm": {"preset": "tppo", "lambda_mode": "fixed"}}
    assert load_config(None, base=then).algorithm.lambda_policy == 0.95
    then["algorithm"]["lambda_mode"] = "length_adaptive"
    assert load_config(None, base=then).algorithm.lambda_policy == "length_adaptive"
    fixed = load_config(None, ["algorithm.preset=tppo", "algorithm.lambda_policy=0.9"])
    assert any("algorithm.lambda_policy 0.9" in line for line in describe_training(fixed))
