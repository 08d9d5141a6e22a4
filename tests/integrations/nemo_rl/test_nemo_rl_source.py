"""NeMo-RL itself: its policy cuts batches of its own in the driver, with relibra and without; workers are not started.

Needs a checkout of NeMo-RL (NEMO_RL_SOURCE), and an interpreter with what its driver imports (NEMO_RL_PYTHON). For a
checkout in RL:

    python3 -m venv .venv-nemo-rl
    .venv-nemo-rl/bin/pip install torch==2.13.0 . transformers==5.8.1 "ray[default]" omegaconf hydra-core pillow
    .venv-nemo-rl/bin/pip install requests nvidia-ml-py tensordict datasets pyzmq uvicorn fastapi mlflow swanlab wandb
    .venv-nemo-rl/bin/pip install tensorboard
    NEMO_RL_SOURCE=RL NEMO_RL_PYTHON=.venv-nemo-rl/bin/python python -m pytest tests/integrations/nemo_rl
"""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from relibra.environment import server_environment

ROOT = Path(__file__).resolve().parents[3]
SOURCE = Path(os.environ.get("NEMO_RL_SOURCE", "no checkout"))
PYTHON = Path(os.environ.get("NEMO_RL_PYTHON", ROOT / ".venv-nemo-rl" / "bin" / "python"))
GUIDE = ROOT / "docs" / "guides" / "trainers.md"
TIMEOUT_S = 600

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not ((SOURCE / "nemo_rl").is_dir() and PYTHON.exists()),
        reason=f"no NeMo-RL at {SOURCE} or no {PYTHON}: set NEMO_RL_SOURCE, NEMO_RL_PYTHON (first lines of this file)",
    ),
]


def overrides():
    """Return the lines of the guide that users paste."""
    [block] = re.findall(r"run_grpo\.py --config \S+ \\\n(.*?)```", GUIDE.read_text(), re.S)
    return [line.strip().removesuffix(" \\") for line in block.strip().splitlines()]


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    file = tmp_path_factory.mktemp("nemo-rl") / "result.json"
    script = Path(__file__).with_name("policy_at_work.py")
    command = [PYTHON, "-m", "relibra.integrations.nemo_rl", script, file, SOURCE.resolve(), *overrides()]
    path = os.pathsep.join([str(ROOT / "src"), str(SOURCE.resolve())])
    done = subprocess.run(
        command, env=server_environment(PYTHONPATH=path), capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]
    return json.loads(file.read_text())


def test_the_guide_sets_keys_of_nemo_rl(result):
    assert result["router_replay"] == {"enabled": True}
    assert result["sequence_packing"]["enabled"] is True
    assert result["sequence_packing"]["microbatch_order"] == "packer"


@pytest.mark.parametrize(
    ("name", "ranks_stay"),
    [("all ranks share experts", False), ("two ranks share experts", False), ("one rank feeds experts", True)],
)
def test_loads_of_experts_get_even(result, name, ranks_stay):
    """Conditions on shards, and the order of log-probs, were checked where the policy ran."""
    case = result["cases"][name]
    assert case["same"] == [False, False]
    assert case["same_ranks"] is ranks_stay
    assert case["bins"][0] == case["bins"][1]
    lines = [re.search(r"rank skew (\S+) -> (\S+) \(no schedule is below (\S+)\)", line) for line in case["lines"]]
    assert len(lines) == 3, "two steps of the update, and log-probs of the batch"
    for line in lines:
        before, after, lowest = (float(part) for part in line.groups())
        assert lowest <= after < before
        assert after < lowest + 0.04


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("largest first", "microbatch_order=packer"),
        ("no expert parallelism", "every rank has all experts"),
        ("DTensor", "not trained by Megatron"),
    ],
)
def test_bins_stay_where_nothing_can_be_planned(result, name, words):
    case = result["cases"][name]
    assert case["same"] == [True, True]
    [line] = case["lines"]
    assert words in line


def test_a_batch_without_routes_is_named(result):
    [line] = result["without routes"]
    assert "policy.router_replay.enabled=true" in line
