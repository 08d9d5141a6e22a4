"""The configuration of a run, loaded from a TOML file and `section.key=value` overrides. Imports no torch."""

from __future__ import annotations

import copy
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from relibra.errors import LONGEST_VALUE, ConfigError
from relibra.files import read_toml, toml_value
from relibra.printable import excerpt
from relibra.rl.algorithms import tppo
from relibra.rl.config.defaults import BUILT_IN_MODEL, PRESETS
from relibra.rl.config.messages import Sources, raise_all, refusals_of_types
from relibra.rl.config.model_folder import read_model_sizes
from relibra.rl.config.removed import REMOVED, without_removed
from relibra.rl.config.rollout_settings import RolloutSettings
from relibra.rl.config.rules import broken_rules
from relibra.rl.config.settings import RunConfig as RunConfig
from relibra.rl.config.settings import UpdateSettings

USUAL_RATE = UpdateSettings().learning_rate
HIGH = 20
"""Multiple of the usual learning rate above which RL post-training destroys a model in a few steps."""
A_FILE = "a TOML file of settings, or section.key=value overrides"
MAX_DEPTH = 8
"""Most parts of an override's key; settings have two."""


def load_config(path: Path | None, overrides: Sequence[str] = (), *, base: dict[str, Any] | None = None) -> RunConfig:
    """Load a TOML file (None: defaults) and apply `section.key=value` overrides; the last one wins.

    base      settings to start from without a file: those of a resumed run
    raises    ConfigError naming key, value, allowed values and where the value was set
    """
    elsewhere = str(path) if path else "the defaults" if base is None else "the run that is resumed"
    try:
        settings = read_toml(path, ConfigError, A_FILE) if path else copy.deepcopy(base or {})
        places = dict.fromkeys(_names(settings), elsewhere)
        for override in overrides:
            key, value = _parse_override(override)
            _set(settings, key, value, override)
            places[".".join(key)] = f"override {excerpt(override, LONGEST_VALUE)}"
        return resolve(settings, Sources(places, elsewhere))
    except RecursionError as error:
        raise ConfigError(f"the settings in {elsewhere} are nested too deeply") from error


def resolve(given: Mapping[str, Any], sources: Sources) -> RunConfig:
    """Return the whole configuration from sections of unchecked settings; ConfigError names all mistakes."""
    config = _fill_in(given, sources).finished(sources)
    refused = []
    for name, why, instead in broken_rules(config):
        where = sources.of(name, *(other for other in sources.given if other in why))
        refused.append(ConfigError(name, got=value_of(config, name), where=where, allowed=why, next_step=instead))
    raise_all(refused)
    return config


