"""The run folder: made once, written line by line, and cut back to a checkpoint."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest

from relibra.errors import ConfigError
from relibra.reporting.data.metrics import read_metrics
from relibra.rl.config.run_config import RunConfig, load_config
from relibra.rl.run import run_folder
from relibra.rl.run.run_folder import (
    MetricsLog,
    SamplesLog,
    create_run_folder,
    forget_steps_from,
    has_checkpoint,
    held_run_folder,
    open_run_folder,
    trace_folder,
)
from relibra.rl.toy.arithmetic import Arithmetic
from relibra.rl.toy.character_tokenizer import CharacterTokenizer
from tests.rl.joined import alone
from tests.rl.made_up import response_of

TASK = Arithmetic(seed=0, max_terms=6, continue_probability=0.5)
TOKENIZER = CharacterTokenizer(TASK.characters)


def config_of(folder, *overrides):
    return load_config(None, [f"run.folder={folder}", *overrides])


HOLD = """
import signal, sys
from pathlib import Path
from relibra.rl.run.run_folder import held_run_folder
with held_run_folder(Path(sys.argv[1])):
    print("held", flush=True)
    signal.pause()
"""


def test_a_run_folder_has_one_writer_and_is_free_again_when_that_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "LOCK_SECONDS", 0.2)
    with subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match="another process trains in the run folder"), held_run_folder(tmp_path):
            pass
        monkeypatch.setattr(run_folder, "LOCK_SECONDS", 60.0)
        other.kill()
        with held_run_folder(tmp_path):
            assert other.wait() < 0


def test_a_second_run_of_the_same_name_gets_a_number(tmp_path):
    made = [create_run_folder(config_of(tmp_path / "runs", "run.name=a")) for _ in range(3)]
    assert [path.name for path in made] == ["a", "a-2", "a-3"]
    about = json.loads((made[1] / "config.json").read_text())
    assert about["versions"].keys() >= {"relibra", "torch", "transformers", "python"}
    about.pop("versions")
    assert RunConfig.model_validate(about) == config_of(tmp_path / "runs", "run.name=a")


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot make the run folder .*/file/run \(run.folder\): Not a directory"):
        create_run_folder(config_of(tmp_path / "file"))
    (tmp_path / "run").write_text("")
    with pytest.raises(ConfigError, match=r"cannot make the run folder .*/run: a file has that name"):
        create_run_folder(config_of(tmp_path))


def test_only_a_run_with_a_checkpoint_can_go_on(tmp_path):
    run = create_run_folder(config_of(tmp_path, "update.learning_rate=1e-5"))
    assert not has_checkpoint(run)
    with pytest.raises(ConfigError, match=rf"cannot resume {run}: it has no checkpoints/step-\*") as caught:
        open_run_folder(run)
    assert "name the folder of a run, or start anew" in str(caught.value)
    (run / "checkpoints" / "step-00000").mkdir(parents=True)
    assert has_checkpoint(run)
    settings = open_run_folder(run)
    assert RunConfig.model_validate(settings).update.learning_rate == 1e-5
    (run / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"its config\.json cannot be read"):
        open_run_folder(run)
    (tmp_path / "partial" / "checkpoints" / ".step-00002.partial").mkdir(parents=True)
    assert not has_checkpoint(tmp_path / "partial"), "a checkpoint that was never finished is none"


def row(step, **more):
    return {"step": step, "reward": 0.5, "seconds": {"rollout": 1.0}, "alarms": [], "evaluation": None, **more}


def test_metrics_are_lines_and_numbers_that_json_knows(tmp_path):
    log = MetricsLog(tmp_path)
    log.append(row(0, loss=math.nan, ess=math.inf, evaluation={"reward": math.nan, "response_length": 3.0}))
    log.append(row(1, loss=0.25))
    log.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    first, second = map(json.loads, text.splitlines())
    assert (first["loss"], first["ess"], second["loss"]) == (None, None, 0.25)
    assert first["evaluation"] == {"reward": None, "response_length": 3.0}
    assert read_metrics(tmp_path / "metrics.jsonl").steps == [0, 1]
    assert list((tmp_path / "tensorboard").glob("events.out.*"))


def test_metrics_of_a_run_that_goes_on_follow_the_earlier_ones(tmp_path):
    for first in (0, 1):
        log = MetricsLog(tmp_path, first)
        log.append(row(first))
        log.close()
    assert read_metrics(tmp_path / "metrics.jsonl").steps == [0, 1]


def test_steps_after_the_checkpoint_are_forgotten_and_a_cut_line_with_them(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(row(step)) + "\n" for step in range(5)) + '{"step": 5, "rew'
    )
    lines = [json.dumps({"step": step, "sample": sample}) for step in range(5) for sample in range(3)]
    (tmp_path / "samples.jsonl").write_text("\n".join(lines) + "\n{}\nnonsense\n")
    for step in range(6):
        trace_folder(tmp_path, step).mkdir(parents=True)
        (trace_folder(tmp_path, step) / "index.json").write_text("{}")
    with alone():
        forget_steps_from(tmp_path, 3)
    assert read_metrics(tmp_path / "metrics.jsonl").steps == [0, 1, 2]
    assert read_metrics(tmp_path / "metrics.jsonl").unreadable == 0
    kept = [json.loads(line)["step"] for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert kept == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert sorted(folder.name for folder in (tmp_path / "traces").iterdir()) == [f"step-{s:05d}" for s in range(3)]


def test_a_whole_last_line_without_its_newline_is_of_no_finished_step(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row(0)) + "\n" + json.dumps(row(1)))
    with alone():
        forget_steps_from(tmp_path, 9)
    assert read_metrics(tmp_path / "metrics.jsonl").steps == [0], "the next line would be glued to it"


def test_a_folder_without_logs_has_nothing_to_forget(tmp_path):
    with alone():
        forget_steps_from(tmp_path, 0)
    assert list(tmp_path.iterdir()) == []


def spoken(sample_id, reward, length):
    one = response_of(sample_id, length=length, reward=reward, finished=reward is not None, routed=False)
    one.tokens_n[one.prompt_length :] = np.array([*[4] * (length - 1), TOKENIZER.stop_ids[0]])
    return one


def test_samples_are_the_best_the_worst_and_the_longest_that_finished(tmp_path):
    rewards = [0.1 * s for s in range(10)]
    lengths = [2, 2, 2, 2, 9, 8, 7, 2, 2, 2]
    responses = [spoken(s, reward, length) for s, (reward, length) in enumerate(zip(rewards, lengths, strict=True))]
    responses.append(spoken(10, None, 12))
    log = SamplesLog(tmp_path)
    log.append(7, responses, TASK, TOKENIZER)
    log.append(8, [spoken(11, None, 3)], TASK, TOKENIZER)
    log.append(9, responses[:2], TASK, TOKENIZER)
    log.close()
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [line["sample"] for line in lines if line["step"] == 7] == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    assert [line["sample"] for line in lines if line["step"] == 8] == []
    assert [line["sample"] for line in lines if line["step"] == 9] == [0, 1], "nobody is written twice"
    assert lines[3] == {
        "step": 7,
        "sample": 4,
        "prompt": TASK.prompt(4).text,
        "response": "3" * 8,
        "reward": 0.4,
        "tokens": 9,
        "finish": "stop",
        "windows": 1,
    }
