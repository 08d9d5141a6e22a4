"""Runs that are stopped, and runs that lose processes: what ends, what stays, what is said."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.rl.ranks_at_work import TINY, assert_same_bits, outcome_of
from tests.rl.runs import (
    RELIBRA,
    LongRun,
    check_report,
    check_whole,
    make_user_task,
    run_command,
    train,
    wait_until_gone,
)

pytestmark = pytest.mark.slow

RESUMING = "resuming from the checkpoint after"


@pytest.mark.parametrize("delay_s", [None, 0.0, 0.13, 0.29])
def test_killing_every_process_leaves_whole_steps(delay_s, tmp_path):
    """At moments after the second step, or (None) while the ranks start."""
    with LongRun(tmp_path) as going:
        workers = going.wait_for_workers(2)
        if delay_s is not None:
            going.wait_for("(2/")
            time.sleep(delay_s)
        going.signal_all(signal.SIGKILL)
        assert going.exit_code() == -signal.SIGKILL
        wait_until_gone(workers, 5)
    steps = check_whole(going.run)
    assert steps == 0 if delay_s is None else steps >= 2
    assert not (going.run / "policy").exists()
    check_report(going.run)


@pytest.mark.parametrize("moment", ["start", "step"])
def test_no_rank_outlives_the_process_that_started_it(moment, tmp_path):
    with LongRun(tmp_path) as going:
        workers = going.wait_for_workers(2)
        if moment == "step":
            going.wait_for("(1/")
        going.process.kill()
        going.exit_code()
        wait_until_gone(workers, 5)
    check_whole(going.run)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_run_with_its_name(rank, tmp_path):
    with LongRun(tmp_path) as going:
        going.wait_for("(2/")
        workers = going.workers()
        os.kill(workers[rank], signal.SIGKILL)
        assert going.exit_code(60) == 1
        wait_until_gone(workers, 1)
    last = going.stderr.splitlines()[-1]
    assert last == (
        f"error: the run ended early: rank {rank} was killed by SIGKILL; "
        f"{going.run} keeps every finished step; to resume from its last checkpoint: relibra train --resume {going.run}"
    )
    assert "Traceback" not in going.stderr
    assert going.stdout == ""
    assert check_whole(going.run) >= 2


@pytest.mark.parametrize("rank", [0, 1])
def test_stopped_rank_is_named_and_others_leave_their_stacks(rank, tmp_path):
    with LongRun(tmp_path, "parallel.heartbeat_seconds=8") as going:
        going.wait_for("(1/")
        workers = going.workers()
        os.kill(workers[rank], signal.SIGSTOP)
        assert going.exit_code(60) == 1
        wait_until_gone(workers, 1)
    told = rf"rank {rank} \(\w[\w -]*, for \d+ s\)"
    assert re.search(rf"rank {1 - rank}: no sign of life of {told} for 8 s", going.stderr)
    assert f"error: the run ended early: rank {1 - rank} lost its peers (see above)" in going.stderr
    assert "Thread" in (going.run / "stacks" / f"rank-{1 - rank:05d}.txt").read_text()


def test_a_supervised_run_goes_on_after_a_lost_rank(tmp_path):
    words = ("--supervise", "checkpoint.every=1", "run.steps=12", "algorithm.preset=grpo")
    with LongRun(tmp_path, *words) as going:
        going.wait_for("(3/")
        os.kill(going.workers()[1], signal.SIGKILL)
        assert going.exit_code(240) == 0
    assert going.stderr.count("rank 1 was killed by SIGKILL") == 1
    assert re.search(r"restarting from step-0000\d, 2 more without a newer checkpoint", going.stderr)
    assert RESUMING in going.stderr
    outcome = json.loads(going.stdout)
    assert (outcome["complete"], outcome["steps"]) == (True, 12)
    assert check_whole(going.run) == 12


def test_ten_kills_shrink_a_run_to_what_a_hand_resumes(tmp_path):
    """Four tries on four ranks, four on two, two on one, killed at random moments; then it is left in peace."""
    words = ("--supervise", "--shrink", "parallel.ranks=4", "checkpoint.every=3", "checkpoint.keep=9", "run.steps=8")
    rng, tries = random.Random(4), [4] * 4 + [2] * 4 + [1] * 2
    with LongRun(tmp_path / "killed", *words, "algorithm.preset=grpo") as going:
        going.wait_for("(4/")
        for number, ranks in enumerate(tries):
            workers, resumed = going.wait_for_workers(ranks), going.stderr.count(RESUMING)
            while number % 2 and going.stderr.count(RESUMING) == resumed:
                time.sleep(0.02)
            time.sleep(rng.random())
            os.kill(rng.choice(workers), signal.SIGKILL)
            wait_until_gone(workers, 60)
            if not number:
                going.wait_for("restarting from step-00003, 2 more")
                shutil.copytree(going.run, tmp_path / "hand" / "run")  # the ranks only begin to import
        assert going.exit_code(240) == 0
    killed, hand = going.run, tmp_path / "hand" / "run"
    outcome = json.loads(going.stdout)
    assert (outcome["complete"], outcome["steps"]) == (True, 8)
    assert [(one["ranks_before"], one["ranks"], one["checkpoint"]) for one in outcome["shrunk"]] == [
        (4, 2, 3),
        (2, 1, 3),
    ]
    last = outcome["shrunk"][-1]
    assert last["steps_redone"] >= 1
    assert last["seconds"] > last["step_seconds"] > 0
    assert going.stderr.count("was killed by SIGKILL") == len(tries)
    assert "Traceback" not in going.stderr
    assert check_whole(killed) == 8
    done = run_command(["train", "--resume", str(hand), "parallel.ranks=1", "--json"])
    assert done.returncode == 0, done.stderr
    assert_same_bits(outcome_of(killed, []), outcome_of(hand, []))
    assert (killed / "samples.jsonl").read_text() == (hand / "samples.jsonl").read_text()


LEAVING = """
import os, signal

