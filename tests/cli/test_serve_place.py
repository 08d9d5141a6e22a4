"""`relibra serve place`: rows per token never without the load of the busiest worker, and a file for the server."""

import json

import numpy as np
import pytest

from relibra.planning.deployment.deployment_files import read_expert_placement
from relibra.routing.synthetic import TraceShape, domain_trace
from relibra.routing.trace_files import write_trace


@pytest.fixture
def trace(tmp_path):
    """Return a folder with routes of domains that prefer experts."""
    return write_routes(tmp_path / "trace", samples=24)


def write_routes(folder, samples):
    shape = TraceShape(rows_per_sample=(40,) * samples, num_layers=2, num_experts=16, top_k=3)
    write_trace(domain_trace(shape, np.random.default_rng(0)), folder)
    return folder


@pytest.mark.parametrize("spare", [0, 1])
def test_each_row_has_rows_and_load(run, trace, tmp_path, spare):
    file = tmp_path / "placement.json"
    options = ("--experts", 4, "--spare-experts", spare, "--cap", 1.1, "--output", file)
    code, out, err = run("serve", "place", trace, *options, "--json")
    assert code == 0, err
    found = json.loads(out)
    names = ["by number", "balance only", "picked together", "with copies"][: 3 + spare]
    assert list(found["placements"]) == names
    for row in found["placements"].values():
        assert set(row) == {"rows_per_token", "busiest_worker", "busiest_in_batch"}
        assert 1 <= row["rows_per_token"] <= 3
        assert 1 <= row["busiest_worker"] <= row["busiest_in_batch"]
    placement = read_expert_placement(file)
    assert (placement.workers, placement.spare, placement.cap) == (4, spare, 1.1)
    assert placement.held_LNE.shape == (2, 4, 16)
    code, out, _ = run("serve", "place", trace, *options[:-2])
    assert code == 0
    assert [line.split("  ")[0].strip() for line in out.splitlines()[-len(names) :]] == names


def test_twice_the_same_trace_gives_the_same_file(run, trace, tmp_path):
    files = [tmp_path / name for name in ("one.json", "two.json")]
    for file in files:
        assert run("serve", "place", trace, "--experts", 3, "--output", file)[0] == 0
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize(
    ("options", "named"), [(("--experts", 17), "--experts 17"), (("--experts", 2, "--spare-experts", 9), "of no use")]
)
def test_workers_that_do_not_fit_are_refused(run, trace, options, named):
    code, _, err = run("serve", "place", trace, *options)
    assert code == 1
    assert named in err


def test_a_trace_of_one_sample_is_refused(run, tmp_path):
    code, _, err = run("serve", "place", write_routes(tmp_path / "one", samples=1), "--experts", 2)
    assert code == 1
    assert "two samples or more" in err
