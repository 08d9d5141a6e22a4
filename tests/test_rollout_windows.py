"""The model of windows against the grid it was worked out with elsewhere."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.simulation.windows import decode_in_windows, simulate_windowed_rollout
from relibra import ConfigError, cluster_preset
from relibra.simulation import Engines, LengthDistribution, model_shape

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


def test_totals_are_those_of_decoding_token_by_token():
    lengths = LengthDistribution(median=8.0, sigma=0.8, longest=40)
    got = decode_in_windows(lengths.draw, 5, 12, np.random.default_rng(3), steps=7, burn_in=20)
    rng = np.random.default_rng(3)
    length, done, busy, decode_steps, fed_again, continued = lengths.draw(5, rng), [0] * 5, 0, 0, 0, 0
    time = 0.0
    for step in range(20 + 7):
        counted = step >= 20
        fed_again += counted * sum(done)
        continued += counted * sum(d > 0 for d in done)
        for _ in range(12):
            active = [b for b in range(5) if done[b] < length[b]]
            if not active:
                break
            for b in active:
                done[b] += 1
            busy += counted * len(active)
            decode_steps += counted
            time += counted * (1 + 0.25 * len(active))
        fresh = lengths.draw(5, rng)
        for b in range(5):
            if done[b] == length[b]:
                length[b], done[b] = fresh[b], 0
    assert (got.tokens, got.decode_steps, got.fed_again, got.continued) == (busy, decode_steps, fed_again, continued)
    assert got.idle(5) == pytest.approx(1 - busy / (5 * decode_steps))
    assert got.tokens_per_time(0.25) == pytest.approx(busy / time)


def test_windows_decode_less_idly_and_pay_by_feeding_again():
    lengths, rng = LengthDistribution(median=3000.0, sigma=0.9, longest=24_576), np.random.default_rng(0)
    model, cluster = model_shape("qwen3-30b-a3b"), cluster_preset("h100x8", 16)
    engines = Engines(num_engines=2, ranks=8, slots=16)
    whole, cut = (
        simulate_windowed_rollout(lengths.draw, window, 500.0, engines, model, cluster, rng=rng)
        for window in (24_576, 4096)
    )
    assert whole.fed_again == 0
    assert cut.fed_again > 0
    assert cut.idle < whole.idle
    assert cut.tokens / cut.seconds > 1.2 * whole.tokens / whole.seconds
    assert cut.seconds == cut.decode + cut.prefill + cut.fed_again


def test_windows_that_decode_nothing_are_refused():
    draw = LengthDistribution(median=5.0, sigma=1.0, longest=5).draw
    for slots, window in ((0, 3), (3, 0)):
        with pytest.raises(ConfigError, match=f"an engine of {slots} slots and windows of {window} tokens"):
            decode_in_windows(draw, slots, window, np.random.default_rng(0), steps=1, burn_in=0)
