"""A process that imports the user's reward, which may load a model, and rates one row before the ranks start."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from relibra.environment import rank_0_environment
from relibra.errors import ConfigError, RelibraError
from relibra.rl.config.settings import TaskSettings
from relibra.rl.tasks.rewards import NEEDS_ANSWER, make_reward
from relibra.rl.tasks.rows import open_rows
from relibra.rl.tasks.task import Prompt

_PROGRAM = (
    "import json, sys; place = json.load(sys.stdin); sys.path[:] = place['path']; "
    "from relibra.rl.tasks.reward_trial import main; main(place)"
)
_RATED = b"rated"
_MOST_SECONDS = 600


def try_reward(settings: TaskSettings, num_ranks: int) -> None:
    """Rate the right answer of the first row, or "42", with the user's reward; raise ConfigError if it cannot."""
    if settings.name != "prompts" or settings.reward in NEEDS_ANSWER:
        return
    place = json.dumps({"path": sys.path, "task": settings.model_dump(mode="json")}).encode()
    with tempfile.TemporaryFile() as said:  # no pipe: processes that the reward leaves behind would keep it open
        command, environment = [sys.executable, "-P", "-c", _PROGRAM], rank_0_environment(num_ranks)
        try:
            done = subprocess.run(
                command, input=place, stdout=said, env=environment, check=False, timeout=_MOST_SECONDS
            )
        except subprocess.TimeoutExpired:
            raise ConfigError(
                f"task.reward {settings.reward!r} has not rated the first row of {str(settings.file)!r} in "
                f"{_MOST_SECONDS} s: it has to return a number for every response"
            ) from None
        said.seek(0)
        message = said.read()
    if message != _RATED:
        raise ConfigError(
            message.decode(errors="replace")
            or f"task.reward {settings.reward!r} ended its process with code {done.returncode} (os._exit, or a crash) "
            f"while it rated the first row of {str(settings.file)!r}: it has to return a number"
        )


def main(place: Mapping[str, Any]) -> None:
    """Rate the first row and tell on stdout how that went; what the reward prints goes to stderr, as in a rank."""
    said, settings, message = os.dup(1), TaskSettings.model_validate(place["task"]), _RATED
    os.dup2(2, 1)
    try:
        assert settings.file is not None, "RunConfig refuses the task without a file"
        rate, rows = make_reward(settings.reward, settings.answer_column), open_rows(settings.file, "task.file")
        row = rows.row(0)
        rate(Prompt(text="", row=row, origin=rows.name(0)), str(row.get(settings.answer_column) or 42))
    except RelibraError as error:
        message = str(error).encode(errors="replace")
    os.write(said, message)
    for child in multiprocessing.active_children():
        child.kill()
    sys.stdout.flush()
    os._exit(0)