from relibra.errors import EngineError
from relibra.rl import step

calls = []

def leave_once(response, row):
    calls.append(response)
    if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and len(calls) > 16:
        os.kill(os.getpid(), signal.SIGKILL)
    return sum(map(ord, response)) % 3 / 2

def fail_on_rank_1(response, row):
    def fail(*_):
        raise EngineError("rank 1 has no idea")

    if os.environ["RANK"] == "1":
        step.check_versions = fail
    return 0.5
"""


def torchrun(folder, *words, restarts):
    task = make_user_task(folder)
    (folder / "my_rewards.py").write_text(LEAVING)
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", str(restarts))
    return train(folder, *task, *words, command=(sys.executable, "-m", *launcher, "-m", "relibra"), cwd=folder)


def test_torchrun_starts_a_run_again_from_its_last_checkpoint(tmp_path):
    words = ("task.reward=my_rewards:leave_once", "run.steps=8", "checkpoint.every=1", "algorithm.preset=grpo")
    done = torchrun(tmp_path, *words, restarts=1)
    assert done.returncode == 0, done.stderr
    assert re.search(r"restart 1 by torchrun: continuing \S+/run from step-0000\d", done.stderr)
    outcome = json.loads(done.stdout)
    assert (outcome["complete"], outcome["steps"]) == (True, 8)
    assert check_whole(tmp_path / "run") == 8
    assert not (tmp_path / "run-2").exists()


def test_torchrun_shows_the_error_of_the_rank_that_failed_first(tmp_path):
    done = torchrun(tmp_path, "task.reward=my_rewards:fail_on_rank_1", restarts=0)
    assert done.returncode != 0
    cause = done.stderr.rpartition("Root Cause (first observed failure):")[2]
    assert "rank 1 has no idea" in cause
    assert re.search(r"rank +: 1 ", cause)


HANG = """
import os, time
def hang(response, row):
    if os.environ["RANK"] == "1":
        time.sleep(9)
    return sum(map(ord, response)) % 3 / 2
