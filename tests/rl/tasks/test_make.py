"""From settings to a task."""

import doctest

import pytest

from relibra.rl.settings import TaskSettings
from relibra.rl.tasks import lengths, rewards, rows, strings
from relibra.rl.tasks.arithmetic import Arithmetic
from relibra.rl.tasks.make import make_task
from relibra.rl.tasks.strings import Strings


def test_settings_become_the_task_they_name():
    arithmetic = make_task(TaskSettings(max_terms=5, continue_probability=0.5), 3, 8)
    assert arithmetic == Arithmetic(seed=3, max_terms=5, continue_probability=0.5)
    words = make_task(TaskSettings(name="strings", operation="sort", max_letters=7), 3, 8)
    assert words == Strings(seed=3, operation="sort", max_letters=7, continue_probability=0.72)


@pytest.mark.parametrize("module", [lengths, rewards, rows, strings])
def test_docstring_examples_run(module):
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0
