"""Make the task of a run from its settings."""

from __future__ import annotations

from collections.abc import Iterator

from relibra.rl.config.settings import TaskSettings
from relibra.rl.tasks.prompts import open_files, open_prompts
from relibra.rl.tasks.rewards import check_reward
from relibra.rl.tasks.task import Task
from relibra.rl.toy.tasks import Arithmetic, Strings


def make_task(settings: TaskSettings, seed: int, evaluation_prompts: int) -> Task:
    """Return the task of a run.

    seed                  of the run; decides the order of prompts
    evaluation_prompts    prompts to hold out of task.file if there is no task.evaluation_file; 0: none
    raises                ConfigError if the user's file, row or function cannot be used
    """
    if settings.name == "arithmetic":
        return Arithmetic(seed, settings.max_terms, settings.continue_probability, settings.tail_exponent)
    if settings.name == "strings":
        return Strings(seed, settings.max_terms, settings.continue_probability)
    return open_prompts(settings, seed, evaluation_prompts)


def check_task(settings: TaskSettings, evaluation_prompts: int) -> None:
    """Raise ConfigError as `make_task` does, without importing the module of the user's reward.

    Importing it may load a model, and the process that starts ranks and waits for them needs none.
    """
    if settings.name == "prompts":
        check_reward(settings.reward)
        open_files(settings, evaluation_prompts)


def settings_without_effect(settings: TaskSettings) -> Iterator[str]:
    """Yield a warning where tail_exponent, or continue_probability beside it, has no effect."""
    if not settings.tail_exponent:
        return
    if settings.name != "arithmetic":
        yield (
            f"task.tail_exponent {settings.tail_exponent:g} has no effect on the task {settings.name!r}: only "
            "'arithmetic' draws lengths from a power law"
        )
    elif settings.continue_probability != TaskSettings.model_fields["continue_probability"].default:
        yield (
            f"task.continue_probability {settings.continue_probability:g} has no effect with task.tail_exponent "
            f"{settings.tail_exponent:g}, which decides the lengths: set only one of them"
        )
