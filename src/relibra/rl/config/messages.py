"""Refusals of a configuration: all of them at once, where each value was given, and what may have been meant."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError

from relibra.errors import LONGEST_VALUE, ConfigError
from relibra.rl.config.settings import RunConfig

MAX_SHOWN = 8
"""Refusals in one message."""
SAME_NAME = 0.75
"""Least similarity (difflib) at which a name counts as another one misspelt: grop and grpo, not r4 and r3."""
CALLED_HERE: Mapping[str, str] = {
    "lr": "update.learning_rate", "epsilon": "algorithm.clip_low", "epsilon_high": "algorithm.clip_high",
    "beta": "algorithm.kl_coefficient", "kl_coef": "algorithm.kl_coefficient",
    "n": "rollout.responses_per_prompt", "num_generations": "rollout.responses_per_prompt",
    "max_completion_length": "rollout.max_response", "max_new_tokens": "rollout.max_response",
    "max_prompt_length": "rollout.max_prompt", "gradient_checkpointing": "update.activations",
    "lora_rank": "lora.rank", "lora_alpha": "lora.alpha",
    "max_steps": "run.steps", "save_steps": "checkpoint.every", "ppo_epochs": "update.epochs",
}  # fmt: skip
"""Settings of other trainers, and what they are called here."""
_CUT = "responses cut at rollout.max_response are trained on; algorithm.overlong_buffer lowers their reward"
ABSENT: Mapping[str, str] = {
    **dict.fromkeys(("top_p", "top_k", "min_p"), "rollout.temperature is all that shapes sampling"),
    **dict.fromkeys(("max_turns", "max_assistant_turns", "multi_turn"), "a response is one turn, without tools"),
    "use_peft": "lora.rank above 0 trains adapters",
    **dict.fromkeys(("overlong_filter", "mask_truncated_completions"), _CUT),
    **dict.fromkeys(("tensor_parallel_size", "pipeline_parallel_size"), "parallel.ranks shards all layers"),
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler"), "update.lr_warmup_steps, then the rate is constant"),
    **dict.fromkeys(("report_to", "use_wandb"), "metrics.jsonl and tensorboard/ of the run have all numbers"),
    "evaluation.temperature": "evaluations sample at rollout.temperature",
    "evaluation.responses_per_prompt": "an evaluation samples one response per prompt",
    "evaluation.max_response": "evaluations have rollout.max_response",
}
"""Settings of other trainers that relibra lacks, and what it has in their place; by key, or section.key."""


def raise_all(refusals: Sequence[ConfigError]) -> None:
    """Raise the only refusal, or one error with all of them as its `causes`; return where there is none."""
    if len(refusals) == 1:
        raise refusals[0]
    if refusals:
        listed = "; ".join(f"({number}) {one}" for number, one in enumerate(refusals[:MAX_SHOWN], start=1))
        left = len(refusals) - MAX_SHOWN
        more = f"and {left} more" if left > 0 else ""
        together = ConfigError(f"{len(refusals)} mistakes in the settings", allowed=listed, next_step=more)
        together.causes = tuple(refusals)
        raise together


@dataclass(frozen=True)
class Sources:
    """Where settings were given, by section.key, and where all others were."""

    given: Mapping[str, str]
    elsewhere: str

    def of(self, *names: str) -> str:
        """Return where settings were given; a section stands for all of its settings."""
        places = [
            place
            for given, place in self.given.items()
            if any(f"{given}.".startswith(f"{name}.") or f"{name}.".startswith(f"{given}.") for name in names)
        ]
        return " and ".join(dict.fromkeys(places)) or self.elsewhere


def refusals_of_types(error: ValidationError, sources: Sources) -> list[ConfigError]:
    """Return what pydantic refuses: unknown settings, values of another type or out of range."""
    found = [_refusal(dict(one), sources) for one in error.errors()]
    return list({one.what: one for one in reversed(found)}.values())[::-1]  # a union has one per type: keep the first


def _refusal(mistake: Mapping[str, Any], sources: Sources) -> ConfigError:
    key = tuple(str(part) for part in mistake["loc"][:2])
    name, message, got = ".".join(key) or "the configuration", mistake["msg"], mistake["input"]
    where = sources.of(name)
    if mistake["type"] == "extra_forbidden":
        known = {section: list(type(part).model_fields) for section, part in RunConfig()}
        allowed = f"allowed here: {', '.join(known if len(key) == 1 else known[key[0]])}"
        absent = ABSENT.get(name) or ABSENT.get(key[-1])
        next_step = f"not there yet: {absent}" if absent else _question(_likely_settings(key, known))
        return ConfigError(f"{name} is not a setting", where=where, allowed=allowed, next_step=next_step)
    if mistake["type"] == "value_error":  # a check of ours, whose message says what it got: the value may be an API key
        where = "the command line" if "override " in where else where
        return ConfigError(name, where=where, allowed=message.removeprefix("Value error, "))
    meant = _nearest(got, re.findall(r"'([^']*)'", message)) if mistake["type"] == "literal_error" else ""
    allowed = message[0].lower() + message[1:]
    return ConfigError(name, got=got, where=where, allowed=allowed, next_step=_question(meant))


def _question(meant: str) -> str:
    return f"did you mean {meant}?" if meant else ""


def _likely_settings(key: tuple[str, ...], known: Mapping[str, Sequence[str]]) -> str:
    """Return the settings that an unknown key likely stands for: a slip, the same name elsewhere, another trainer's.

    A name in [evaluation] or [warmup] means another thing than the same name elsewhere.
    """
    section, name = key[0], key[-1]
    near = _nearest(name, list(known) if len(key) == 1 else known[section])
    if near:
        return near if len(key) == 1 else f"{section}.{near}"
    own = section in ("evaluation", "warmup") and len(key) > 1
    elsewhere = [] if own else [f"{other}.{name}" for other, names in known.items() if name in names]
    return " or ".join(elsewhere) or CALLED_HERE.get(name, "")


def _nearest(given: object, allowed: Sequence[str]) -> str:
    """Return the allowed name that a given one misspells, whatever its case; "": there is none."""
    names, text = {name.lower(): name for name in allowed}, given.lower() if isinstance(given, str) else ""
    near = get_close_matches(text[:LONGEST_VALUE], names, n=1, cutoff=SAME_NAME)
    return names[near[0]] if near else ""
