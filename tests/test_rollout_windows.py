"""The model of windows against the grid it was worked out with elsewhere."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"

GRID = {  # case: idle when synchronous and in windows, tokens per time at b = 0 and 1/512, continued, fed again
    (3_000, 0.9, 8_192): (0.82, 0.54, 2.6, 2.1, 0.13, 0.34),
    (6_000, 0.6, 8_192): (0.71, 0.36, 2.2, 1.7, 0.26, 0.45),
    (6_000, 0.9, 8_192): (0.67, 0.33, 2.0, 1.6, 0.33, 0.63),
    (8_000, 0.5, 8_192): (0.63, 0.29, 1.9, 1.5, 0.36, 0.58),
    (6_000, 0.6, 4_096): (0.71, 0.22, 2.7, 1.9, 0.55, 1.13),
    (3_000, 0.9, 4_096): (0.82, 0.33, 3.7, 2.7, 0.37, 0.93),
}


def test_the_grid_comes_out():
    """Ratios within 5 %, shares within 0.02; the grid itself is rounded."""
    from benchmarks.simulation.rollout_windows import modelled

    rows = modelled(list(GRID), 3)
    for row, (idle_sync, idle_window, free, dear, continued, fed_again) in zip(rows, GRID.values(), strict=True):
        assert row["label"] == "model"
        assert row["idle sync"] == pytest.approx(idle_sync, abs=0.02)
        assert row["idle window"] == pytest.approx(idle_window, abs=0.02)
        assert row["continued"] == pytest.approx(continued, abs=0.02)
        assert row["rate, b = 0"] == pytest.approx(free, rel=0.05)
        assert row["rate, b = 1/512"] == pytest.approx(dear, rel=0.05)
        assert row["fed again"] == pytest.approx(fed_again, rel=0.05)


def test_the_program_prints_its_rows_and_writes_none_when_quick(tmp_path):
    command = [sys.executable, "-W", "error", str(BENCHMARKS), "rollout_windows", "--quick"]
    done = subprocess.run([*command, "--output", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "8,000" in done.stdout
    assert not list(tmp_path.iterdir())
