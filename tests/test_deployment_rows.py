"""`relibra bench deployment` and `acceptance`: what its rows hold, and that goals are judged."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def test_goals_are_judged_by_their_limits():
    from benchmarks.deployment.rows import row

    common = {"label": "model", "unit": "x"}
    assert row("t", "c", 1.0, **common)["ok"] == ""
    assert row("t", "c", 1.0, most=1.0, **common)["ok"] == "yes"
    assert row("t", "c", 1.1, most=1.0, **common)["ok"] == "NO"
    assert row("t", "c", 0.9, least=1.0, most=2.0, **common)["ok"] == "NO"
    assert row("t", "c", 0.9, least=1.0, most=2.0, **common)["goal"] == "1 to 2"


@pytest.mark.slow
def test_the_program_runs_and_labels_never_share_a_table():
    done = subprocess.run(
        [sys.executable, "-W", "error", str(BENCHMARKS), "deployment", "--quick", "--json"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    rows = json.loads(done.stdout)
    labels = {}
    for one in rows:
        labels.setdefault(one["table"], set()).add(one["label"])
    assert all(len(found) == 1 for found in labels.values())
    tests = {one["test"] for one in rows}
    assert tests >= {3, 4, 5, 6, 7, 8, 9, 10, 11, 17, 18, 19}
    missed = {one["test"] for one in rows if one["ok"] == "NO"}
    assert missed <= {7}  # the simulator overlaps hops with experts, which the paper's formula does not


@pytest.mark.slow
def test_the_running_server_is_judged_by_its_tests():
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS), "acceptance", "--quick", "--json"], capture_output=True, text=True, check=True
    )
    rows = json.loads(done.stdout)
    assert {one["test"] for one in rows} == {1, 2, 12, 13, 14, 15, 16}
    exact = [one for one in rows if one["test"] in (1, 2, 16)]
    assert all(one["ok"] == "yes" for one in exact)  # the others are times


@pytest.mark.slow
def test_a_server_is_predicted_from_measured_times():
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS), "sizing", "--quick", "--json"], capture_output=True, text=True, check=True
    )
    rows = json.loads(done.stdout)
    settings = [one for one in rows if "predicted" in one]
    assert len(settings) == 4
    assert all(one["value"] == pytest.approx(one["predicted"] / one["measured"]) for one in settings)
    assert len([one for one in rows if one["goal"]]) == 4
