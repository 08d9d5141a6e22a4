"""`relibra calibrate`: what it refuses before it measures, and what it prints and writes; nothing is timed here."""

import json

import pytest

from relibra.calibration import measurement
from relibra.calibration.fit import Timings
from relibra.cluster import read_cluster


@pytest.fixture
def measured(monkeypatch):
    """Take made-up seconds instead of measuring; note what was asked for."""
    jobs = []

    def fake(job):
        jobs.append(job)
        return Timings(
            num_experts=4,
            experts={1: [1e-3, 2e-3, 3e-3], 256: [4e-2, 4e-2, 8e-2]},
            dense_flops=2e9,
            dense=[0.02],
            copies={1 << 20: [1e-4], 1 << 24: [16e-4]},
            exchange={1 << 12: [3e-4], 1 << 24: [16e-3]} if job.ranks > 1 else {},
            memory_bytes=2e8,
            memory=[0.02],
            product_alone=[0.01],
            exchange_alone=[0.01],
            together=[0.019],
        )

    monkeypatch.setattr(measurement, "measure_machine", fake)
    return jobs


def test_figures_are_printed_with_spread_and_cluster_is_written(run, measured, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = run("calibrate", "-o", tmp_path / "c.toml", "--model", "32x16", "--ranks", "4")
    assert code == 0
    for name in ("gemm, flop/s:", "host, seconds:", "exchange, seconds:", "links:"):
        assert f"\n{name}\n" in out
    assert "label measured" in " ".join(out.split())
    cluster = read_cluster(tmp_path / "c.toml")
    assert (cluster.label, cluster.num_ranks, cluster.name) == ("measured", 4, "calibrated-cpu-x4")
    assert (measured[0].expert.hidden, measured[0].sizes) == (32, measurement.CPU_SIZES)


def test_json_has_the_cluster_and_what_it_was_made_of(run, measured, tmp_path):
    code, out, _ = run("calibrate", "-o", tmp_path / "c.toml", "--quick", "--json")
    assert code == 0
    facts = json.loads(out)
    assert facts["written"] == str(tmp_path / "c.toml")
    assert facts["cluster"]["label"] == "measured"
    assert [row["rows"] for row in facts["gemm"]] == [1, 256]
    assert {"error", "worst", "link", "bytes", "seconds"} == set(facts["exchange"])
    assert measured[0].sizes == measurement.QUICK_SIZES


def test_one_gpu_needs_somebody_elses_links_and_is_a_model(run, measured, tmp_path, monkeypatch):
    machine = measurement.Machine(name="calibrated-gpu-x1", ranks=1, memory_bytes=1 << 36, description="1 x a GPU")
    monkeypatch.setattr(measurement.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(measurement.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(measurement, "describe_machine", lambda _: machine)
    code, _, err = run("calibrate", "-o", tmp_path / "c.toml")
    assert (code, measured) == (1, [])
    assert "for example --links-of h100x8" in err
    assert run("calibrate", "-o", tmp_path / "c.toml", "--links-of", "h100x8")[0] == 0
    assert read_cluster(tmp_path / "c.toml").label == "model"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "nonsense"], "--model 'nonsense' is unknown"),
        (["--ranks", "1"], "ask for 2 or more"),
        (["--links-of", "h100x8"], "with 2 ranks links are measured"),
        (["--links-of", "nowhere"], "cluster 'nowhere' is unknown"),
        (["-o", "."], "is a folder"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is(run, measured, tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    code, out, err = run("calibrate", *words)
    assert (code, out, measured) == (1, "", [])
    assert said in err
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())