def _fill_in(given: Mapping[str, Any], sources: Sources) -> _Filling:
    """Fill in what was not given, in this order: each part below follows from the parts above it."""
    # What was given: names of earlier versions, types and ranges. From here on values have their types.
    given, refused = without_removed(given)
    raise_all([ConfigError(key, got=got, where=sources.of(key), allowed=REMOVED[key][1]) for key, got in refused])
    try:
        filling = _Filling(RunConfig.model_validate(given))
    except ValidationError as error:
        raise_all(refusals_of_types(error, sources))
        raise
    fill, config = filling.fill, filling.config

    # The model: defaults of the built-in one, or lengths that fit the context of another.
    path, rollout = config.model.path, config.rollout
    if path:
        rollout = fill("rollout", _lengths(path, rollout, filling.given), f"the context of {path}")
    else:
        for section, values in BUILT_IN_MODEL.items():
            fill(section, values, "the built-in model")
        rollout = filling.config.rollout

    # The algorithm.
    preset = config.algorithm.preset
    fill("algorithm", PRESETS[preset], f"algorithm {preset}")

    # Windows of T-PPO: about a quarter of a response; the end of each does not train.
    if preset == "tppo":
        window = tppo.choose_window(rollout.max_response)
        rollout = fill("rollout", {"window": window or 0}, f"algorithm {preset}")
        if rollout.window:
            fill("algorithm", {"tail_drop": min(8, rollout.window // 4)}, f"algorithm {preset}")

    # The value model is trained alone until all responses of the first step have ended.
    if config.algorithm.advantage == "gae":
        first_steps, ended = max(10, rollout.max_windows), min(64, rollout.responses_per_step)
        alone = {"pretrain_steps": first_steps, "min_finished": ended, "explained_variance_gate": 0.0}
        fill("critic", alone, f"algorithm {preset}")
    return filling


class _Filling:
    """A configuration that gets values of settings that were not given.

    usual   values that settings have unless they are given, and where these come from: "" for the defaults of fields
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.given = {f"{section}.{key}" for section, part in config for key in part.model_fields_set}
        self.usual = {f"{section}.{key}": (value, "") for section, part in RunConfig() for key, value in part}

    def fill(self, section: str, values: Mapping[str, Any], source: str) -> Any:
        """Set values that were not given, and return the section."""
        self.usual |= {f"{section}.{key}": (value, source) for key, value in values.items()}
        missing = {key: value for key, value in values.items() if f"{section}.{key}" not in self.given}
        filled = getattr(self.config, section).model_copy(update=missing)
        self.config = self.config.model_copy(update={section: filled})
        return filled

    def changed(self) -> list[str]:
        """Return the settings that have other values than the usual ones."""
        return [name for name, (usual, _) in self.usual.items() if value_of(self.config, name) != usual]

    def finished(self, sources: Sources) -> RunConfig:
        """Return the configuration with the sources of all values that are not the defaults of fields."""
        changed, plain = self.changed(), RunConfig()
        self.config._sources = {
            name: sources.of(name) if name in self.given else source
            for name, (_, source) in self.usual.items()
            if name in changed or value_of(self.config, name) != value_of(plain, name)
        }
        return self.config


def value_of(config: RunConfig, name: str) -> Any:
    """Return the value of a setting that is named as section.key."""
    section, key = name.split(".")
    return getattr(getattr(config, section), key)


def _lengths(path: str, rollout: RolloutSettings, given: set[str]) -> dict[str, int]:
    """Return lengths of prompt and response that fit the context of a model; a given window divides the latter."""
    context, usual = read_model_sizes(path).get("max_position_embeddings"), RolloutSettings()
    prompt, response = usual.max_prompt, usual.max_response
    if type(context) is int and 2 <= context < 1 << 30:
        prompt = min(prompt, context // 2)
        response = max(1, min(response, context - (rollout.max_prompt if "rollout.max_prompt" in given else prompt)))
    if 0 < rollout.window <= response:
        response -= response % rollout.window
    return {"max_prompt": prompt, "max_response": response}


def describe_sources(config: RunConfig) -> list[str]:
    """Return a table of values that are not the defaults of fields: a row for each place that they came from."""
    rows: dict[str, list[str]] = {}
    values = config.model_dump(mode="json")
    for name, source in config.sources.items():
        section, key = name.split(".")
        value = values[section][key]
        place = "the command line" if source.startswith("override ") else source
        rows.setdefault(place, []).append(f"{name}={value if isinstance(value, str) else json.dumps(value)}")
    width = max(map(len, rows), default=0)
    return [f"{place:{width}}  {' '.join(settings)}" for place, settings in rows.items()]


def describe_training(config: RunConfig) -> list[str]:
    """Return the first lines of a run: where its settings come from, and what trains nothing or too much."""
    lines, rate = describe_sources(config), config.update.learning_rate
    if config.algorithm.advantage == "gae" and 0 < config.run.steps <= config.critic.pretrain_steps:
        first = config.critic.pretrain_steps
        lines.append(
            f"warning: all run.steps train the value model alone (critic.pretrain_steps {first}), not the policy"
        )
    if config.rollout.ahead:
        correction = f"algorithm.correction is {config.algorithm.correction!r}"
        lines.append(
            f"{'warning: ' if config.algorithm.correction == 'off' else ''}rollout.ahead {config.rollout.ahead}: "
            f"weights that sample are up to so many steps older than those that train; {correction}"
        )
    if config.algorithm.preset == "tppo" and not isinstance(config.algorithm.lambda_policy, str):
        lines.append(
            f"warning: algorithm.lambda_policy {config.algorithm.lambda_policy:g} is fixed: T-PPO's is length_adaptive"
        )
    usual = USUAL_RATE * (10 if config.lora.rank else 1)
    if config.model.path and rate > HIGH * usual:
        lines.append(
            f"warning: update.learning_rate {rate:g} is more than {HIGH} times what RL post-training usually takes "
            f"({usual:g}): models lose what they know in a few steps"
        )
    return lines


_MAY_CHANGE = (
    *("run.steps", "run.name", "run.folder", "update.", "critic.", "plan.", "parallel.", "checkpoint.", "trace."),
    "algorithm.old_log_probs",
    *("rollout.ahead", "rollout.on_update", "rollout.mixed_routes"),
    *("rollout.max_batch", "rollout.url", "rollout.server_weights", "rollout.server_options"),
    *("rollout.start_seconds", "rollout.timeout_seconds", "rollout.api_key_from", "rollout.transfer", "rollout.sleep"),
)
"""Settings that may change in a resumed run, or beginnings of their names."""

_GONE = (
    *("rollout.server_", "rollout.servers", "rollout.retry_seconds", "task.max_failed_rewards", "evaluation.stop_at"),
    "model.activation_checkpointing",
    *_MAY_CHANGE,
)
"""Beginnings of the names of removed settings that do not keep a run from being resumed."""


def drop_operational(base: dict[str, Any]) -> list[str]:
    """Remove settings of earlier versions from those of a run to resume, where its checkpoint does not depend on them.

    A setting that is younger than the run gets the value that says what the run did.

    returns   a warning for each removed one
    """
    if isinstance(base.get("task"), dict):
        base["task"].setdefault("prompt_format", "text")
    if isinstance(base.get("algorithm"), dict):
        base["algorithm"].setdefault("old_log_probs", "recompute")
    if isinstance(base.get("update"), dict):
        base["update"].setdefault("shared_prompts", False)
    _, refused = without_removed(base)
    dropped = [(name, value) for name, value in refused if name.startswith(_GONE)]
    for name, _ in dropped:
        section, key = name.split(".")
        del base[section][key]
    return [f"warning: {name} {value!r} of the run does nothing now: {REMOVED[name][1]}" for name, value in dropped]


def check_resumable(before: RunConfig, after: RunConfig) -> None:
    """Check that a resumed run changes only settings that its checkpoint does not depend on.

    raises    ConfigError naming the first other setting that changed
    """
    old, new = before.model_dump(mode="json"), after.model_dump(mode="json")
    for section, settings in new.items():
        for key, value in settings.items():
            name = f"{section}.{key}"
            if value != old[section][key] and not name.startswith(_MAY_CHANGE):
                raise ConfigError(
                    f"{name} was {old[section][key]!r} and cannot change to {value!r} in a resumed run: start a new "
                    "run, from its policy if you like (model.path=RUN/policy); these settings may change: "
                    f"{', '.join(part.rstrip('.') for part in _MAY_CHANGE)}"
                )


def changed_settings(config: RunConfig) -> list[str]:
    """Return the names of settings that differ from the defaults for the same model and preset, as section.key.

    A default that follows from another setting, as the window of T-PPO from the longest response, is no difference.
    """
    return _fill_in(config.model_dump(mode="json"), Sources({}, "")).changed()


def as_toml(config: RunConfig) -> str:
    """Return the configuration as a TOML file in which a comment explains each setting."""
    lines = []
    for name, section in config:
        lines += ["", f"[{name}]  # {type(section).__doc__}"]
        for key, value in section.model_dump(mode="json").items():
            field = type(section).model_fields[key]
            description = " ".join((field.description or "").split())
            if not config.model.path and value is not None and BUILT_IN_MODEL.get(name, {}).get(key) == value:
                description += (
                    f" This is for the built-in model; for your own the default is {json.dumps(field.default)}."
                )
            if value is None and key == "explained_variance_gate":
                value = "off"  # else its preset's value is read
            setting = f"# {key} =" if value is None else f"{key} = {toml_value(value)}"  # TOML has no null
            lines += [f"# {description}", setting]
    return "\n".join(lines[1:])


def with_ranks(config: RunConfig, ranks: int) -> RunConfig:
    """Return the configuration for the number of ranks that a launcher started.

    raises    ConfigError if it does not divide the number of experts
    """
    settings, launcher = config.model_dump(mode="json"), "the launcher's WORLD_SIZE"
    settings["parallel"]["ranks"] = ranks
    launched = resolve(settings, Sources({}, launcher))
    launched._sources = {**config.sources, "parallel.ranks": launcher}
    return launched


def _parse_override(override: str) -> tuple[tuple[str, ...], Any]:
    key, equals, text = override.partition("=")
    if not equals or not all(key.split(".")) or key.count(".") >= MAX_DEPTH:
        raise ConfigError(
            f"cannot read the override {excerpt(override, LONGEST_VALUE)}: write section.key=value, as in "
            "update.learning_rate=1e-3"
        )
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        value = text  # a bare word is a string, so that the shell needs no nested quotes
    return tuple(key.split(".")), value


def _set(settings: dict[str, Any], key: tuple[str, ...], value: Any, override: str) -> None:
    section = settings
    for part in key[:-1]:
        section = section.setdefault(part, {})
        if not isinstance(section, dict):
            raise ConfigError(
                f"override {excerpt(override, LONGEST_VALUE)} sets a key of {part!r}, which is a value, not a section"
            )
    section[key[-1]] = value


def _names(settings: Mapping[str, Any]) -> list[str]:
    return [f"{section}.{key}" for section, part in settings.items() if isinstance(part, dict) for key in part]
