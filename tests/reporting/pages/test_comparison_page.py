"""Two runs side by side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from relibra.errors import ConfigError
from relibra.reporting.pages.comparison_page import write_comparison
from tests.reporting.recordings import HOSTILE, full_row

pytest.importorskip("plotly", reason="the report needs plotly: pip install 'relibra[report]'")


def _run(folder: Path, reward: float, name: str) -> Path:
    folder.mkdir()
    rows = [full_row(step) | {"reward": reward} for step in range(4)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.json").write_text(json.dumps({"run": {"name": name}}))
    return folder


def test_both_runs_are_in_every_figure_and_in_the_table(tmp_path: Path) -> None:
    first, second = _run(tmp_path / "one", 0.25, HOSTILE), _run(tmp_path / "two", 0.75, "second")
    page = write_comparison(first, second, tmp_path / "both.html").read_text()
    assert '<td class="number">0.250</td><td class="number">0.750</td>' in page
    assert "second: reward" in page
    assert HOSTILE not in page
    for section in ("learning", "balance", "mismatch", "values", "update", "idle"):
        assert f'<section id="{section}"' in page


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    first, second = _run(tmp_path / "one", 0.25, "demo"), _run(tmp_path / "two", 0.75, "demo")
    assert "<h1>one and two</h1>" in write_comparison(first, second, tmp_path / "both.html").read_text()


def test_a_run_without_steps_gets_a_sentence(tmp_path: Path, run_folder: Path) -> None:
    (run_folder / "metrics.jsonl").unlink()
    with pytest.raises(ConfigError, match="no finished step"):
        write_comparison(run_folder, run_folder, tmp_path / "both.html")
