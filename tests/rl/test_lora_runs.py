"""Runs that train adapters: from a model's folder to a reward, a resume, and a merged model."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from relibra.reporting.data.metrics import read_metrics
from tests.rl.ranks_at_work import assert_same_bits, assert_trained, outcome_of, run_alone, run_on_ranks
from tests.rl.runs import make_user_task, run_command
from tests.rl.test_resume import MOVING, rewound

pytestmark = pytest.mark.slow

LORA = ("lora.rank=8", "lora.alpha=16", "update.learning_rate=1e-3")
STEPS = (*("run.steps=4", "trace.keep=9", "checkpoint.every=2"), "checkpoint.keep=9")


def settings_in(folder, *overrides):
    """Return the settings of a run with a tiny model that is made in a folder."""
    make_user_task(folder)
    model = (f"model.path={folder / 'model'}", "model.dtype=float32")
    return (*model, *LORA, *STEPS, *overrides)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_has_the_same_bits(dtype, tmp_path):
    case, run = settings_in(tmp_path, f"model.dtype={dtype}", "algorithm.kl_coefficient=0.1"), tmp_path / "run"
    whole = outcome_of(run, [run_alone(case, run)])
    assert_trained(whole)
    assert not (run / "reference").exists(), "the reference policy is the base"
    rewound(run, 2)
    again = outcome_of(run, [run_alone(case, run)])
    assert again.of_ranks[0], "nothing was made again"
    assert_same_bits(whole, again)


def test_plans_move_adapters_and_a_resume_finds_them(tmp_path, monkeypatch):
    (tmp_path / "my_balancer.py").write_text(MOVING)
    monkeypatch.syspath_prepend(tmp_path)
    canonical = settings_in(tmp_path, "plan.sums=canonical", "plan.gradient_wire=float32")
    cases = {
        "static": (*canonical, "plan.balancer=static"),
        "moving": (*canonical, "plan.balancer=my_balancer:decide"),
    }
    found = run_on_ranks(2, cases, tmp_path / "runs")
    assert sum(row["moved_experts"] or 0 for row in found["moving"].rows) > 0
    assert_trained(found["moving"])
    for name, tensor in found["static"].weights.items():
        assert torch.equal(found["moving"].weights[name], tensor), name
    rewound(tmp_path / "runs" / "moving", 2)
    assert_same_bits(found["moving"], run_on_ranks(2, {"moving": cases["moving"]}, tmp_path / "runs")["moving"])


def test_adapters_learn_the_toy_task_on_two_ranks(tmp_path):
    about = ("parallel.ranks=2", f"run.folder={tmp_path}", "rollout.max_response=40", "task.max_terms=6")
    warmup = ("warmup.steps=240", "warmup.batch=64", "warmup.learning_rate=8e-3", "warmup.error_rate=0.2")
    base = ["train", *about, *warmup, "model.num_layers=2", "model.num_experts=8", "run.name=base", "run.steps=0"]
    done = run_command(base, tmp_path)
    assert done.returncode == 0, done.stderr
    model = tmp_path / "base" / "policy"
    words = ["train", *about, f"model.path={model}", "model.dtype=float32", "run.name=lora", "run.steps=8"]
    words += ["lora.rank=8", "update.learning_rate=2e-3", "update.mini_batches=2", "rollout.prompts_per_step=24"]
    done = run_command(words, tmp_path)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "lora"
    rewards = [row["reward"] for row in read_metrics(run / "metrics.jsonl").rows]
    assert sum(rewards[-3:]) / 3 > rewards[0] + 0.15, rewards
    adapter = load_file(run / "policy" / "adapter_model.safetensors")
    assert json.loads((run / "policy" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(model)
    done = run_command(["export", str(tmp_path / "merged"), "--run", str(run)], tmp_path)
    assert done.returncode == 0, done.stderr
    merged, plain = (AutoModelForCausalLM.from_pretrained(one) for one in (tmp_path / "merged", model))
    assert merged.dtype == torch.float32
    name = "model.layers.0.self_attn.q_proj"
    change = merged.get_parameter(f"{name}.weight") - plain.get_parameter(f"{name}.weight")
    product = adapter[f"base_model.model.{name}.lora_B.weight"] @ adapter[f"base_model.model.{name}.lora_A.weight"]
    torch.testing.assert_close(change, 32 / 8 * product, rtol=0, atol=1e-6)
    assert float(change.detach().abs().max()) > 0
