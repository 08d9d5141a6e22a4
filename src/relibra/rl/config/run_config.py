"""The configuration of a run, loaded from a TOML file and `section.key=value` overrides. Imports no torch."""

from __future__ import annotations

import copy
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError, model_validator

from relibra.errors import ConfigError
from relibra.printable import excerpt
from relibra.rl.config.built_in_model import BUILT_IN_MODEL, fill_built_in
from relibra.rl.config.consistency import (
    check_groups,
    check_model,
    check_plan,
    check_server,
    check_task,
    check_windows,
)
from relibra.rl.config.context_length import fit_lengths
from relibra.rl.config.messages import MAX_SHOWN, describe_mistakes
from relibra.rl.config.presets import choose_tail_drop, choose_value_warmup, choose_window
from relibra.rl.config.rollout_settings import MAX_LENGTH, RolloutSettings
from relibra.rl.config.section import Section
from relibra.rl.config.settings import (
    AlgorithmSettings,
    CheckpointSettings,
    CriticSettings,
    EvaluationSettings,
    ModelSettings,
    ParallelSettings,
    PlanSettings,
    RunSettings,
    TaskSettings,
    TraceSettings,
    UpdateSettings,
    WarmupSettings,
)

USUAL_RATE = UpdateSettings().learning_rate
HIGH_RATE = 20 * USUAL_RATE
"""Learning rate above which RL post-training destroys a model in a few steps."""
MAX_FILE_BYTES = 1 << 20
LEAST_SERVED_HEAD = 32
"""Width of heads that vLLM's attention on a CPU needs."""
MAX_DEPTH = 8
"""Parts of an override's key; settings have two."""


class RunConfig(Section):
    """All settings of a run."""

    run: RunSettings = RunSettings()
    task: TaskSettings = TaskSettings()
    model: ModelSettings = ModelSettings()
    warmup: WarmupSettings = WarmupSettings()
    rollout: RolloutSettings = RolloutSettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    update: UpdateSettings = UpdateSettings()
    critic: CriticSettings = CriticSettings()
    plan: PlanSettings = PlanSettings()
    parallel: ParallelSettings = ParallelSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    trace: TraceSettings = TraceSettings()
    evaluation: EvaluationSettings = EvaluationSettings()

    @property
    def follows_plans(self) -> bool:
        """Whether experts, if the model has any, are balanced (`relibra.parallel`): by plans, or live."""
        wanted = self.plan.balancer != "static" or self.plan.sums == "canonical"
        return wanted and (self.algorithm.replay != "off" or self.plan.live) and self.parallel.ranks > 1

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, settings: Any) -> Any:
        """Set what was not given and follows from what was, in the order in which one follows from the other."""
        if not isinstance(settings, dict):
            return settings
        settings = {key: _as_given(section) for key, section in settings.items()}
        if not all(isinstance(settings.get(name, {}), dict) for name in ("model", "rollout", "algorithm", "critic")):
            return settings  # refused when the sections are checked
        for fill in (_fill_from_model, _widen_heads, _set_window, _warm_up_value_model):
            settings = fill(settings)
        return settings

    @model_validator(mode="after")
    def _check_sections(self) -> RunConfig:
        mistakes = []
        for check in (
            lambda: check_model(self.model, self.algorithm, self.parallel),
            lambda: check_task(self.task, self.model),
            lambda: check_groups(self.rollout, self.algorithm, self.update),
            lambda: check_windows(self.rollout, self.algorithm, self.parallel),
            lambda: check_plan(self.plan),
            lambda: check_server(self.rollout, self.model, self.parallel),
        ):
            try:
                check()
            except ValueError as error:
                mistakes.append(str(error))
        if mistakes:
            raise ValueError("; also: ".join(mistakes))
        return self


def _fill_from_model(settings: dict[str, Any]) -> dict[str, Any]:
    """Set the values of the built-in model, or lengths that fit the context of another."""
    path = settings.get("model", {}).get("path")
    if not path:
        return fill_built_in(settings)
    return {**settings, "rollout": fit_lengths(path, settings.get("rollout", {}))}


