"""verl 0.9.1 itself: its Megatron engine trains on gloo processes with relibra as `external_lib`, as it does without.

Needs an environment with verl and Megatron-core: `make test-verl` makes one. VERL_PYTHON names its interpreter.
"""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from relibra.environment import server_environment
from tests.integrations.verl.passes_at_work import CASES

ROOT = Path(__file__).resolve().parents[3]
PYTHON = Path(os.environ.get("VERL_PYTHON", ROOT / ".venv-verl" / "bin" / "python"))
GUIDE = ROOT / "docs" / "guides" / "trainers.md"
PLANNED = ("four ranks", "tensor parallel", "two stages")
TIMEOUT_S = 900

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"no verl at {PYTHON}: run make test-verl, or set VERL_PYTHON"),
]


def overrides():
    """Return the lines of the guide that users paste."""
    [block] = re.findall(r"```bash\n(    [a-z_]+=.*?)```", GUIDE.read_text(), re.S)
    return [line.strip().removesuffix(" \\") for line in block.strip().splitlines()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return what each rank of each case saw."""
    folder = tmp_path_factory.mktemp("verl")
    environment = server_environment(PYTHONPATH=str(ROOT / "src"), OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    done = subprocess.run(
        [PYTHON, "-m", "tests.integrations.verl.passes_at_work", folder, *overrides()],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]
    return {file.stem: json.loads(file.read_text()) for file in folder.glob("*.json")}


def test_the_guide_sets_keys_of_verl(runs):
    """Hydra refuses keys that verl's configuration lacks."""
    assert runs["configuration"] == {
        "model_engine": "megatron",
        "actor_rollout_ref.model.external_lib": "relibra.integrations.verl",
        "actor_rollout_ref.actor.megatron.router_replay.mode": "R3",
        "actor_rollout_ref.rollout.enable_rollout_routing_replay": True,
        "actor_rollout_ref.actor.use_dynamic_bsz": True,
        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz": True,
    }


@pytest.mark.parametrize("name", CASES)
def test_passes_return_what_verl_alone_returns(runs, name):
    """Log-probs in the order of samples, and gradients summed over ranks; micro-batches were checked on each rank."""
    for one in runs[name]:
        assert one["log_probs"] <= 1e-6
        assert one["gradients"] <= 1e-7
        assert one["largest_gradient"] > 1e-3
        assert all(mean < -1 for mean in one["mean_log_prob"])
        assert all(ours == verls for ours, verls in one["micro_batches"])


@pytest.mark.parametrize("name", PLANNED)
def test_loads_of_experts_get_even(runs, name):
    first, *others = runs[name]
    lines = [re.search(r"rank skew (\S+) -> (\S+) \(no schedule is below (\S+)\)", line) for line in first["lines"]]
    assert len(lines) == 2
    for line in lines:
        before, after, lowest = (float(part) for part in line.groups())
        assert before > lowest + 0.1
        assert lowest <= after < lowest + 0.03
    assert not any(one["lines"] for one in others)
    assert not any(same for one in runs[name] for same in one["as_in_verl"])


def test_recorded_routes_are_planned_for_the_update(runs):
    [line] = runs["routes of the trainer"][0]["lines"]
    assert "update of 96 samples" in line


def test_replay_was_at_work(runs):
    assert all(one["without_replay"] > 1e-3 for one in runs["four ranks"])


@pytest.mark.parametrize(
    ("name", "words"), [("one rank", "every rank has all experts"), ("no replay", "no routes are replayed")]
)
def test_micro_batches_stay_where_nothing_can_be_planned(runs, name, words):
    for one in runs[name]:
        assert all(one["as_in_verl"])
        [line] = one["lines"]
        assert words in line


def test_single_passes_stay_where_nothing_can_be_planned(runs):
    for one in runs["four ranks"]:
        assert "use_dynamic_bsz=True" in one["kept"]["fixed number"][0]
        assert "no routed_experts" in one["kept"]["no routes"][0]
        assert one["kept"]["reference"] == []


def test_no_rank_waits_for_one_whose_routes_cannot_be_read(runs):
    said = [one["lost"] for one in runs["four ranks"]]
    assert [after for _, after in said] == [""] * 4
    assert said[1][0] == "KeyError: 'routed_experts'"
    assert all("rank 1 cannot count the loads" in said[rank][0] for rank in (0, 2, 3))
