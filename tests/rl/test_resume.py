"""Runs that are killed at any moment and go on: the same numbers and the same bits as one that never was."""

import json
import os
import random
import shutil
import signal
import time
from dataclasses import replace

import pytest

from relibra.cluster import Link, cluster_preset, write_cluster
from relibra.planning.plan_files import read_plan
from relibra.reporting.data.metrics import read_metrics
from relibra.rl.run.run_folder import step_folders
from relibra.routing.trace_files import read_trace
from tests.rl.ranks_at_work import assert_same_bits, comparable, outcome_of, run_alone, run_on_ranks
from tests.rl.runs import LongRun, check_samples, check_whole, make_user_task, run_command, train, wait_until_gone
from tests.rl.update.test_planned_activations import LAST_LAYER, with_figures

pytestmark = pytest.mark.slow

STEPS = 16
TPPO = (
    "algorithm.preset=tppo",
    "rollout.window=4",
    "algorithm.tail_drop=1",
    "critic.min_finished=5",  # so that finished responses wait in the checkpoint too
    "update.lr_warmup_steps=9",
    f"run.steps={STEPS}",
    "checkpoint.every=3",
    "trace.keep=99",
)
MOVING = """
from dataclasses import replace

from relibra.planning.balancers import relibra


def decide(request):
    before = request.previous
    moved = replace(before, physical_to_logical_map=before.physical_to_logical_map[:, ::-1])
    return relibra.decide(replace(request, previous=moved))
"""
"""A balancer that moves every home in every step: experts this small never move for seconds."""


def shards_of(run):
    return {path.relative_to(run): path.read_bytes() for path in sorted((run / "traces").rglob("rank-*.safetensors"))}


