"""Logs of finished steps: appended line by line, and cut back to a checkpoint."""

import json
import math

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

from relibra.errors import EngineError
from relibra.reporting.data.metrics import read_metrics
from relibra.rl.run.run_folder import trace_folder
from relibra.rl.run.step_logs import StepLogs, remove_steps_from
from relibra.rl.toy.character_tokenizer import CharacterTokenizer
from relibra.rl.toy.tasks import Arithmetic
from tests.rl.joined import alone
from tests.rl.made_up import response_of

TASK = Arithmetic(seed=0, max_terms=6, continue_probability=0.5)
TOKENIZER = CharacterTokenizer(TASK.characters)


def row(step, **more):
    return {"step": step, "reward": 0.5, "seconds": {"rollout": 1.0}, "alarms": [], "evaluation": None, **more}


def test_metrics_are_lines_and_numbers_that_json_knows(tmp_path):
    first = row(0, loss=math.nan, ess=math.inf, evaluation={"reward": math.nan, "response_length": 3.0})
    with StepLogs(tmp_path) as logs:
        logs.append(first, [], TASK, TOKENIZER)
        logs.append(row(1, loss=0.25), [], TASK, TOKENIZER)
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    first, second = map(json.loads, text.splitlines())
    assert (first["loss"], first["ess"], second["loss"]) == (None, None, 0.25)
    assert first["evaluation"] == {"reward": None, "response_length": 3.0}
    assert read_metrics(tmp_path / "metrics.jsonl").steps == [0, 1]
    assert list((tmp_path / "tensorboard").glob("events.out.*"))


