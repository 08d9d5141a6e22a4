"""From settings to a task."""

import doctest

import pytest

from relibra.rl.config.settings import TaskSettings
from relibra.rl.tasks import rewards
from relibra.rl.tasks.make import make_task, settings_without_effect
from relibra.rl.toy import tasks
from relibra.rl.toy.tasks import Arithmetic, Strings


def test_settings_become_the_task_they_name():
    arithmetic = make_task(TaskSettings(max_terms=5, continue_probability=0.5), 3, 8)
    assert arithmetic == Arithmetic(seed=3, max_terms=5, continue_probability=0.5)
    words = make_task(TaskSettings(name="strings", max_terms=7), 3, 8)
    assert words == Strings(seed=3, max_letters=7, continue_probability=0.72)


@pytest.mark.parametrize("module", [rewards, tasks])
def test_docstring_examples_run(module):
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("name", ["strings", "prompts"])
def test_a_tail_that_the_task_does_not_draw_is_told(name):
    [sentence] = settings_without_effect(TaskSettings(name=name, tail_exponent=1.5))
    assert sentence.startswith(f"task.tail_exponent 1.5 has no effect on the task '{name}'")


def test_two_tails_are_told_and_one_is_not():
    [sentence] = settings_without_effect(TaskSettings(tail_exponent=1.5, continue_probability=0.5))
    assert sentence.startswith("task.continue_probability 0.5 has no effect with task.tail_exponent 1.5")
    for settings in (TaskSettings(tail_exponent=1.5), TaskSettings(continue_probability=0.5), TaskSettings()):
        assert not [*settings_without_effect(settings)]
