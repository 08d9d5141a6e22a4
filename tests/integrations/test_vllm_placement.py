"""The plug-in that places experts of vLLM's load balancer, on a stand-in of its registry, and with vLLM's own code."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from relibra.eplb import RelibraEplbPolicy
from relibra.errors import EngineError, PlanError
from relibra.integrations.vllm.expert_placement import VARIABLE, place_experts

PYTHON = Path(os.environ.get("VLLM_PYTHON", ".venv-vllm/bin/python"))
MAP = [[0, 1, 2, 3, 0, 4, 7, 6, 5, 4, 0, 1], [4, 1, 2, 3, 0, 2, 7, 6, 5, 4, 2, 4]]
LOADS = np.ones((2, 8))


@pytest.fixture
def policies(monkeypatch):
    """The registry of a stand-in of vLLM."""
    registry = {"default": object}
    for name in ("vllm", "vllm.distributed", "vllm.distributed.eplb", "vllm.distributed.eplb.policy"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["vllm.distributed.eplb.policy"].EPLB_POLICIES = registry
    return registry


def test_without_the_variable_nothing_changes(policies, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    place_experts()
    assert policies == {"default": object}


def test_on_takes_relibras_policy(policies, monkeypatch):
    monkeypatch.setenv(VARIABLE, "on")
    place_experts()
    place_experts()  # vLLM loads plug-ins several times
    assert policies == {"default": RelibraEplbPolicy}


def test_a_file_places_experts_whatever_the_loads(policies, monkeypatch, tmp_path):
    path = tmp_path / "placement.json"
    path.write_text(json.dumps({"physical_to_logical_map": MAP}))
    monkeypatch.setenv(VARIABLE, str(path))
    place_experts()
    place = policies["default"].rebalance_experts
    for old in (None, np.array(MAP)[:, ::-1]):
        np.testing.assert_array_equal(place(LOADS, 12, 1, 1, 2, old), MAP)
    for loads, slots in ((np.ones((3, 8)), 12), (np.ones((2, 9)), 12), (LOADS, 16)):
        with pytest.raises(PlanError, match=r"placement.json places experts of 2 layers into 12 slots \(8 experts\)"):
            place(loads, slots, 1, 1, 2)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"physical_to_logical_map": [[0, 1], [1, 1]]}', '{"physical_to_logical_map": [[0, 1], [1]]}',
     '{"physical_to_logical_map": [[0, 1.5]]}', '{"physical_to_logical_map": [[0, -1]]}',
     '{"physical_to_logical_map": [[0, 99999999]]}', '{"physical_to_logical_map": "x"}', "[" * 100_000],
)  # fmt: skip
def test_a_file_that_is_no_placement_is_one_sentence(policies, monkeypatch, tmp_path, text):
    path = tmp_path / "placement.json"
    path.write_text(text)
    monkeypatch.setenv(VARIABLE, str(path))
    with pytest.raises(PlanError, match=r"placement\.json"):
        place_experts()
    assert policies == {"default": object}


def test_a_version_without_policies_is_named(policies, monkeypatch):
    monkeypatch.setenv(VARIABLE, "on")
    policies["swift"] = policies.pop("default")
    with pytest.raises(EngineError, match="swift"):
        place_experts()
    del sys.modules["vllm.distributed.eplb.policy"].EPLB_POLICIES
    with pytest.raises(EngineError, match="unset it"):
        place_experts()


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason=f"no vLLM at {PYTHON}: run make test-vllm, or set VLLM_PYTHON")
@pytest.mark.parametrize("wanted", ["on", "file"])
def test_vllms_own_code_moves_weights_as_placed(wanted, tmp_path):
    path = tmp_path / "placement.json"
    path.write_text(json.dumps({"physical_to_logical_map": MAP}))
    done = subprocess.run(
        [PYTHON, Path(__file__).with_name("vllm_placement_moves.py")],
        env={**os.environ, VARIABLE: "on" if wanted == "on" else str(path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"placed by {'RelibraEplbPolicy' if wanted == 'on' else 'PlannedPlacement'}" in done.stdout
    assert wanted == "on" or str(MAP) in done.stdout
