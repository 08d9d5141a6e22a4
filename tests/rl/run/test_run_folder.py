"""The run folder: created once, locked by one process, resumed only with a checkpoint."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from relibra.environment import LaunchedRank
from relibra.errors import ConfigError
from relibra.rl.config.run_config import RunConfig, load_config
from relibra.rl.run import run_folder
from relibra.rl.run.run_folder import (
    create_run_folder,
    has_checkpoint,
    latest_checkpoint,
    locked_run_folder,
    open_launched,
    read_settings,
    remove_if_unused,
)


def config_of(folder, *overrides):
    return load_config(None, [f"run.folder={folder}", *overrides])


HOLD = """
import os, signal, sys
from pathlib import Path
from relibra.rl.run.run_folder import locked_run_folder
with locked_run_folder(Path(sys.argv[1])):
    helper = os.fork()  # as a reward may
    if helper:
        print(helper, flush=True)
    signal.pause()
"""


def test_run_folder_has_one_writer_and_is_free_once_that_dies(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "LOCK_SECONDS", 0.2)
    with subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE, text=True) as other:
        helper = int(other.stdout.readline())
        with pytest.raises(ConfigError, match="another process trains in the run folder"), locked_run_folder(tmp_path):
            pass
        monkeypatch.setattr(run_folder, "LOCK_SECONDS", 60.0)
        other.kill()
        with locked_run_folder(tmp_path):
            assert other.wait() < 0
        os.kill(helper, signal.SIGKILL)


def test_a_second_run_of_the_same_name_gets_a_number(tmp_path):
    made = [create_run_folder(config_of(tmp_path / "runs", "run.name=a")) for _ in range(3)]
    assert [path.name for path in made] == ["a", "a-2", "a-3"]
    about = json.loads((made[1] / "config.json").read_text())
    assert about["versions"].keys() >= {"relibra", "torch", "transformers", "python"}
    about.pop("versions")
    assert about.pop("changed") == ["run.name", "run.folder"]
    assert "run.name=a" in (made[1] / "settings.txt").read_text().splitlines()[0]
    assert RunConfig.model_validate(about) == config_of(tmp_path / "runs", "run.name=a")


def test_the_path_of_a_run_is_absolute(tmp_path, monkeypatch):
    """A reward function may change the working folder."""
    monkeypatch.chdir(tmp_path)
    config = load_config(None, ["run.folder=runs", "run.name=a"])
    assert create_run_folder(config) == tmp_path / "runs" / "a"
    launched = LaunchedRank(rank=0, num_ranks=1, local_rank=0, num_local_ranks=1, launch="one", restarts=0)
    (made, _), (again, _) = open_launched(config, None, launched), open_launched(config, Path("runs/a"), launched)
    assert (made, again) == (tmp_path / "runs" / "a-2", tmp_path / "runs" / "a")


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot create the run folder .*/file/run \(run.folder\): Not a directory"):
        create_run_folder(config_of(tmp_path / "file"))
    (tmp_path / "run").write_text("")
    with pytest.raises(ConfigError, match=r"cannot create the run folder .*/run: a file has that name"):
        create_run_folder(config_of(tmp_path))


def test_only_a_run_with_a_checkpoint_can_go_on(tmp_path):
    run = create_run_folder(config_of(tmp_path, "update.learning_rate=1e-5"))
    assert not has_checkpoint(run)
    with pytest.raises(ConfigError, match=rf"cannot resume {run}: it has no checkpoints/step-\*"):
        read_settings(run)
    (run / "checkpoints" / "step-00000").mkdir(parents=True)
    assert has_checkpoint(run)
    settings = read_settings(run)
    assert RunConfig.model_validate(settings).update.learning_rate == 1e-5
    about = json.loads((run / "config.json").read_text())
    about["versions"]["relibra"] = "0.1.0"
    about["warmup"]["slip"] = 0.1
    (run / "config.json").write_text(json.dumps(about))
    with pytest.raises(ConfigError, match=rf"cannot resume {run}: relibra 0\.1\.0 made this run, .*{run}/policy"):
        read_settings(run)
    (run / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"its config\.json cannot be read"):
        read_settings(run)
    (tmp_path / "partial" / "checkpoints" / ".step-00002.partial").mkdir(parents=True)
    assert not has_checkpoint(tmp_path / "partial"), "a checkpoint that was never finished is none"


@pytest.mark.parametrize(
    ("left", "text", "kept"),
    [
        ((), "", False),
        (("metrics.jsonl", "tensorboard/events", "traces/step-00000/a.safetensors", ".lock"), "", False),
        (("checkpoints/.step-00000.partial/state.json",), "", False),
        (("checkpoints/step-00000/state.json",), "", True),
        (("policy/config.json",), "", True),
        (("stacks/rank-00000.txt",), "", False),
        (("metrics.jsonl",), "{}", True),  # a finished step
        (("stacks/rank-00000.txt",), "Thread", True),  # of a rank that hung
    ],
)
def test_run_that_failed_before_any_result_leaves_no_folder(left, text, kept, tmp_path):
    run = create_run_folder(config_of(tmp_path))
    for name in left:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(text)
    remove_if_unused(run)
    assert run.exists() == kept
    remove_if_unused(run)


def test_the_latest_checkpoint_is_that_after_the_most_steps(tmp_path):
    assert latest_checkpoint(tmp_path) is None
    (tmp_path / "checkpoints" / "step-7").mkdir(parents=True)
    assert not has_checkpoint(tmp_path), "no checkpoint is named so"
    for name in ("step-00002", "step-00010", "step-00011.bak", ".step-00012.partial", "step-100000"):
        (tmp_path / "checkpoints" / name).mkdir()
    assert latest_checkpoint(tmp_path) == "step-100000"


def test_the_configuration_names_the_settings_that_were_changed(tmp_path):
    run = create_run_folder(config_of(tmp_path, "update.learning_rate=1e-3", "plan.slots=2", "plan.balancer=relibra"))
    changed = json.loads((run / "config.json").read_text())["changed"]
    assert changed == ["run.folder", "update.learning_rate", "plan.slots"]
    (run / "checkpoints" / "step-00001").mkdir(parents=True)
    assert load_config(None, base=read_settings(run)).plan.slots == 2
