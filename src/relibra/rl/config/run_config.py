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
from relibra.rl.config.defaults import BUILT_IN_MODEL, FILLS
from relibra.rl.config.messages import MAX_SHOWN, describe_mistakes
from relibra.rl.config.rollout_settings import RolloutSettings, Section
from relibra.rl.config.settings import (
    NO_EXPERTS,
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
        for fill in FILLS:
            settings = fill(settings)
        return settings

    @model_validator(mode="after")
    def _check_sections(self) -> RunConfig:
        mistakes = []
        for check in (_check_model, _check_task, _check_groups, _check_windows, _check_plan, _check_server):
            try:
                check(self)
            except ValueError as error:
                mistakes.append(str(error))
        if mistakes:
            raise ValueError("; also: ".join(mistakes))
        return self


def _check_model(config: RunConfig) -> None:
    """Check the built-in model; the sizes of others are known only when they are loaded."""
    model, algorithm, parallel = config.model, config.algorithm, config.parallel
    if model.path:
        return
    if not model.num_experts and algorithm.replay != "off":
        raise ValueError(
            f"algorithm.replay {algorithm.replay!r} needs a model with experts, and model.num_experts is 0: set "
            f"algorithm.replay=off; {NO_EXPERTS}"
        )
    if model.num_experts % parallel.ranks:
        raise ValueError(
            f"parallel.ranks {parallel.ranks} does not divide model.num_experts {model.num_experts}: every rank needs "
            "the same number of experts"
        )


def _check_task(config: RunConfig) -> None:
    """Check that prompts of a file have a file and a model."""
    task, model = config.task, config.model
    if task.name != "prompts":
        return
    if task.file is None:
        raise ValueError("task.name 'prompts' needs task.file: a .jsonl or .parquet file with one prompt per row")
    if not model.path:
        raise ValueError("task.name 'prompts' needs model.path: the built-in model knows only the built-in tasks")


def _check_groups(config: RunConfig) -> None:
    """Check that every mini-batch has responses, and whole groups if advantages compare a group."""
    rollout, algorithm, update = config.rollout, config.algorithm, config.update
    if algorithm.advantage == "gae":
        if update.mini_batches > rollout.responses_per_step:
            raise ValueError(
                f"update.mini_batches {update.mini_batches} exceeds the {rollout.responses_per_step} responses of a "
                "step (rollout.prompts_per_step x rollout.responses_per_prompt)"
            )
        return
    if rollout.responses_per_prompt < 2:
        raise ValueError(
            "rollout.responses_per_prompt 1 does not work with algorithm.advantage 'group', which compares responses "
            "to the same prompt: set 2 or more, or use preset 'ppo'"
        )
    if update.mini_batches > rollout.prompts_per_step:
        raise ValueError(
            f"update.mini_batches {update.mini_batches} exceeds rollout.prompts_per_step {rollout.prompts_per_step}: a "
            "mini-batch holds at least one whole group"
        )


def _check_windows(config: RunConfig) -> None:
    """Check what depends on windows: responses that end in a later step than they begin."""
    rollout, algorithm, parallel = config.rollout, config.algorithm, config.parallel
    window, longest = rollout.window_tokens, rollout.max_response
    if window < longest and algorithm.advantage == "group":
        raise ValueError(
            f"rollout.window {window} is below rollout.max_response {longest}, which does not work with "
            "algorithm.advantage 'group': unfinished responses have no reward; use preset 'tppo', or window 0"
        )
    if window < longest and algorithm.group_filter != "off":
        raise ValueError(
            f"algorithm.group_filter {algorithm.group_filter!r} compares the responses of a group, and with "
            f"rollout.window {window} below rollout.max_response {longest} they end in different steps: set "
            "algorithm.group_filter=off"
        )
    if rollout.refill and window == longest:
        raise ValueError(
            f"rollout.refill needs rollout.window below rollout.max_response {longest}: without windows a step ends "
            "when all its responses end; set a window, or rollout.refill=false"
        )
    of_rank = -(-rollout.responses_per_step // parallel.ranks)
    if rollout.refill and of_rank > rollout.max_batch:
        raise ValueError(
            f"rollout.max_batch {rollout.max_batch} is below the {of_rank} responses of a rank "
            "(rollout.prompts_per_step x rollout.responses_per_prompt / parallel.ranks), and rollout.refill decodes "
            "all of them at once: increase it, or set rollout.refill=false"
        )
    if window < longest and algorithm.tail_drop >= window:
        raise ValueError(
            f"algorithm.tail_drop {algorithm.tail_drop} leaves nothing of rollout.window {window}: set a smaller one"
        )
    if algorithm.overlong_buffer > longest:
        raise ValueError(
            f"algorithm.overlong_buffer {algorithm.overlong_buffer} exceeds rollout.max_response {longest}"
        )


def _check_server(config: RunConfig) -> None:
    """Check that there are servers where they sample, and that the folder of new weights is not that of the model."""
    rollout, model, parallel = config.rollout, config.model, config.parallel
    on_ray = parallel.launcher == "ray"
    if rollout.engine in ("sglang", "vllm") and not rollout.url and not (on_ray and rollout.starts_servers):
        alone = "; with parallel.launcher=ray a run starts vLLM itself" if rollout.engine == "vllm" else ""
        raise ValueError(
            f"rollout.engine {rollout.engine!r} needs rollout.url (the server) and rollout.server_weights (a folder "
            f"that both see){alone}"
        )
    if rollout.servers > 1 and not (on_ray and rollout.starts_servers):
        raise ValueError(
            f"rollout.servers {rollout.servers} are started on Ray only, with rollout.engine=serve, or vllm without "
            "rollout.url: set parallel.launcher=ray, or leave it out"
        )
    if rollout.engine == "embedded" or not model.path or rollout.server_weights is None:
        return
    if rollout.server_weights.expanduser().resolve() == Path(model.source).resolve():
        raise ValueError(
            f"rollout.server_weights {str(rollout.server_weights)!r} is the folder of model.path: set it to a folder "
            "of its own, in which new weights are written"
        )


def _check_plan(config: RunConfig) -> None:
    """Check the name of the balancer."""
    name = config.plan.balancer
    if name in ("relibra", "static", "live") or ":" in name:
        return  # importing the others loads numba, and of the user's runs his code: `find_balancer` checks that
    from relibra.planning.registry import find_balancer

    find_balancer(name)


def _as_given(section: Any) -> Any:
    """Return what was given of a section that is an object already, so that the rest is filled like that of a file."""
    return section.model_dump(exclude_unset=True) if isinstance(section, Section) else section


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
    *("run.steps", "run.name", "run.folder", "update.", "critic.", "plan.", "parallel.", "checkpoint.", "trace."),
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
