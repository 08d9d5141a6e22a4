"""Whole runs of the command: what they print, what they leave, and that they repeat themselves."""

import json
import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from relibra.reporting.data.metrics import read_metrics
from relibra.rl.config.defaults import PRESETS
from relibra.rl.toy.character_tokenizer import CharacterTokenizer
from relibra.rl.toy.tasks import Arithmetic
from relibra.routing.trace_files import read_trace
from tests.rl.ranks_at_work import comparable
from tests.rl.runs import check_samples, check_whole, make_user_task, train

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "relibra")


UNFILTERED = "algorithm.group_filter=off"
"""An untrained policy earns nothing, so every group is all alike: train on them all the same."""


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    return train(tmp_path_factory.mktemp("runs"), UNFILTERED)


@pytest.fixture(scope="module")
def run(done):
    assert done.returncode == 0, done.stderr
    return Path(json.loads(done.stdout)["run"])


def rows_of(run):
    """Metrics without what may differ between equal runs."""
    return comparable(read_metrics(run / "metrics.jsonl").rows)


def shards_of(run):
    return {path.relative_to(run): path.read_bytes() for path in sorted((run / "traces").rglob("rank-*.safetensors"))}


def test_stdout_is_the_outcome_and_nothing_else(done, run):
    outcome = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1
    rewards = {name: outcome.pop(name) for name in list(outcome) if name.endswith("_reward")}
    assert rewards.keys() == {"first_reward", "last_reward", "first_mean_reward", "last_mean_reward"}
    assert outcome == {
        "run": str(run),
        "complete": True,
        "steps": 2,
        "steps_averaged": 1,
        "report": str(run / "report.html"),
        "shrunk": [],
    }


def test_stderr_is_progress_in_plain_lines_and_nothing_else(done):
    first, *lines = done.stderr.splitlines()
    assert first.startswith("starting 2 processes; run folder ")
    sources, lines = lines[: lines.index("device cpu")], lines[lines.index("device cpu") + 1 :]
    assert [line.split("  ")[0] for line in sources] == ["the command line", "the built-in model", "algorithm dapo"]
    assert [line.split("  ")[0] for line in lines[:2]] == ["warm-up 1/2", "warm-up 2/2"]
    lines = [line for line in lines if not line.startswith("compil")]  # where none were cached
    assert [line.split("  ")[0] for line in lines[2:]] == ["step 0 (1/2)", "plan", "step 1 (2/2)", "plan"]
    assert done.stderr.isascii()
    assert "\x1b" not in done.stderr


def test_the_run_folder_is_complete(run):
    assert check_whole(run) == 2
    names = {path.name for path in run.iterdir()}
    logs = {".lock", "config.json", "settings.txt", "metrics.jsonl", "samples.jsonl", "tensorboard", "report.html"}
    assert names == logs | {"traces", "policy", "checkpoints"}
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-00000", "step-00002"]
    check_samples(run, 2)
    config = json.loads((run / "config.json").read_text())
    assert config["rollout"]["prompts_per_step"] == 4
    assert config["versions"]["torch"] == torch.__version__
    assert config["model"]["num_experts"] == config["model_sizes"]["num_experts"] == 4
    assert list((run / "tensorboard").glob("events.out.*"))
    assert "<html" in (run / "report.html").read_text()


def test_metrics_are_finite_and_training_agrees_with_the_sampler(run):
    for row in rows_of(run):
        assert all(math.isfinite(value) for value in row.values() if isinstance(value, int | float))
        assert abs(row["k3_kl"]) < 1e-8
        assert row["alarms"] == []
        assert row["ran_at_home"] == 0
        assert row["known_rows"] == 1
        assert row["router_disagreement"] == 0
        assert 1 <= row["planned_skew"] <= row["rank_skew"] + 1e-9 <= 2 + 2e-9
        assert 1 <= row["expert_skew"] <= 4
        assert row["response_length_max"] <= 12