def test_removed_run_folder_is_told_instead_of_a_step_written(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    with StepLogs(run) as logs:
        logs.append(row(0), [], TASK, TOKENIZER)
        run.rename(tmp_path / "moved")
        (run / "traces").mkdir(parents=True)
        with pytest.raises(EngineError, match=rf"the run folder {run} was removed or moved while the run went on"):
            logs.append(row(1), [], TASK, TOKENIZER)
    assert read_metrics(tmp_path / "moved" / "metrics.jsonl").steps == [0]


def events_of(run):
    """Return what TensorBoard reads, file after file: (step, name, value), and ("purge", step)."""
    found = []
    for path in sorted((run / "tensorboard").iterdir()):
        for event in LegacyEventFileLoader(str(path)).Load():
            if event.HasField("session_log"):
                found.append(("purge", event.step))
            found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
    return found


def test_tensorboard_has_the_numbers_and_hides_repeated_steps(tmp_path):
    for first in (0, 1):
        with StepLogs(tmp_path, first) as logs:
            logs.append(row(first, loss=0.25, note="text", skipped=None, parts={"a": None}), [], TASK, TOKENIZER)
    numbers = [("reward", 0.5), ("seconds/rollout", 1.0), ("loss", 0.25)]
    of_step = [[(step, *number) for number in numbers] for step in (0, 1)]
    assert events_of(tmp_path) == [("purge", 0), *of_step[0], ("purge", 1), *of_step[1]]
    assert read_metrics(tmp_path / "metrics.jsonl").steps == [0, 1], "those of a run that goes on follow the earlier"


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl"])
def test_a_full_disk_is_told_with_the_file_and_the_step(name, tmp_path):
    (tmp_path / name).symlink_to("/dev/full")
    said = f"cannot write step 4 to {tmp_path / name}: No space left on device; make room, then resume"
    with pytest.raises(EngineError) as raised, StepLogs(tmp_path) as logs:
        logs.append(row(4), [spoken(0, 1.0, 3)], TASK, TOKENIZER)
    assert str(raised.value).startswith(said)


def test_full_disk_ends_the_tensorboard_file_and_not_the_run(tmp_path, caplog):
    (tmp_path / "tensorboard").write_text("in the way")
    with StepLogs(tmp_path) as logs:
        for step in range(3):
            logs.append(row(step), [], TASK, TOKENIZER)
    assert read_metrics(tmp_path / "metrics.jsonl").steps == [0, 1, 2]
    [said] = [record.getMessage() for record in caplog.records]
    assert "for TensorBoard (" in said
    assert "training continues without it" in said


def test_steps_after_the_checkpoint_and_a_cut_line_are_forgotten(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(row(step)) + "\n" for step in range(5)) + '{"step": 5, "rew'
    )
    lines = [json.dumps({"step": step, "sample": sample}) for step in range(5) for sample in range(3)]
    (tmp_path / "samples.jsonl").write_text("\n".join(lines) + "\n{}\nnonsense\n")
    for step in range(6):
        trace_folder(tmp_path, step).mkdir(parents=True)
        (trace_folder(tmp_path, step) / "index.json").write_text("{}")
    with alone():
        remove_steps_from(tmp_path, 3)
    assert read_metrics(tmp_path / "metrics.jsonl").steps == [0, 1, 2]
    assert read_metrics(tmp_path / "metrics.jsonl").unreadable == 0
    kept = [json.loads(line)["step"] for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert kept == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert sorted(folder.name for folder in (tmp_path / "traces").iterdir()) == [f"step-{s:05d}" for s in range(3)]


def test_damaged_line_among_finished_steps_is_left_out_and_told(tmp_path, caplog):
    lines = [json.dumps({"step": step}) + "\n" for step in range(4)]
    with alone():
        for text, damaged in (("".join(lines), 0), (lines[0] + '{"st\n' + "".join(lines[2:]), 1)):
            caplog.clear()
            (tmp_path / "metrics.jsonl").write_text(text + '{"step": 4')
            remove_steps_from(tmp_path, 3)
            assert (
                caplog.text.count("metrics.jsonl: damaged lines among those of finished steps, 1 in all, are")
                == damaged
            )
    assert (tmp_path / "metrics.jsonl").read_text() == lines[0] + lines[2]


def test_a_folder_without_logs_has_nothing_to_forget(tmp_path):
    with alone():
        remove_steps_from(tmp_path, 0)
    assert list(tmp_path.iterdir()) == []


def spoken(sample_id, reward, length):
    one = response_of(sample_id, length=length, reward=reward, finished=reward is not None, routed=False)
    one.tokens_n[one.prompt_length :] = np.array([*[4] * (length - 1), TOKENIZER.stop_ids[0]])
    return one


def test_samples_are_the_best_worst_and_longest_that_finished(tmp_path):
    rewards = [0.1 * s for s in range(10)]
    lengths = [2, 2, 2, 2, 9, 8, 7, 2, 2, 2]
    responses = [spoken(s, reward, length) for s, (reward, length) in enumerate(zip(rewards, lengths, strict=True))]
    responses.append(spoken(10, None, 12))
    with StepLogs(tmp_path) as logs:
        logs.append(row(7), responses, TASK, TOKENIZER)
        logs.append(row(8), [spoken(11, None, 3)], TASK, TOKENIZER)
        logs.append(row(9), responses[:2], TASK, TOKENIZER)
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [line["sample"] for line in lines if line["step"] == 7] == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    assert [line["sample"] for line in lines if line["step"] == 8] == []
    assert [line["sample"] for line in lines if line["step"] == 9] == [0, 1], "no sample is written twice"
    assert lines[3] == {
        "step": 7,
        "sample": 4,
        "prompt": TASK.prompt(4).text,
        "answer": sum(TASK.prompt(4).row["terms"]) % 10,
        "response": "3" * 8,
        "reward": 0.4,
        "tokens": 9,
        "finish": "stop",
        "windows": 1,
        "versions": [[0, 9]],
    }


def test_no_text_of_a_policy_blocks_a_resumed_run_or_is_lost(tmp_path):
    texts = ["一二三", "a\u2028b", "c\u0085d", "\x0b\x0c\x1c", "emoji \U0001f600"]
    lines = [
        json.dumps({"step": n, "response": text}, ensure_ascii=False).encode() + b"\n" for n, text in enumerate(texts)
    ]
    torn = json.dumps({"step": 5, "response": "四五六"}, ensure_ascii=False).encode()
    for cut in range(len(torn) + 1):  # also the whole line, but for its end
        (tmp_path / "samples.jsonl").write_bytes(b"".join(lines) + torn[:cut])
        with alone():
            remove_steps_from(tmp_path, 5)
        assert (tmp_path / "samples.jsonl").read_bytes() == b"".join(lines)
    (tmp_path / "samples.jsonl").write_bytes(lines[0] + b"\xff\xfe half a line\n" + lines[1])
    for name in ("step-00011", "step-00011.bak", "step-x"):
        (tmp_path / "traces" / name).mkdir(parents=True)
    with alone():
        remove_steps_from(tmp_path, 5)
    assert (tmp_path / "samples.jsonl").read_bytes() == lines[0] + lines[1]
    assert sorted(folder.name for folder in (tmp_path / "traces").iterdir()) == ["step-00011.bak", "step-x"]
