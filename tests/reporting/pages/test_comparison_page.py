"""Two runs side by side."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from relibra.errors import ConfigError
from relibra.reporting.pages.comparison_page import write_comparison
from tests.reporting.recordings import HOSTILE, full_row

pytest.importorskip("plotly", reason="the report needs plotly: pip install -e '.[report]'")


def _run(folder: Path, reward: float, name: str, **settings: object) -> Path:
    folder.mkdir()
    rows = [full_row(step) | {"reward": reward} for step in range(4)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.json").write_text(json.dumps({"run": {"name": name, "folder": str(folder)}, **settings}))
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


def test_two_runs_say_first_in_which_settings_they_differ(tmp_path: Path) -> None:
    same = {"rollout": {"window": 0}, "versions": {"torch": "2.8"}}
    runs = [
        _run(
            tmp_path / name, 0.5, name, update={"learning_rate": rate, "epochs": 1}, plan={"balancer": HOSTILE}, **same
        )
        for name, rate in (("one", 1e-6), ("two", 1e-5))
    ]
    page = write_comparison(*runs, tmp_path / "both.html").read_text()
    verdict = page[page.index('class="verdict"') : page.index("</header>")]
    assert "1 setting differs" in verdict
    assert re.findall(r'<section id="([a-z0-9-]+)"', page)[:2] == ["figures", "settings"]
    table = page[page.index('<section id="settings"') :].split("</section>")[0]
    assert re.findall("<td[^>]*>(.*?)</td>", table) == ["update.learning_rate", "1e-06", "1e-05"]
    (runs[1] / "config.json").unlink()
    assert "two has no config.json" in write_comparison(*runs, tmp_path / "both.html").read_text()
