"""TRL's GRPOTrainer under plans: losses, gradients, rewards and weights of the same run without."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from torch import multiprocessing as mp

from tests.integrations.trl_runs import REPLAY, STOCK, Case, train, weights

ROOT = Path(__file__).parents[2]
RELATIVE = 1e-6
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("trl") is None,
        reason="TRL IS NOT INSTALLED, so its trainer was not tested: pip install -e '.[train,trl]'",
    ),
]


def assert_same_run(found, expected):
    """Compare what two runs logged and computed, on all ranks."""
    for own, other in zip(found, expected, strict=True):
        # losses are differences of terms of order 1 in float32
        np.testing.assert_allclose(own["losses"], other["losses"], rtol=RELATIVE, atol=2e-7)
        assert len(own["logs"]) == len(other["logs"]) > 0
        for log, reference in zip(own["logs"], other["logs"], strict=True):
            for name in ("grad_norm", "reward", "reward_std", "aux_loss"):
                if name in reference:
                    assert log[name] == pytest.approx(reference[name], rel=RELATIVE), name
            assert log.get("completions/mean_length") == reference.get("completions/mean_length")


def assert_followed_plans(found):
    """Every micro-batch followed its plan, and replicas were used."""
    for own in found:
        assert sum(log.get("relibra/replicas", 0) for log in own["logs"]) > 0
        assert sum(log["relibra/pushed_mib"] for log in own["logs"]) > 0
        assert all(log["relibra/ran_at_home"] == 0 for log in own["logs"])
        planned = [log for log in own["logs"] if "relibra/skew" in log]
        assert all(log["relibra/skew"] < log["relibra/skew_before"] for log in planned)


def assert_same_weights(folder, found, expected):
    """Compare saved weights: experts are in logical order, wherever they were trained."""
    saved, reference = weights(folder / found), weights(folder / expected)
    assert saved.keys() == reference.keys()
    for name, weight in reference.items():
        np.testing.assert_allclose(saved[name], weight, rtol=1e-4, atol=1e-5, err_msg=name)


def test_a_run_under_plans_is_the_run_without(tmp_path):
    cases = {
        "stock": Case(**STOCK),
        "planned": Case(),
        "checkpointed": Case(options={"gradient_checkpointing": True}),
        "moved": Case(budget={"slots": 0}),
        "replayed": Case(**REPLAY),
    }
    found = train(cases, tmp_path)
    logs = found["stock"][0]["logs"]
    assert len(found["stock"][0]["losses"]) == 6
    assert len(logs) == 3
    assert any(log["completions/min_length"] < log["completions/max_length"] for log in logs)
    assert logs[0]["grad_norm"] > 0
    for name in ("planned", "checkpointed", "moved", "replayed"):
        assert_same_run(found[name], found["stock"])
        assert_same_weights(tmp_path, name, "stock")
    assert_followed_plans(found["planned"])
    assert_followed_plans(found["checkpointed"])
    assert sum(log["relibra/moved"] for log in found["moved"][0]["logs"]) > 0
    assert all(log["relibra/ran_at_home"] == 0 for log in found["moved"][0]["logs"])


def test_routes_stay_while_the_weights_change(tmp_path):
    """Several iterations over a generation batch, optimizer steps between its micro-batches."""
    twice = {"num_iterations": 2, "max_steps": 4}
    between = {"steps_per_generation": 2, "gradient_accumulation_steps": 1, "max_steps": 4}
    cases = {}
    for name, options in (("twice", twice), ("between", between), ("both", twice | between)):
        cases |= {
            f"{name}, replayed": Case(options=options, **REPLAY),
            f"{name}, planned": Case(options=options),
        }
    found = train(cases, tmp_path)
    for name in ("twice", "between", "both"):
        expected = found[f"{name}, replayed"]
        assert any(log["relibra/disagreement"] > 0 for log in expected[0]["logs"])  # routers would choose others by now
        assert_same_run(found[f"{name}, planned"], expected)
        assert_followed_plans(found[f"{name}, planned"])
        assert_same_weights(tmp_path, f"{name}, planned", f"{name}, replayed")


def test_gradients_of_two_batches_and_an_uneven_epoch(tmp_path):
    options = {"steps_per_generation": 1, "gradient_accumulation_steps": 2, "max_steps": 4}
    cases = {"stock": Case(options=options, prompts=7, **STOCK), "planned": Case(options=options, prompts=7)}
    found = train(cases, tmp_path)
    assert len(found["stock"][0]["losses"]) < 2 * len(found["stock"][0]["logs"])  # an epoch ends with one micro-batch
    assert_same_run(found["planned"], found["stock"])
    assert_followed_plans(found["planned"])


def test_truncated_completions_may_be_masked(tmp_path):
    options = {"mask_truncated_completions": True, "max_completion_length": 4}
    found = train({"stock": Case(options=options, **STOCK), "planned": Case(options=options)}, tmp_path)
    assert found["stock"][0]["logs"][0]["completions/clipped_ratio"] > 0
    assert_same_run(found["planned"], found["stock"])
    assert_followed_plans(found["planned"])


def test_routes_of_an_engine_are_replayed_in_old_log_probs_too(tmp_path):
    options = {"steps_per_generation": 2, "gradient_accumulation_steps": 1, "max_steps": 4}
    cases = {
        "own": Case(options=options, **REPLAY),
        "replayed": Case(options=options, engine=True, **REPLAY),
        "planned": Case(options=options, engine=True),
    }
    found = train(cases, tmp_path)
    assert_same_run(found["planned"], found["replayed"])
    assert_followed_plans(found["planned"])
    assert found["own"][0]["losses"][0] == pytest.approx(found["replayed"][0]["losses"][0], rel=RELATIVE)
    assert found["own"][0]["losses"][3] != pytest.approx(found["replayed"][0]["losses"][3], rel=RELATIVE)


@pytest.mark.parametrize("lost", [KeyError("sample 3"), ConnectionError("no route to host")], ids=["key", "server"])
def test_no_rank_waits_for_one_whose_engine_gives_no_routes(tmp_path, lost):
    """Both end at once: were one left waiting, `train` would run into its time limit."""
    first, second = train({"lost": Case(engine=True, lost=lost)}, tmp_path)["lost"]
    assert second["said"] == f"{type(lost).__name__}: {lost}"
    assert first["said"].startswith("EngineError: rank 1 cannot get the routes of its samples (engine_routes)")
    assert first["said"].endswith(str(lost))


def test_two_expert_parallel_groups(tmp_path):
    cases = {"stock": Case(**STOCK), "planned": Case()}
    found = train(cases, tmp_path, num_ranks=4)
    assert_same_run(found["planned"], found["stock"])
    assert_followed_plans(found["planned"])
    assert_same_weights(tmp_path, "planned", "stock")


def test_the_example_prints_what_it_says():
    example = ROOT / "examples" / "trl_grpo.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(example)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    expected = example.read_text().split("# Output:\n")[1]
    assert "".join(f"# {line}\n" for line in done.stdout.splitlines() if line.startswith("step")) == expected


def test_evaluation_and_checkpoints_with_moved_experts(tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}
    options |= {"save_strategy": "steps", "save_steps": 1, "save_only_model": True}
    cases = {"stock": Case(options=options, **STOCK), "planned": Case(options=options, budget={"slots": 0})}
    found = train(cases, tmp_path)
    assert sum(log.get("relibra/moved", 0) for log in found["planned"][0]["logs"]) > 0
    assert_same_run(found["planned"], found["stock"])
    assert_same_weights(tmp_path, "planned", "stock")


def test_load_best_model_at_end_is_refused(tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}
    options |= {"save_strategy": "steps", "save_steps": 1, "save_only_model": True, "load_best_model_at_end": True}
    with pytest.raises(mp.ProcessRaisedException, match="EngineError: load_best_model_at_end"):
        train({"planned": Case(options=options)}, tmp_path)
