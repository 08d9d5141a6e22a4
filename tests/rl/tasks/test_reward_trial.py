"""A user's reward rates one row in a process of its own before a run starts."""

import json
import sys

import pytest

from relibra.errors import ConfigError
from relibra.rl.config.run_config import load_config
from relibra.rl.run import launch as launching
from relibra.rl.run.launch import launch
from relibra.rl.tasks.reward_trial import try_reward

MODULE = """
import atexit, os, sys
from concurrent.futures import ProcessPoolExecutor

def good(response, row):
    print("rated", response)
    os.chdir("/")
    atexit.register(os.abort)
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("0", "3")
    return ProcessPoolExecutor(1).submit(len, response).result() / row["level"]

def leaves(response, row): os._exit(0)

def later(response, row): return wrapped(response)

async def wrapped(response): return 1
"""


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """Return a function that makes the settings of a run with one of the rewards above, in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "a_tried_reward.py").write_text(MODULE)
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": "?", "answer": a, "level": 2}) + "\n" for a in "42")
    )
    words = ("task.name=prompts", "task.file=rows.jsonl", f"model.path={tmp_path}", f"run.folder={tmp_path / 'runs'}")
    return lambda name: load_config(None, [*words, f"task.reward=a_tried_reward:{name}"])


def test_a_reward_that_works_is_left_where_it_was_imported(settings, capfd):
    try_reward(settings("good").task, num_ranks=3)
    assert "rated 4" in capfd.readouterr().err
    assert "a_tried_reward" not in sys.modules


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("later", r"at rows\.jsonl, line 1, response '4': returned <coroutine object wrapped.*; a reward is a number"),
        ("leaves", r"ended its process with code 0 .* the first row of 'rows\.jsonl'"),
    ],
)
def test_a_reward_that_cannot_work_is_refused_before_the_run(settings, name, says, monkeypatch, tmp_path):
    monkeypatch.setattr(launching, "check_model_path", lambda _path: None)
    monkeypatch.setattr(launching, "check_expert_ranks", lambda *_: None)
    with pytest.raises(ConfigError, match=rf"^task\.reward .*{says}"):
        launch(settings(name))
    assert not (tmp_path / "runs").exists()
