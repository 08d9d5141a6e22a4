"""The benchmark of reliability: its random points, what it counts, and a handful of its runs."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.reliability import full_disks, signalled_runs, started_run
from benchmarks.reliability.chinese_task import CHARACTERS
from relibra.rl.toy.character_tokenizer import CharacterTokenizer

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def test_points_follow_from_the_seed_and_hit_every_target():
    points = signalled_runs.choose_points(50, 0)
    assert points == signalled_runs.choose_points(50, 0) != signalled_runs.choose_points(50, 1)
    assert {(one.signal, one.target) for one in points} == {
        (name, target) for name, targets in signalled_runs.TARGETS.items() for target in targets
    }
    assert [sum(one.signal == name for one in points) for name in signalled_runs.TARGETS] == [17, 17, 16]
    assert {one.step for one in points} == set(range(signalled_runs.STEPS + 1))
    assert all(0 <= one.share < 1 for one in points)
    disks = full_disks.choose_disks(30, 0)
    assert disks == full_disks.choose_disks(30, 0) != full_disks.choose_disks(30, 1)
    assert {one.step for one in disks} == set(range(full_disks.STEPS))
    assert sum(one.pages < full_disks.SMALL_PAGES for one in disks) >= 15
    assert {one.traces for one in disks} == {0, 2}


def ended(name, target, **changes):
    point = signalled_runs.Point(number=0, signal=name, target=target, step=1, share=0.5)
    facts = {"told": 1.0, "ended": 2.0, "named": True, "anew": False, "equal": True, "gone": True, "said": ""}
    return signalled_runs.Ended(point=point, **(facts | changes))


def test_rows_count_what_became_of_runs():
    runs = [
        ended("SIGKILL", "rank 1"),
        ended("SIGKILL", "all", named=False, told=None),
        ended("SIGKILL", "rank 0", equal=False),
        ended("SIGKILL", "all", equal=False, named=False),
        ended("SIGSTOP", "rank 0", ended=None),
        ended("SIGSTOP", "rank 0", gone=False, told=9.0),
        ended("SIGTERM", "rank 0", named=False, anew=True),
    ]
    rows = {row["case"]: row for row in signalled_runs.rows_of(runs, 0)}
    counts = ("points", "equal", "anew", "hit one rank", "named", "neither", "told max")
    assert [rows["SIGKILL"][key] for key in counts] == [4, 2, 0, 2, 2, 1, 1.0]
    assert [rows["SIGSTOP"][key] for key in counts] == [2, 2, 0, 2, 2, 2, 9.0]
    assert [rows["SIGTERM"][key] for key in counts] == [1, 1, 1, 0, 0, 0, 1.0]


def survived(**changes):
    disk = full_disks.FullDisk(number=0, step=1, pages=1, traces=0)
    facts = {"stopped": True, "sentence": True, "warned": False, "torn": 1, "anew": False, "equal": True, "said": ""}
    return full_disks.Survived(disk=disk, **(facts | changes))


def test_a_row_counts_what_became_of_disks():
    found = [
        survived(),
        survived(stopped=False, sentence=False, warned=True, torn=0),
        survived(sentence=False),
        survived(equal=False),
    ]
    row = full_disks.row_of(found, 0)
    keys = ("disks", "went on", "warned", "stopped", "sentence", "torn", "equal", "neither")
    assert [row[key] for key in keys] == [4, 1, 1, 3, 2, 3, 3, 2]


def test_results_with_a_torn_line_are_no_results(tmp_path):
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "reward": 1.0, "seconds": {"rollout": 2.0}}\n')
    line = json.dumps({"step": 0, "response": "一\u2028二\U0001f600"}, ensure_ascii=False).encode()
    (tmp_path / "samples.jsonl").write_bytes(line + b"\n")
    trained = started_run.read_trained(tmp_path)
    assert trained.metrics == [{"step": 0, "reward": 1.0}]
    (tmp_path / "samples.jsonl").write_bytes(line[:-7])
    assert started_run.read_trained(tmp_path) is None
    (tmp_path / "metrics.jsonl").unlink()
    assert started_run.read_trained(tmp_path) is None


def test_samples_hold_characters_that_end_lines(tmp_path):
    assert CharacterTokenizer(CHARACTERS).vocab_size == len(CHARACTERS) + 1
    assert len(CHARACTERS.splitlines()) > 5
    assert {len(one.encode()) for one in CHARACTERS} == {1, 2, 3, 4}


def test_processes_that_are_left_are_seen():
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert started_run.are_gone([process.pid])


@pytest.mark.slow
@pytest.mark.parametrize("part", ["signals", "disks", "damage", "attack"])
def test_a_handful_of_runs_ends_as_promised(part, tmp_path):
    words = [sys.executable, str(BENCHMARKS), "reliability", part, "--quick", "--json", "--output", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    if part == "disks" and not rows:
        pytest.skip(done.stderr.strip())
    assert {row["table"] for row in rows} == {part}
    assert sum(row.get("neither", row.get("found")) for row in rows) == 0
    assert len(rows) > 17 or part != "attack"
    assert all(row["equal"] == row["repetitions"] for row in rows if "equal" in row)
    assert list(tmp_path.iterdir()) == [], "a quick run writes no rows"
