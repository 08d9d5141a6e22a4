"""`relibra serve measure`: tables of a tiny model, and the plan that is made of them."""

import json

import numpy as np
import pytest

from relibra.planning.deployment.measured_seconds import read_measured
from relibra.serving import batch_seconds
from tests.serving.models import write_model


@pytest.fixture
def steps(monkeypatch):
    """Return what was measured of each batch; in its place come seconds that rise, whatever else this machine does."""
    found, measure = [], batch_seconds.step_seconds

    def rising(workers, layers, num_bytes):
        found.append(measure(workers, layers, num_bytes))
        return np.full((3, 2), 1e-4 + 1e-9 * num_bytes)

    monkeypatch.setattr(batch_seconds, "step_seconds", rising)
    monkeypatch.setattr(batch_seconds, "ROUNDS", 1)
    yield found
    assert found
    assert all(steps_3S.shape[1] > 1 and (steps_3S[:2] > 0).all() for steps_3S in found)


def test_a_model_is_measured_and_planned(run, tmp_path, monkeypatch, steps):
    monkeypatch.setattr(batch_seconds, "ROWS_PER_EXPERT", (1, 8, 16, 32))
    write_model("Qwen3MoeForCausalLM", tmp_path / "model")
    code, out, err = run("serve", "measure", tmp_path / "model", "--output", tmp_path / "nodes.toml", "--json")
    assert code == 0, err
    found = json.loads(out)
    measured = read_measured(tmp_path / "nodes.toml")
    assert [rows for rows, _ in measured.expert] == [one["rows_per_expert"] for one in found["batches"]]
    assert [rows for rows, _ in measured.expert] == pytest.approx([1, 8, 16, 32])
    assert all(0 < one["attention"] < 1 and 0 < one["expert"] < 1 for one in found["batches"])
    assert found["r2"].keys() == {"attention", "expert", "message"}
    code, out, err = run(
        "serve", "plan", tmp_path / "model", "--measured", tmp_path / "nodes.toml", "--max-gpus", 2, "--json"
    )
    assert code == 0, err
    assert json.loads(out)["pairs"][0]["gpus"] == 2


def test_models_whose_caches_are_not_joined_are_measured(tmp_path, monkeypatch, steps):
    monkeypatch.setattr(batch_seconds, "ROWS_PER_EXPERT", (4, 32))
    write_model("Qwen3NextForCausalLM", tmp_path / "model")
    measured = batch_seconds.measure_batches(tmp_path / "model", context=24)
    assert [requests for requests, _ in measured.attention] == [16, 128]
    assert len(steps) == 3, "the largest batch is run once before"


def test_a_folder_without_a_model_cannot_be_measured(run, tmp_path):
    code, _, err = run("serve", "measure", tmp_path)
    assert (code, "no config.json" in err) == (1, True)
