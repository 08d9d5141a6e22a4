"""A run folder on disk."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from relibra.reporting.pages.report_page import write_report
from relibra.routing.trace_files import write_trace
from tests.reporting.recordings import HOSTILE, metrics_row, small_trace


def write_run(run: Path) -> Path:
    """Write a run of three steps on 2 ranks, with hostile names, killed while it wrote its fourth."""
    for step in range(3):
        trace = replace(small_trace(step), group_names=(HOSTILE, "arithmetic"), source=HOSTILE)
        write_trace(trace, run / "traces" / f"step-{step:05d}")
    (run / "traces" / "step-00003").mkdir()
    config = {"run": {"name": HOSTILE}, "parallel": {"ranks": 2}, "update": {"micro_batch_tokens": 32}}
    (run / "config.json").write_text(json.dumps(config))
    rows = "".join(json.dumps(metrics_row(step)) + "\n" for step in range(3))
    (run / "metrics.jsonl").write_text(rows + '{"step": 3, "rew')
    return run


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """Such a run, to be changed."""
    return write_run(tmp_path / "run")


@pytest.fixture(scope="session")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of such a run, to be read."""
    pytest.importorskip("plotly", reason="the report needs plotly: pip install -e '.[report]'")
    return write_report(write_run(tmp_path_factory.mktemp("reported") / "run"))
