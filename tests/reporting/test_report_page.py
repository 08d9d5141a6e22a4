"""The page: what it holds, what it never holds, and what happens to damaged or partial runs."""

from __future__ import annotations

import builtins
import json
import os
import re
import subprocess
import sys
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path

import pytest

from relibra.errors import ConfigError, TraceError
from relibra.reporting.metrics import Metrics, read_metrics
from relibra.reporting.page import render_page, summarize_recording, write_report
from relibra.reporting.pictures import MAX_HEATMAP_STEPS, load_plotly, stage_seconds
from relibra.reporting.recording import open_recording
from relibra.routing.trace_files import write_trace

from .recordings import HOSTILE, metrics_row, small_trace

pytest.importorskip("plotly", reason="the report needs plotly: pip install 'relibra[report]'")


class Elements(HTMLParser):
    """The elements of a page and its visible text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.inside: str | None = None
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self.inside = tag

    def handle_endtag(self, tag: str) -> None:  # noqa: ARG002
        self.inside = None

    def handle_data(self, data: str) -> None:
        if self.inside not in ("script", "style"):
            self.text += data


def own_page(page: str) -> str:
    """The page without plotly.js, which holds any text one can think of."""
    return page.replace(load_plotly()[1], "")


def test_report_of_a_run(run_folder: Path) -> None:
    output = write_report(run_folder)
    assert output.resolve() == (run_folder / "report.html").resolve()
    assert output.stat().st_size < 8_000_000
    elements = Elements(own_page(output.read_text()))
    titles = re.findall(r'<h2 id="([a-z-]+)-title">', output.read_text())
    assert titles == ["learning", "load", "micro-batches", "sizes", "hottest", "groups", "stability", "glossary"]
    for words in (
        "On this run’s 2 ranks",
        "2 ranks (this run)",
        "not possible: 8 experts, 32 ranks",
        "static contiguous layout",
        "micro-batches of 64 tokens (the run’s)",
        "1 step without a finished trace left out",
        "3 steps",
        "360 routed tokens",
    ):
        assert words in elements.text, words
    plots = [attrs for _, attrs in elements.found if attrs.get("class") == "plot"]
    assert len(plots) == 6
    assert all(attrs["aria-label"] for attrs in plots)
    options = [attrs["value"] for tag, attrs in elements.found if tag == "option"]
    assert options == ["0", "1", "2", "3"]


def test_names_from_files_stay_text(run_folder: Path) -> None:
    row = metrics_row(2) | {"seconds": {HOSTILE: 1.0}}
    (run_folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    page = own_page(write_report(run_folder).read_text())
    elements = Elements(page)
    assert HOSTILE in elements.text
    assert "<img" not in page
    assert "alert(1)</script>" not in page
    assert not any("onerror" in attrs for _, attrs in elements.found)


def test_page_loads_nothing(run_folder: Path) -> None:
    page = write_report(run_folder).read_text()
    for tag, attrs in Elements(own_page(page)).found:
        assert "src" not in attrs, tag
        assert tag != "link" or attrs["href"] == "data:,"
    assert not re.search(r'src="http|<link href="http|@import|url\(', own_page(page))
    assert "default-src 'none'" in page


def test_same_values_give_the_same_page(run_folder: Path) -> None:
    recording, made = open_recording(run_folder), datetime(2026, 1, 2, 3, 4, tzinfo=UTC)
    first, second = (render_page(recording, summarize_recording(recording), made) for _ in range(2))
    assert first == second
    assert "2026-01-02 03:04 UTC" in first


def test_report_of_a_single_trace_with_one_layer(tmp_path: Path) -> None:
    write_trace(small_trace(num_layers=1, num_experts=12), tmp_path / "decode")
    output = write_report(tmp_path / "decode")
    assert output.name == "decode.report.html"
    page = output.read_text()
    assert "not possible: 12 experts, 8 ranks" in page
    assert "<select" not in own_page(page)
    assert 'id="learning"' not in page
    assert "(chosen by the report)" in page


def test_run_without_metrics_and_configuration(run_folder: Path) -> None:
    (run_folder / "metrics.jsonl").unlink()
    (run_folder / "config.json").unlink()
    page = write_report(run_folder, run_folder.parent / "out" / "page.html").read_text()
    assert "<h1>run</h1>" in page
    assert 'id="learning"' not in page


def test_metrics_with_missing_and_odd_values(run_folder: Path) -> None:
    rows = [{"step": 0}, {"step": 1, "reward": float("nan"), "seconds": None}, {"step": 2, "response_length": 7}]
    (run_folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "Response length" in write_report(run_folder).read_text()


def test_many_steps_are_thinned_in_the_selector(tmp_path: Path) -> None:
    for step in range(20):
        write_trace(small_trace(step, num_layers=1), tmp_path / "run" / "traces" / f"step-{step:05d}")
    found = Elements(own_page(write_report(tmp_path / "run").read_text())).found
    assert sum(tag == "option" for tag, _ in found) == 1 + MAX_HEATMAP_STEPS


def test_half_written_line_is_ignored_and_a_resumed_run_wins(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 0, "reward": 1}\n{"step": 1, "reward": 1}\n{"step": 1, "reward": 5}\n[3]\n{"step": 2, "re'
    )
    metrics = read_metrics(path)
    assert metrics.steps == [0, 1]
    assert metrics.column("reward") == [1.0, 5.0]
    assert metrics.unreadable == 1
    path.write_text('{"step": 0, "reward": 1}')  # whole, only its newline is missing
    assert read_metrics(path).steps == [0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda _: None, "does not exist"),
        (lambda path: path.mkdir(), "neither a run folder"),
        (lambda path: (path / "traces" / "step-00000").mkdir(parents=True), "no finished trace under traces/"),
        (lambda path: path.write_text("x"), "is not a trace"),
    ],
)
def test_what_is_no_recording_gets_a_sentence(tmp_path: Path, make, message: str) -> None:
    make(tmp_path / "what")
    with pytest.raises(TraceError, match=message):
        write_report(tmp_path / "what")
    assert not list(tmp_path.glob("*.html"))


def test_damaged_configuration_gets_a_sentence(run_folder: Path) -> None:
    (run_folder / "config.json").write_text('{"run": ')
    with pytest.raises(TraceError, match=r"config\.json is damaged"):
        write_report(run_folder)


def test_output_that_is_a_folder_gets_a_sentence(run_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"name an \.html file"):
        write_report(run_folder, run_folder)


def test_failed_write_keeps_the_old_report(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = write_report(run_folder)
    before = output.read_bytes()

    def full_disk(descriptor: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="no space"):
        write_report(run_folder)
    assert output.read_bytes() == before
    assert not list(run_folder.glob(".*.tmp"))


def test_missing_plotly_names_its_install_command(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_plotly(name: str, *args, **kwargs):
        if name.startswith("plotly"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_plotly)
    with pytest.raises(ConfigError, match=re.escape("pip install 'relibra[report]'")):
        write_report(run_folder)


def test_importing_the_report_loads_neither_torch_nor_plotly() -> None:
    code = "import sys, relibra.reporting; print([m for m in ('torch', 'plotly', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_stage_names_are_not_read_as_markup_by_the_figure() -> None:
    figure = stage_seconds(Metrics(rows=({"step": 0, "seconds": {"<a href='x'>up</a>": 1.0}},)))
    assert figure.data[0].name == "&lt;a href=&#x27;x&#x27;&gt;up&lt;/a&gt;"
