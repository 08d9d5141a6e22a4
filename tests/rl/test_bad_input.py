"""Bad input: one clear sentence on stderr, exit code 1, and nothing that looks whole."""

import json
import re
import resource
import sys

import pytest

from tests.rl.runs import make_user_task, train

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "relibra")
ONE_RANK = "parallel.ranks=1"


def refused(done):
    """Check that a run was refused before it made a step, and return what it said."""
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("update.lr=1", "update.lr is not a setting"),
        ("parallel.ranks=3", "does not divide model.num_experts 4"),
        ("model.path=nowhere", "model.path, got 'nowhere': no folder"),
        ("plan.cluster=missing.toml", "plan.cluster: missing.toml cannot be read"),
    ],
)
def test_impossible_settings_are_refused_before_anything_is_made(override, said, tmp_path):
    stderr = refused(train(tmp_path / "runs", override))
    assert stderr.startswith("error: ")
    assert stderr.count("\n") == 1
    assert said in stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("override", [ONE_RANK, "plan.balancer=static"])
def test_a_run_without_plans_needs_no_machine(override, tmp_path):
    done = train(tmp_path, override, "plan.cluster=measure", "run.steps=1")
    assert done.returncode == 0, done.stderr
    assert "measur" not in done.stderr.replace("plan.cluster=measure", "")


@pytest.fixture(scope="module")
def user_task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("user")
    task = make_user_task(folder)
    return folder, task


UNUSABLE_TASKS = {
    "raises": ("task.reward=my_rewards:raising", "raised ValueError: no idea; a reward returns a number"),
    "long_prompt": ("rollout.max_prompt=1", "and none is left to train on"),
    "warm_up": ("warmup.steps=3", "the task has no demonstrations: set warmup.steps=0"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", UNUSABLE_TASKS)
def test_a_task_that_cannot_be_used_is_one_sentence(name, user_task, tmp_path):
    override, said = UNUSABLE_TASKS[name]
    folder, task = user_task
    stderr = refused(train(tmp_path, *task, ONE_RANK, override, cwd=folder))
    assert not (tmp_path / "run").exists(), "the next try takes the name again"
    [message] = [line for line in stderr.splitlines() if line.startswith("rank 0: ")]
    assert said in message
    assert stderr.splitlines()[-1].startswith("error: the run ended early: rank 0 failed (see above)")


@pytest.mark.slow
def test_every_rank_says_the_same_of_a_bad_reward(user_task, tmp_path):
    folder, task = user_task
    stderr = refused(train(tmp_path, *task, "task.reward=my_rewards:raising", cwd=folder))
    assert 1 <= stderr.count("raised ValueError: no idea") <= 2
    assert re.search(r"error: the run ended early: rank(s 0, 1| 0| 1) failed \(see above\)", stderr)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_first_step_that_fails_leaves_no_folder_under_torchrun(user_task, tmp_path):
    folder, task = user_task
    done = train(tmp_path, *task, "task.reward=my_rewards:raising", command=TORCHRUN, cwd=folder)
    assert done.returncode != 0
    assert "raised ValueError: no idea" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("code", [0, 7])
def test_a_reward_that_ends_its_process_completes_nothing(code, user_task, tmp_path):
    folder, task = user_task
    body = f"    rated.append(row)\n    if len(rated) > 1:\n        os._exit({code})\n    return 0\n"
    (folder / "leaving.py").write_text(f"import os\nrated = []\n\ndef leave(response, row):\n{body}")
    stderr = refused(train(tmp_path, *task, "task.reward=leaving:leave", "parallel.ranks=2", cwd=folder))
    assert re.search(r"error: the run ended early: rank(s 0, 1| 0| 1) ended before the run was complete", stderr)
    assert "os._exit" in stderr
    check_nothing_half_written(tmp_path / "run")


def check_nothing_half_written(run):
    """What a refused run leaves is whole: its settings, and what it had finished; nothing where nothing had begun."""
    if not run.exists():
        return
    assert json.loads((run / "config.json").read_text())["run"]["name"] == "run"
    assert not (run / "policy").exists()
    hidden = {path.name for path in run.iterdir() if path.name.startswith(".")}
    assert hidden <= {".lock"}, "weights that were on their way are left"
    for line in (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else []:
        json.loads(line)
    for folder in (run / "checkpoints").glob("step-*"):
        assert (folder / "manifest.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(("kib", "what"), [(8, "cannot write weights into"), (700, "cannot write the checkpoint")])
def test_a_full_disk_is_one_sentence(kib, what, tmp_path):
    """No file may grow beyond a limit, which the run meets at its first weights, or when it has states of AdamW."""

    def limited():
        resource.setrlimit(resource.RLIMIT_FSIZE, (kib << 10, kib << 10))

    sizes = ("model.hidden_size=64", "algorithm.group_filter=off")
    done = train(tmp_path, ONE_RANK, *sizes, preexec_fn=limited)
    stderr = refused(done)
    [message] = [line for line in stderr.splitlines() if line.startswith("rank 0: ")]
    assert message.count("rank 0") <= 2, "one sentence"
    assert what in message
    assert "File too large" in message
    assert stderr.splitlines()[-1].startswith("error: the run ended early: rank 0 failed")
    check_nothing_half_written(tmp_path / "run")