def _widen_heads(settings: dict[str, Any]) -> dict[str, Any]:
    """Set the width of heads of the built-in model where a server samples."""
    model, engine = settings.get("model", {}), settings.get("rollout", {}).get("engine", "embedded")
    if model.get("path") or engine in ("embedded", "serve"):
        return settings
    try:
        sizes = ModelSettings.model_validate(model)
    except ValidationError:  # told when the sections are checked
        return settings
    width = max(LEAST_SERVED_HEAD, sizes.hidden_size // sizes.num_heads)
    return {**settings, "model": {"head_dim": width, **model}}


def _set_window(settings: dict[str, Any]) -> dict[str, Any]:
    """Set the window of preset tppo, and the tokens at its end that do not train."""
    algorithm, rollout = settings.get("algorithm", {}), settings.get("rollout", {})
    longest = rollout.get("max_response", 0)
    window = rollout.get("window", choose_window(longest) if _is_length(longest) else None)
    if algorithm.get("preset") != "tppo" or not _is_length(window, may_be_0=True):
        return settings  # what is out of range is refused later, with its name
    drop = {"tail_drop": choose_tail_drop(window)} if window else {}
    return {**settings, "rollout": {**rollout, "window": window}, "algorithm": {**drop, **algorithm}}


def _warm_up_value_model(settings: dict[str, Any]) -> dict[str, Any]:
    """Set the warm-up of the value model of presets ppo and tppo."""
    if settings.get("algorithm", {}).get("preset") not in ("ppo", "tppo"):
        return settings
    try:
        rollout = RolloutSettings.model_validate(settings.get("rollout", {}))
    except ValidationError:  # told when the sections are checked
        return settings
    warm_up = choose_value_warmup(rollout.max_windows, rollout.responses_per_step)
    return {**settings, "critic": {**warm_up, **settings.get("critic", {})}}


def _as_given(section: Any) -> Any:
    """Return what was given of a section that is an object already, so that the rest is filled like that of a file."""
    return section.model_dump(exclude_unset=True) if isinstance(section, Section) else section


def _is_length(value: Any, *, may_be_0: bool = False) -> bool:
    """Return whether a setting is a number of tokens that responses may have."""
    return type(value) is int and 1 - may_be_0 <= value <= MAX_LENGTH


def describe_training(config: RunConfig) -> list[str]:
    """Return lines that say how a model of the user is trained, with a warning of a high learning rate.

    Of the built-in model only that its policy is not trained: where all steps warm up the value model.
    """
    alone = []
    if config.algorithm.advantage == "gae" and config.run.steps:
        first = config.critic.pretrain_steps
        alone = [
            f"steps 0 to {min(first, config.run.steps) - 1} train the value model alone (critic.pretrain_steps {first})"
        ]
        if first >= config.run.steps:
            alone.append(f"warning: the policy is not trained: run.steps is {config.run.steps}")
        alone = alone if first else []
    if not config.model.path:
        return alone
    rate, model, rollout = config.update.learning_rate, config.model, config.rollout
    saved = "activations recomputed" if model.activation_checkpointing else "activations kept"
    dtype = model.dtype if model.dtype == "float32" else f"{model.dtype} with float32 weights"
    warm_up = f"{config.warmup.steps} warm-up steps" if config.warmup.steps else "no warm-up"
    lines = [
        f"{model.path}: learning rate {rate:g}, {dtype}, {saved}, prompts up to "
        f"{rollout.max_prompt:,} and responses up to {rollout.max_response:,} tokens, {warm_up}"
    ]
    if rate > HIGH_RATE:
        lines.append(
            f"warning: update.learning_rate {rate:g} is more than 20 times what RL post-training usually takes (1e-6): "
            "models lose what they know in a few steps"
        )
    return lines + alone


def load_config(path: Path | None, overrides: Sequence[str] = (), *, base: dict[str, Any] | None = None) -> RunConfig:
    """Load a TOML file (None: defaults) and apply `section.key=value` overrides; the last one wins.

    base      settings to start from without a file: those of a resumed run
    raises    ConfigError naming key, value, allowed values and where the value was set
    """
    try:
        settings = _read_toml(path) if path else copy.deepcopy(base or {})
    except RecursionError as error:
        raise ConfigError("the settings of the run are nested too deeply") from error
    origin: dict[tuple[str, ...], str] = {}
    for override in overrides:
        key, value = _parse_override(override)
        _set(settings, key, value, override)
        origin[key] = f"override {excerpt(override, MAX_SHOWN)}"
    source = str(path) if path else "the defaults"
    try:
        return RunConfig.model_validate(settings)
    except ValidationError as error:
        raise ConfigError(describe_mistakes(error, source, origin, RunConfig)) from error
    except RecursionError as error:
        raise ConfigError(f"the settings in {source} are nested too deeply") from error


_MAY_CHANGE = (
    "run.steps",
    "run.name",
    "run.folder",
    "update.",
    "critic.",
    "plan.",
    "parallel.",
    "checkpoint.",
    "trace.",
)
_MAY_CHANGE_TOO = (
    *("evaluation.stop_at", "task.max_failed_rewards"),
    *("rollout.max_batch", "rollout.url", "rollout.servers", "rollout.server_weights", "rollout.server_options"),
    *("rollout.server_cpus", "rollout.server_gpus", "rollout.server_python"),
    *("rollout.start_seconds", "rollout.timeout_seconds", "rollout.retry_seconds", "rollout.api_key_from"),
)


def check_resumable(before: RunConfig, after: RunConfig) -> None:
    """Check that a resumed run changes only settings that its checkpoint does not depend on.

    raises    ConfigError naming the first other setting that changed
    """
    old, new = before.model_dump(mode="json"), after.model_dump(mode="json")
    for section, settings in new.items():
        for key, value in settings.items():
            name = f"{section}.{key}"
            if value != old[section][key] and not name.startswith((*_MAY_CHANGE, *_MAY_CHANGE_TOO)):
                raise ConfigError(
                    f"{name} was {old[section][key]!r} and cannot change to {value!r} in a resumed run: start a new "
                    "run, from its policy if you like (model.path=RUN/policy); these settings may change: "
                    f"{', '.join(part.rstrip('.') for part in (*_MAY_CHANGE, *_MAY_CHANGE_TOO))}"
                )


def changed_settings(config: RunConfig) -> list[str]:
    """Return the names of settings that differ from the defaults for the same model and preset, as section.key.

    A default that follows from another setting, as the window of T-PPO from the longest response, is no difference.
    """
    same = {"model": {"path": config.model.path}, "algorithm": {"preset": config.algorithm.preset}}
    given, default = config.model_dump(mode="json"), RunConfig.model_validate(same).model_dump(mode="json")
    default["model"]["path"], default["algorithm"]["preset"] = ModelSettings().path, AlgorithmSettings().preset
    return [
        f"{section}.{key}"
        for section, settings in given.items()
        for key, value in settings.items()
        if value != default[section][key] and not _follows(given, section, key)
    ]


def _follows(given: Mapping[str, dict[str, Any]], section: str, key: str) -> bool:
    """Return whether a setting has the value that it gets from all others."""
    others = {**given, section: {name: value for name, value in given[section].items() if name != key}}
    try:
        return bool(RunConfig.model_validate(others).model_dump(mode="json")[section][key] == given[section][key])
    except ValueError:
        return False


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
            setting = f"# {key} =" if value is None else f"{key} = {json.dumps(value)}"  # TOML has no null
            lines += [f"# {description}", setting]
    return "\n".join(lines[1:])


def with_ranks(config: RunConfig, ranks: int) -> RunConfig:
    """Return the configuration for the number of ranks that a launcher started.

    raises    ConfigError if it does not divide the number of experts
    """
    settings = config.model_dump(mode="json")
    settings["parallel"]["ranks"] = ranks
    try:
        return RunConfig.model_validate(settings)
    except ValidationError as error:
        raise ConfigError(describe_mistakes(error, "the launcher's WORLD_SIZE", {}, RunConfig)) from error


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path} has more than {MAX_FILE_BYTES:,} bytes: it is no configuration")
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read the configuration {path}: {error.strerror}; pass a TOML file, or section.key=value overrides"
        ) from error
    except (ValueError, RecursionError) as error:  # also bad UTF-8, numbers of thousands of digits, deep nesting
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def _parse_override(override: str) -> tuple[tuple[str, ...], Any]:
    key, equals, text = override.partition("=")
    if not equals or not all(key.split(".")) or key.count(".") >= MAX_DEPTH:
        raise ConfigError(
            f"cannot read the override {excerpt(override, MAX_SHOWN)}: write section.key=value, as in "
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
                f"override {excerpt(override, MAX_SHOWN)} sets a key of {part!r}, which is a value, not a section"
            )
    section[key[-1]] = value