"""


def test_slow_reward_of_one_rank_outlasts_collective_deadline(tmp_path):
    task = make_user_task(tmp_path)
    (tmp_path / "slow_reward.py").write_text(HANG)
    words = (
        "task.reward=slow_reward:hang",
        "rollout.prompts_per_step=2",
        "update.mini_batches=1",
        "plan.balancer=static",
    )
    done = train(tmp_path, *task, *words, "run.steps=1", "parallel.timeout_seconds=12", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 1


def test_a_rank_killed_while_it_starts_ends_the_run(tmp_path):
    with LongRun(tmp_path) as going:
        workers = going.wait_for_workers(2)
        os.kill(workers[1], signal.SIGKILL)
        assert going.exit_code(60) == 1
        wait_until_gone(workers, 1)
    assert "error: the run ended early: rank 1 was killed by SIGKILL; " in going.stderr
    assert "Traceback" not in going.stderr


def test_a_second_process_in_the_folder_of_a_run_is_refused(tmp_path):
    with LongRun(tmp_path, "checkpoint.every=1") as going:
        going.wait_for("(1/")
        done = run_command(["train", "--resume", str(going.run)])
        assert going.workers(), "the first one goes on"
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: another process trains in the run folder {going.run}: wait until it ends")
    assert len(done.stderr.splitlines()) == 1


def test_a_rank_that_hangs_ends_the_run_in_time(tmp_path):
    """In a collective its deadline ends the run, elsewhere the missing sign of life."""
    with LongRun(tmp_path, "parallel.timeout_seconds=3", "parallel.heartbeat_seconds=6") as going:
        going.wait_for("(1/")
        workers = going.workers()
        os.kill(workers[1], signal.SIGSTOP)
        assert going.exit_code(60) == 1
        wait_until_gone(workers, 1)
    said = (" did not come while the others waited 3 s", "no sign of life of rank 1 (", "took longer than 3 s")
    assert any(sentence in going.stderr for sentence in said)
    assert "error: the run ended early: rank 0 lost its peers" in going.stderr
    check_whole(going.run)


@pytest.mark.parametrize("whom", ["group", "parent"])
@pytest.mark.parametrize(("number", "again"), [(signal.SIGINT, "press Ctrl-C"), (signal.SIGTERM, "send SIGTERM")])
def test_stop_finishes_the_step_and_leaves_policy_and_report(number, again, whom, tmp_path):
    with LongRun(tmp_path) as going:
        going.wait_for("(1/")
        workers = going.workers()
        going.signal_all(number) if whom == "group" else going.process.send_signal(number)
        assert going.exit_code() == 130
        wait_until_gone(workers, 1)
    outcome = json.loads(going.stdout)
    assert outcome["complete"] is False
    assert outcome["steps"] == check_whole(going.run) >= 1
    assert (going.run / "policy" / "model.safetensors").is_file()
    assert (going.run / "checkpoints" / f"step-{outcome['steps']:05d}").is_dir(), "the stopped run can go on"
    assert (going.run / "report.html").is_file()
    assert going.stderr.count(f"stopping after this step; {again} again to stop at once") == 1
    assert "Traceback" not in going.stderr
    *rows, hint, farewell = going.stderr.splitlines()
    last_step = [row for row in rows if re.match(r"step \d+ \(", row)][-1]  # alarms and the stop may follow it
    assert hint == f"to resume from its last checkpoint: relibra train --resume {going.run}"
    assert last_step.startswith(f"step {outcome['steps'] - 1} ({outcome['steps']}/")
    assert farewell == "stopped"


@pytest.mark.parametrize("whom", ["group", "parent"])
def test_ctrl_c_while_the_ranks_start_is_not_lost(whom, tmp_path):
    with LongRun(tmp_path) as going:
        going.wait_for_workers(2)
        going.signal_all(signal.SIGINT) if whom == "group" else going.process.send_signal(signal.SIGINT)
        assert going.exit_code() == 130
    assert json.loads(going.stdout)["steps"] == 0
    assert "Traceback" not in going.stderr
    assert check_whole(going.run) == 0


def test_a_second_ctrl_c_stops_at_once(tmp_path):
    with LongRun(tmp_path) as going:
        going.wait_for("(1/")
        workers = going.workers()
        os.kill(workers[0], signal.SIGSTOP)  # so that the step cannot finish
        going.process.send_signal(signal.SIGINT)
        going.wait_for("press Ctrl-C again")
        going.process.send_signal(signal.SIGINT)
        assert going.exit_code(5) == 130
        wait_until_gone(workers, 1)
    assert "Traceback" not in going.stderr
    assert going.stderr.splitlines()[-2] == f"to resume from its last checkpoint: relibra train --resume {going.run}"
    check_whole(going.run)


MESSY = """
import atexit, os, signal
from concurrent.futures import ProcessPoolExecutor

pool = None

def by_letters(response):
    return sum(map(ord, response)) % 3 / 2

def score(response, row):
    global pool
    if pool is None:
        pool = ProcessPoolExecutor(1)
        atexit.register(lambda: os.kill(os.getpid(), signal.SIGSEGV))
    print("score of", repr(response))
    os.chdir("/")
    return pool.submit(by_letters, response).result()
"""


def test_reward_may_print_change_folder_keep_processes_and_crash(tmp_path):
    task = make_user_task(tmp_path)
    (tmp_path / "my_rewards.py").write_text(MESSY)
    words = (
        "task.reward=my_rewards:score",
        "run.steps=2",
        "checkpoint.every=1",
        "run.folder=.",
        "plan.balancer=static",
    )
    done = train(tmp_path, *task, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert (outcome["complete"], outcome["steps"]) == (True, 2)
    assert "score of" in done.stderr
    assert "had done its work when its process was ended by SIGSEGV" in done.stderr
    assert check_whole(tmp_path / "run") == 2
    assert (tmp_path / "run" / "checkpoints" / "step-00002").is_dir()


def test_a_run_whose_folder_is_removed_ends_with_one_sentence(tmp_path):
    with LongRun(tmp_path, "checkpoint.every=1") as going:
        going.wait_for("(2/")
        shutil.rmtree(going.run, ignore_errors=True)
        assert going.exit_code(60) == 1
    assert re.search(rf"the run folder {going.run} was removed or moved|was the run folder removed", going.stderr)
    assert "keeps every finished step" not in going.stderr
    assert "Traceback" not in going.stderr


def test_a_run_goes_on_when_nobody_reads_its_stderr_any_more(tmp_path):
    reader, writer = os.pipe()
    words = [*RELIBRA, "train", *TINY, "run.steps=6", f"run.folder={tmp_path}", "plan.balancer=static", "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=writer, text=True) as going:
        os.close(writer)
        with os.fdopen(reader) as lines:
            next(line for line in lines if line.startswith("step 0"))
        out, _ = going.communicate(timeout=200)
    assert going.returncode == 0
    assert json.loads(out)["steps"] == check_whole(tmp_path / "run") == 6
