"""The configuration of a run: frozen pydantic models, TOML files, dotted overrides. No torch in here."""

from __future__ import annotations

import copy
import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError, model_validator

from relibra.errors import ConfigError
from relibra.rl.config.settings import (
    AlgorithmSettings,
    CheckpointSettings,
    CriticSettings,
    EvaluationSettings,
    ModelSettings,
    ParallelSettings,
    PlanSettings,
    RolloutSettings,
    RunSettings,
    Section,
    TaskSettings,
    UpdateSettings,
    WarmupSettings,
)


class RunConfig(Section):
    """Everything a run is made of."""

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
    evaluation: EvaluationSettings = EvaluationSettings()

    @model_validator(mode="after")
    def _parts_fit(self) -> RunConfig:
        for problem in (
            self._misfit_of_model(),
            self._misfit_of_task(),
            self._misfit_of_groups(),
            self._misfit_of_windows(),
            self._misfit_of_plan(),
        ):
            if problem:
                raise ValueError(problem)
        return self

    def _misfit_of_model(self) -> str | None:
        if self.model.path:
            return None  # its sizes are known when it is loaded
        if not self.model.num_experts:
            if self.algorithm.replay != "off":
                return (
                    f"algorithm.replay {self.algorithm.replay!r} needs a model with experts, and model.num_experts is "
                    "0: set algorithm.replay=off"
                )
        elif self.model.num_experts % self.parallel.ranks:
            return (
                f"parallel.ranks {self.parallel.ranks} does not divide model.num_experts {self.model.num_experts}: "
                "every rank holds the same number of experts"
            )
        return None

    def _misfit_of_task(self) -> str | None:
        if self.task.name != "prompts":
            return None
        if self.task.file is None:
            return "task.name 'prompts' needs task.file: a .jsonl or .parquet file with one prompt per row"
        if not self.model.path:
            return "task.name 'prompts' needs model.path: the built-in model knows only its own tasks"
        return None

    def _misfit_of_groups(self) -> str | None:
        rollout, mini_batches = self.rollout, self.update.mini_batches
        if self.algorithm.advantage == "gae":
            if mini_batches > self.rollout.responses_per_step:
                return (
                    f"update.mini_batches {mini_batches} exceeds the {rollout.responses_per_step} responses of a step "
                    "(rollout.prompts_per_step x rollout.responses_per_prompt)"
                )
            return None
        if rollout.responses_per_prompt < 2:
            return (
                "rollout.responses_per_prompt 1 with algorithm.advantage 'group': a response is compared with others "
                "to the same prompt; ask for 2 or more, or take preset 'ppo'"
            )
        if mini_batches > rollout.prompts_per_step:
            return (
                f"update.mini_batches {mini_batches} exceeds rollout.prompts_per_step {rollout.prompts_per_step}: a "
                "mini-batch holds at least one whole group"
            )
        return None

    def _misfit_of_plan(self) -> str | None:
        if self.plan.balancer in ("relibra", "static"):
            return None  # the others load numba
        from relibra.planning import BALANCERS

        if self.plan.balancer not in (*BALANCERS, "auto"):
            return f"plan.balancer {self.plan.balancer!r} is unknown: allowed are {', '.join([*BALANCERS, 'auto'])}"
        return None

    def _misfit_of_windows(self) -> str | None:
        window, longest = self.rollout.window_tokens, self.rollout.max_response
        if window < longest and self.algorithm.advantage == "group":
            return (
                f"rollout.window {window} is below rollout.max_response {longest}, which algorithm.advantage 'group' "
                "cannot train: the reward of an unfinished response is not known; take preset 'tppo', or window 0"
            )
        if window < longest and self.algorithm.group_filter != "off":
            return (
                f"algorithm.group_filter {self.algorithm.group_filter!r} compares the responses of a group, and with "
                f"rollout.window {window} below rollout.max_response {longest} they do not finish together: set it to "
                "off"
            )
        if self.rollout.refill and window == longest:
            return (
                f"rollout.refill needs rollout.window below rollout.max_response {longest}: without windows a step "
                "waits for its responses, and places that fall free stay so; set a window, or rollout.refill=false"
            )
        own = -(-self.rollout.responses_per_step // self.parallel.ranks)
        if self.rollout.refill and own > self.rollout.max_batch:
            return (
                f"rollout.max_batch {self.rollout.max_batch} is below the {own} responses of a rank "
                "(rollout.prompts_per_step x rollout.responses_per_prompt / parallel.ranks), and rollout.refill "
                "decodes all of them at once: raise it, or set rollout.refill=false"
            )
        if window < longest and self.algorithm.tail_drop >= window:
            drop = self.algorithm.tail_drop
            return f"algorithm.tail_drop {drop} leaves nothing of rollout.window {window}: set it below"
        if self.algorithm.overlong_buffer > longest:
            return f"algorithm.overlong_buffer {self.algorithm.overlong_buffer} exceeds rollout.max_response {longest}"
        return None


def load_config(path: Path | None, overrides: Sequence[str] = (), *, base: dict[str, Any] | None = None) -> RunConfig:
    """Read a TOML file (None: defaults) and apply `section.key=value` overrides, the last one wins.

    base      settings instead of a file: those of a run that goes on
    raises    ConfigError naming key, value, what is allowed and where it was set
    """
    settings = _read_toml(path) if path else copy.deepcopy(base or {})
    origin: dict[tuple[str, ...], str] = {}
    for override in overrides:
        key, value = _parse_override(override)
        _set(settings, key, value, override)
        origin[key] = f"override {override!r}"
    try:
        return RunConfig.model_validate(settings)
    except ValidationError as error:
        raise ConfigError(_sentence(error, str(path) if path else "the defaults", origin)) from error


_MAY_CHANGE = ("run.steps", "run.name", "run.folder", "update.", "critic.", "plan.", "parallel.", "checkpoint.")
_MAY_CHANGE_TOO = ("evaluation.stop_at", "rollout.max_batch", "rollout.url", "rollout.server_weights")


def check_resumable(before: RunConfig, after: RunConfig) -> None:
    """Make sure that a run goes on as what it is: settings that what was sampled or saved rests on have to stay.

    raises    ConfigError naming the first setting that may not change
    """
    old, new = before.model_dump(mode="json"), after.model_dump(mode="json")
    for section, settings in new.items():
        for key, value in settings.items():
            name = f"{section}.{key}"
            if value != old[section][key] and not name.startswith((*_MAY_CHANGE, *_MAY_CHANGE_TOO)):
                raise ConfigError(
                    f"{name} was {old[section][key]!r} and cannot become {value!r} in a run that goes on: start a new "
                    "one, from its policy if you like (model.path=RUN/policy); what may change are "
                    f"{', '.join(part.rstrip('.') for part in (*_MAY_CHANGE, *_MAY_CHANGE_TOO))}"
                )


def as_toml(config: RunConfig) -> str:
    """Return the configuration as a TOML file that explains every setting and can be edited and run."""
    lines = []
    for name, section in config:
        lines += ["", f"[{name}]  # {type(section).__doc__}"]
        for key, value in section.model_dump(mode="json").items():
            description = " ".join((type(section).model_fields[key].description or "").split())
            setting = f"# {key} =" if value is None else f"{key} = {json.dumps(value)}"  # TOML has no null
            lines += [f"# {description}", setting]
    return "\n".join(lines[1:])


def with_ranks(config: RunConfig, ranks: int) -> RunConfig:
    """Return the configuration for as many ranks as a launcher started.

    raises    ConfigError when they do not divide the experts
    """
    settings = config.model_dump(mode="json")
    settings["parallel"]["ranks"] = ranks
    try:
        return RunConfig.model_validate(settings)
    except ValidationError as error:
        raise ConfigError(_sentence(error, "the launcher's WORLD_SIZE", {})) from error


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read the configuration {path}: {error.strerror}; name a TOML file, or write section.key=value"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def _parse_override(override: str) -> tuple[tuple[str, ...], Any]:
    key, equals, text = override.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(
            f"cannot read the override {override!r}: write section.key=value, as in update.learning_rate=1e-3"
        )
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a string, so that the shell's quotes need no quotes
    return tuple(key.split(".")), value


def _set(settings: dict[str, Any], key: tuple[str, ...], value: Any, override: str) -> None:
    section = settings
    for part in key[:-1]:
        section = section.setdefault(part, {})
        if not isinstance(section, dict):
            raise ConfigError(f"override {override!r} goes into {part!r}, which is a value, not a section")
    section[key[-1]] = value


def _sentence(error: ValidationError, source: str, origin: dict[tuple[str, ...], str]) -> str:
    first = error.errors()[0]
    key = tuple(str(part) for part in first["loc"])
    between_settings = first["type"] == "value_error"  # a rule of a section: its message names the settings
    message = first["msg"].removeprefix("Value error, ")
    overrides = [
        override
        for name, override in origin.items()
        if name[: len(key)] == key[: len(name)] and (not between_settings or name[-1] in message)
    ]
    where = " and ".join(overrides) or source
    name = ".".join(key) or "the configuration"
    if first["type"] == "extra_forbidden":
        return f"{name} is not a setting (in {where}); {_known(key)}"
    got = "" if between_settings else f", got {first['input']!r}"
    return f"{name}{got} (in {where}): {message[0].lower()}{message[1:]}"


def _known(key: tuple[str, ...]) -> str:
    section: type[BaseModel] = RunConfig
    for part in key[:-1]:
        annotation = section.model_fields[part].annotation
        assert isinstance(annotation, type), f"section {part} is not a class"
        section = annotation
    return f"allowed here: {', '.join(section.model_fields)}"