def test_a_run_killed_six_times_ends_as_one_that_never_was(tmp_path):
    """T-PPO with unfinished responses, a critic and experts that moved; every second time only one rank is killed."""
    task = (*make_user_task(tmp_path / "calm"), "plan.balancer=my_balancer:decide")
    (tmp_path / "calm" / "my_balancer.py").write_text(MOVING)
    calm = train(tmp_path / "calm", *task, *TPPO, cwd=tmp_path / "calm")
    assert calm.returncode == 0, calm.stderr
    make_user_task(tmp_path / "killed")
    (tmp_path / "killed" / "my_balancer.py").write_text(MOVING)
    (tmp_path / "killed" / "model").rename(tmp_path / "killed" / "other")
    os.symlink(tmp_path / "calm" / "model", tmp_path / "killed" / "model")
    rng = random.Random(0)
    moments = sorted(rng.sample(range(4, STEPS), 6))  # the first checkpoint is that of step 3
    for attempt, step in enumerate(moments):
        with LongRun(tmp_path / "killed", *(() if attempt else (*task, *TPPO)), resume=attempt > 0) as going:
            going.wait_for(f"({step}/")
            time.sleep(rng.random() * 0.4)  # somewhere in the next steps
            workers = going.workers()
            if going.process.poll() is None and workers:
                if attempt % 2:
                    os.kill(workers[attempt // 2 % 2], signal.SIGKILL)
                    going.exit_code()
                else:
                    going.signal_all(signal.SIGKILL)
                    going.exit_code()
                wait_until_gone(workers, 20)
        check_whole(tmp_path / "killed" / "run")
    done = run_command(["train", "--resume", str(tmp_path / "killed" / "run"), "--json"], tmp_path / "killed")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["complete"] is True
    assert "resuming from the checkpoint after " in done.stderr
    one, other = (outcome_of(tmp_path / name / "run", []) for name in ("calm", "killed"))
    assert len(other.rows) == STEPS
    assert any(row["unfinished_share"] for row in one.rows)
    assert sum(row["moved_experts"] or 0 for row in one.rows) > 0, "no expert moved, so less was tested"
    assert any(row["value_loss"] is None for row in one.rows), "no finished response had to wait for the value model"
    assert_same_bits(one, other)
    assert shards_of(one.run) == shards_of(other.run)
    assert (one.run / "samples.jsonl").read_text() == (other.run / "samples.jsonl").read_text()
    check_samples(other.run, STEPS)
    assert check_whole(other.run) == STEPS


CASES = {
    "tppo": (*TPPO[:-3], "run.steps=6", "trace.keep=9", "checkpoint.every=3"),
    "refill": (
        *TPPO[:-3],
        *("rollout.window=12", "rollout.max_response=24", "rollout.refill=true"),
        *("run.steps=6", "trace.keep=9", "checkpoint.every=3"),
    ),
    "keep": (*TPPO[:-3], "rollout.on_update=keep", "run.steps=6", "trace.keep=9", "checkpoint.every=3"),
    "dapo": ("run.steps=4", "trace.keep=9", "checkpoint.every=2"),
    "r2": ("algorithm.replay=R2", "run.steps=4", "trace.keep=9", "checkpoint.every=2"),
    "reference": (
        "algorithm.preset=grpo",
        "algorithm.kl_coefficient=0.2",
        "run.steps=4",
        "trace.keep=9",
        "checkpoint.every=2",
    ),
    "dense": (
        "algorithm.preset=ppo",
        "model.num_experts=0",
        "algorithm.replay=off",
        "run.steps=4",
        "trace.keep=9",
        "checkpoint.every=2",
    ),
    "bf16": ("model.dtype=bfloat16", "run.steps=4", "trace.keep=9", "checkpoint.every=2"),
    "on_host": (
        "algorithm.preset=ppo",
        "algorithm.kl_coefficient=0.2",
        "model.dtype=bfloat16",
        "update.offload=moments",
        "update.activations=host",
        "run.steps=4",
        "trace.keep=9",
        "checkpoint.every=2",
    ),
    "kept_by_plan": ("update.activations=plan", "run.steps=4", "trace.keep=9", "checkpoint.every=2"),
    "recompute": ("algorithm.old_log_probs=recompute", "run.steps=4", "trace.keep=9", "checkpoint.every=2"),
    "sampler": ("algorithm.old_log_probs=sampler", "run.steps=4", "trace.keep=9", "checkpoint.every=2"),
}
"""The others keep activations on the device, share prompts, and skip the pass of the first mini-batch."""


def rewound(run, step):
    """Take a run back to its checkpoint after `step`, as if it had been killed a moment before the next one."""
    for folder in sorted((run / "checkpoints").glob("step-*")):
        if int(folder.name.removeprefix("step-")) > step:
            folder.rename(run / f"later-{folder.name}")


@pytest.mark.parametrize("name", CASES)
def test_a_run_on_one_rank_goes_on_bit_for_bit(name, tmp_path):
    case, run = CASES[name], with_figures(tmp_path / "run", LAST_LAYER)
    whole = outcome_of(run, [run_alone(case, run)])
    shards, samples = shards_of(run), (run / "samples.jsonl").read_text()
    rewound(run, int(case[-1][-1]))
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "re')
    again = outcome_of(run, [run_alone(case, run)])
    assert again.of_ranks[0], "nothing was made again"
    under_way = [row["finished"] / (1 - row["unfinished_share"]) for row in again.rows if row["finished"]]
    assert (max(under_way) > 8.5) == (name == "refill"), "only refills bring more responses than places"
    assert_same_bits(whole, again)
    assert shards_of(run) == shards
    assert (run / "samples.jsonl").read_text() == samples


def test_runs_on_two_ranks_go_on_bit_for_bit(tmp_path, monkeypatch):
    """With experts that move or are copied in every step."""
    (tmp_path / "my_balancer.py").write_text(MOVING)
    monkeypatch.syspath_prepend(tmp_path)
    balancers = {
        "on_host": "my_balancer:decide",
        "kept_by_plan": "relibra_paper_tokens",
        "sampler": "my_balancer:decide",
    }
    cases = {name: (f"plan.balancer={one}", "checkpoint.keep=9", *CASES[name]) for name, one in balancers.items()}
    with_figures(tmp_path / "kept_by_plan", LAST_LAYER)
    whole = run_on_ranks(2, cases, tmp_path)
    for name, case in cases.items():
        assert sum(row["moved_experts"] or row["replicas"] or 0 for row in whole[name].rows) > 0
        rewound(tmp_path / name, int(case[-1][-1]))
    again = run_on_ranks(2, cases, tmp_path)
    for name in cases:
        assert again[name].of_ranks[0], "nothing was made again"
        assert_same_bits(whole[name], again[name])


def test_a_run_goes_on_on_another_number_of_ranks(tmp_path):
    cases = {name: (*CASES[name], "checkpoint.keep=9") for name in ("tppo", "dapo", "dense")}
    two = run_on_ranks(2, cases, tmp_path)
    for name, case in cases.items():
        run = tmp_path / name
        rewound(run, int(CASES[name][-1][-1]))
        one = outcome_of(run, [run_alone(case, run)])
        assert [row["step"] for row in one.rows] == [row["step"] for row in two[name].rows]
        before = int(CASES[name][-1][-1])
        assert comparable(one.rows)[:before] == comparable(two[name].rows)[:before]
        assert one.rows[before]["finished"] == two[name].rows[before]["finished"]
        assert one.rows[before]["reward"] == pytest.approx(two[name].rows[before]["reward"], abs=1e-5)
        if name == "dense":
            continue
        ids = [sorted(read_trace(run / "traces" / f"step-{step:05d}").sample_ids) for step in range(len(one.rows))]
        live = set()
        for step, own in enumerate(ids):
            assert live <= set(own) or step != before, "a response that was under way is lost"
            assert len(own) == 8


def test_lasting_replicas_are_there_after_a_resume(tmp_path):
    slow = replace(
        cluster_preset("h100x8", 2, 2),
        name="slow computing, copies that ranks wait for",
        peak_flops_per_second=1e6,
        intra=Link(latency_seconds=1e-3, bytes_per_second=1e12),
        layer_seconds=0.0,
        hides_copies=False,
    )
    write_cluster(tmp_path / "slow.toml", slow)
    settings = ("plan.lasting=true", f"plan.cluster={tmp_path / 'slow.toml'}", "update.micro_batch_tokens=24")
    case = (
        *settings,
        "update.mini_batches=1",
        "run.steps=6",
        "trace.keep=9",
        "checkpoint.every=3",
        "checkpoint.keep=9",
    )
    whole = run_on_ranks(2, {"run": case}, tmp_path)["run"]
    plans = [read_plan(folder / "plan.safetensors") for _, folder in step_folders(whole.run / "traces")]
    assert {plan.balancer for plan in plans[3:]} >= {"lasting residents"}, [plan.balancer for plan in plans]
    rewound(whole.run, 3)
    again = run_on_ranks(2, {"run": case}, tmp_path)["run"]
    assert_same_bits(whole, again)
    later = [read_plan(folder / "plan.safetensors") for _, folder in step_folders(again.run / "traces")]
    assert [plan.digest() for plan in later] == [plan.digest() for plan in plans]


def test_responses_that_were_passed_over_begin_after_a_resume(tmp_path):
    """Two ranks use their spares at different speeds; what one did not use is in the checkpoint."""
    case = {"refill": (*CASES["refill"], "checkpoint.every=1", "checkpoint.keep=9")}
    whole = run_on_ranks(2, case, tmp_path)["refill"]
    shards = shards_of(whole.run)
    told = [json.loads(path.read_text()) for path in sorted(whole.run.glob("checkpoints/*/state.json"))]
    steps = [one["step"] for one in told[:-1] if one["state"]["passed_over"]]
    assert steps, "nothing was passed over, so nothing was tested"
    rewound(whole.run, steps[0])
    again = run_on_ranks(2, case, tmp_path)["refill"]
    assert [len(rows) for rows in again.of_ranks] == [6 - steps[0]] * 2
    assert_same_bits(whole, again)
    assert shards_of(whole.run) == shards
    for folder in whole.run.glob("later-*"):
        shutil.rmtree(folder)
    rewound(whole.run, steps[0])
    alone = outcome_of(whole.run, [run_alone(case["refill"], whole.run)])
    assert [row["step"] for row in alone.rows] == list(range(6))
    ids = [set(read_trace(whole.run / "traces" / f"step-{step:05d}").sample_ids.tolist()) for step in range(6)]
    assert set().union(*ids) == set(range(max(map(max, ids)) + 1)), "a response never began"


def test_more_steps_can_be_asked_of_a_finished_run(tmp_path):
    run = tmp_path / "run"
    short, long = ("run.steps=2", "algorithm.preset=grpo"), ("run.steps=4", "algorithm.preset=grpo")
    run_alone(short, run)
    longer = outcome_of(run, [run_alone(long, run)])
    at_once = outcome_of(tmp_path / "at_once", [run_alone(long, tmp_path / "at_once")])
    assert_same_bits(longer, at_once)
    assert read_metrics(run / "metrics.jsonl").steps == [0, 1, 2, 3]


def test_what_cannot_be_resumed_is_one_sentence(tmp_path):
    done = run_command(["train", "--resume", str(tmp_path / "nowhere")])
    assert done.stderr.startswith(f"error: cannot resume {tmp_path / 'nowhere'}: the folder does not exist")
    (tmp_path / "none").mkdir()
    done = run_command(["train", "--resume", str(tmp_path / "none")])
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: cannot resume {tmp_path / 'none'}: it has no checkpoints/step-*")
    assert done.stderr.count("\n") == 1
    done = run_command(["train", "some.toml", "--resume", str(tmp_path)])
    assert done.returncode == 1
    assert "contradict each other" in done.stderr


def test_a_run_does_not_go_on_with_other_rows(tmp_path):
    task = make_user_task(tmp_path)
    done = train(tmp_path, *task, "run.steps=1", "checkpoint.every=1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = (tmp_path / "prompts.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "prompts.jsonl").write_text("".join(reversed(rows)))
    done = run_command(["train", "--resume", str(tmp_path / "run"), "run.steps=2"], tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("task.file 'prompts.jsonl' holds other rows, or in another order") == 1
    assert "Traceback" not in done.stderr
    assert check_whole(tmp_path / "run") == 1
