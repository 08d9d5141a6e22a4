"""The configuration of a run: frozen pydantic models, TOML files, dotted overrides. No torch in here."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from relibra.errors import ConfigError


class Section(BaseModel):
    """A group of settings; unknown keys are refused, values never change."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class RunSettings(Section):
    """What the run is called and how long it goes on."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run folder; a number is added when it exists."""
    folder: Path = Path("runs")
    """Folder that holds run folders."""
    seed: int = Field(0, ge=0)
    """Everything random follows from it: weights, problems, samples."""
    steps: int = Field(60, ge=0)
    """RL steps: rollout, reward, recompute, update, weight sync."""


class TaskSettings(Section):
    """Chains of additions whose length has a long tail."""

    max_terms: int = Field(12, ge=2, le=64)
    """Longest chain."""
    continue_probability: float = Field(0.72, ge=0, lt=1)
    """Chance that a chain goes on after each term from the second: the tail of the length distribution."""


class ModelSettings(Section):
    """A tiny Qwen3-MoE-shaped policy, built from configuration."""

    hidden_size: int = Field(64, ge=8, multiple_of=8)
    """Width; experts are half as wide inside."""
    num_layers: int = Field(3, ge=1)
    """Decoder layers, all of them MoE."""
    num_heads: int = Field(4, ge=2, multiple_of=2)
    """Attention heads; half as many for keys and values."""
    num_experts: int = Field(16, ge=1)
    """Routed experts per layer."""
    experts_per_token: int = Field(2, ge=1)
    """Choices per token, K."""

    @model_validator(mode="after")
    def _sizes_fit(self) -> ModelSettings:
        if self.experts_per_token > self.num_experts:
            raise ValueError(f"experts_per_token {self.experts_per_token} exceeds num_experts {self.num_experts}")
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(f"hidden_size {self.hidden_size} must be a multiple of 2 x num_heads {self.num_heads}")
        return self


class WarmupSettings(Section):
    """Supervised steps before RL, on demonstrations that slip now and then."""

    steps: int = Field(320, ge=0)
    """Optimizer steps."""
    batch: int = Field(128, ge=1)
    """Demonstrations per step, over all ranks."""
    learning_rate: float = Field(5e-3, gt=0)
    """AdamW's at its height: a ramp over the first 20 steps, then a linear fall to a tenth."""
    slip: float = Field(0.3, ge=0, le=1)
    """Chance, at the end, of a wrong sum at each link of a demonstration; RL has to unlearn it. The first half of the
    warm-up is without slips, then the chance grows evenly."""


class RolloutSettings(Section):
    """How responses are sampled."""

    prompts_per_step: int = Field(32, ge=1)
    """Problems per step, over all ranks."""
    responses_per_prompt: int = Field(8, ge=2)
    """Responses to each problem: the group that an advantage is measured in."""
    max_new_tokens: int = Field(80, ge=1)
    """Longest response."""
    temperature: float = Field(1.0, gt=0)
    """Of sampling; log-probs are those of the tempered policy, in rollout and in training."""


class UpdateSettings(Section):
    """How the policy learns from a step's responses."""

    learning_rate: float = Field(2e-4, gt=0)
    """AdamW's."""
    mini_batches: int = Field(8, ge=1)
    """Optimizer steps per rollout batch."""
    micro_batch_tokens: int = Field(2048, ge=1)
    """Tokens, padding included, that one rank feeds at once; a longer sample goes alone."""
    clip_low: float = Field(0.2, gt=0, lt=1)
    """Lower clip of the probability ratio is 1 - clip_low."""
    clip_high: float = Field(0.28, gt=0)
    """Upper clip of the probability ratio is 1 + clip_high."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are scaled down to this global norm."""
    replay: Literal["off", "R3"] = "R3"
    """"R3": training takes the experts that the rollout took (arXiv 2510.11370). "off": it routes anew."""


class ParallelSettings(Section):
    """Processes of the run; expert parallelism and FSDP both span all of them."""

    ranks: int = Field(2, ge=1)
    """Processes; they must divide the experts. `torchrun` overrides it."""
    threads_per_rank: int = Field(1, ge=1)
    """CPU threads of each process."""
    timeout_seconds: float = Field(120.0, gt=0)
    """How long a rank waits for its peers in one collective before the run ends with an error."""


class RunConfig(Section):
    """Everything a run is made of."""

    run: RunSettings = RunSettings()
    task: TaskSettings = TaskSettings()
    model: ModelSettings = ModelSettings()
    warmup: WarmupSettings = WarmupSettings()
    rollout: RolloutSettings = RolloutSettings()
    update: UpdateSettings = UpdateSettings()
    parallel: ParallelSettings = ParallelSettings()

    @model_validator(mode="after")
    def _parts_fit(self) -> RunConfig:
        if self.model.num_experts % self.parallel.ranks:
            raise ValueError(
                f"parallel.ranks {self.parallel.ranks} does not divide model.num_experts {self.model.num_experts}: "
                "every rank holds the same number of experts"
            )
        if self.update.mini_batches > self.rollout.prompts_per_step:
            raise ValueError(
                f"update.mini_batches {self.update.mini_batches} exceeds rollout.prompts_per_step "
                f"{self.rollout.prompts_per_step}: a mini-batch holds at least one whole group"
            )
        return self


def load_config(path: Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a TOML file (None: defaults) and apply `section.key=value` overrides, the last one wins.

    raises    ConfigError naming key, value, what is allowed and where it was set
    """
    settings = _read_toml(path) if path else {}
    origin: dict[tuple[str, ...], str] = {}
    for override in overrides:
        key, value = _parse_override(override)
        _set(settings, key, value, override)
        origin[key] = f"override {override!r}"
    try:
        return RunConfig.model_validate(settings)
    except ValidationError as error:
        raise ConfigError(_sentence(error, str(path) if path else "the defaults", origin)) from error


def as_toml(config: RunConfig) -> str:
    """Return the configuration as a TOML file that explains every setting and can be edited and run."""
    lines = []
    for name, section in config:
        lines += ["", f"[{name}]  # {type(section).__doc__}"]
        for key, value in section.model_dump(mode="json").items():
            description = " ".join((type(section).model_fields[key].description or "").split())
            lines += [f"# {description}", f"{key} = {json.dumps(value)}"]
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