def test_traces_hold_every_sample_of_the_step_once(run):
    for step in range(2):
        trace = read_trace(run / "traces" / f"step-{step:05d}")
        assert sorted(trace.sample_ids) == list(range(8 * step, 8 * step + 8))
        assert np.array_equal(trace.group_ids, trace.sample_ids // 2)
        assert (trace.weight_versions == step).all()
        assert (trace.num_experts, trace.num_layers, trace.top_k) == (4, 2, 2)
        assert trace.num_rows == read_metrics(run / "metrics.jsonl").rows[step]["tokens"]


def test_the_policy_loads_without_relibra(run):
    model = AutoModelForCausalLM.from_pretrained(run / "policy")
    assert model.config.model_type == "qwen3_moe"
    tokens = torch.tensor([CharacterTokenizer(Arithmetic.characters).encode("1+2=")])
    assert torch.isfinite(model(tokens).logits).all()


@pytest.mark.slow
def test_the_same_seed_gives_the_same_numbers_and_the_same_bytes(run, tmp_path):
    again, other = train(tmp_path / "again", UNFILTERED), train(tmp_path / "other", UNFILTERED, "run.seed=1")
    assert again.returncode == other.returncode == 0
    assert rows_of(tmp_path / "again" / "run") == rows_of(run)
    assert shards_of(tmp_path / "again" / "run") == shards_of(run)
    assert shards_of(tmp_path / "other" / "run") != shards_of(run)


@pytest.mark.slow
def test_torchrun_makes_the_same_run(run, tmp_path):
    done = train(tmp_path, UNFILTERED, command=TORCHRUN)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["complete"] is True
    assert rows_of(tmp_path / "run") == rows_of(run)
    assert shards_of(tmp_path / "run") == shards_of(run)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ("parallel.ranks=4", "rollout.prompts_per_step=4"),
        ("parallel.ranks=3", "model.num_experts=6", "update.micro_batch_tokens=1"),
        ("warmup.steps=0", "run.steps=1", "task.name=strings", "checkpoint.every=0"),
    ],
    ids=" ".join,
)
def test_other_shapes_of_a_run(overrides, tmp_path):
    done = train(tmp_path, UNFILTERED, *overrides)
    assert done.returncode == 0, done.stderr
    steps = 1 if "run.steps=1" in overrides else 2
    assert check_whole(tmp_path / "run") == steps
    for row in rows_of(tmp_path / "run"):
        assert abs(row["k3_kl"]) < 1e-8
        assert row["router_disagreement"] == 0
    assert (tmp_path / "run" / "checkpoints").exists() == ("checkpoint.every=0" not in overrides)


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_a_model_prompts_and_a_reward_of_ones_own(preset, tmp_path):
    task = make_user_task(tmp_path)
    (tmp_path / "model" / "chat_template.jinja").write_text("{% for m in messages %},{{ m.content }}{% endfor %}")
    window = ("rollout.window=4", "algorithm.tail_drop=1") if preset == "tppo" else ()
    done = train(
        tmp_path, *task, f"algorithm.preset={preset}", *window, "evaluation.every=1", "run.steps=3", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert check_whole(tmp_path / "run") == 3
    rows = rows_of(tmp_path / "run")
    assert any((row["grad_norm"] or 0) > 1e-3 for row in rows)
    assert all(abs(row["k3_kl"] or 0) < 1e-8 for row in rows)
    assert all(0 < row["evaluation"]["reward"] < 1 for row in rows)
    prompts = {json.loads(line)["prompt"] for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()}
    assert prompts <= {f"{a}+{b}=" for a in range(10) for b in range(10)}
    assert re.search(r"the first prompt, .*prompts\.jsonl, line \d+, 5 tokens\):\n,\d\+\d=\n", done.stderr)
    assert AutoTokenizer.from_pretrained(tmp_path / "run" / "policy").encode("1+2=")


@pytest.mark.slow
def test_a_second_run_gets_a_folder_of_its_own(tmp_path):
    (tmp_path / "run").mkdir()
    done = train(tmp_path, "parallel.ranks=1", "warmup.steps=0", "run.steps=0")
    assert json.loads(done.stdout) == {
        "run": str(tmp_path / "run-2"),
        "complete": True,
        "steps": 0,
        **dict.fromkeys(("first_reward", "last_reward", "first_mean_reward", "last_mean_reward", "steps_averaged")),
        "report": None,
    }
    assert (tmp_path / "run-2" / "policy" / "config.json").is_file()
