"""The page: what it holds, what it never holds, and what happens to damaged or partial runs."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
from dataclasses import replace
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from relibra.cli.main import app
from relibra.errors import ConfigError, TraceError
from relibra.reporting.data.metrics import Metrics, read_metrics
from relibra.reporting.data.number_format import percent
from relibra.reporting.data.recording import open_recording
from relibra.reporting.data.samples import Samples
from relibra.reporting.html.page import write_page
from relibra.reporting.html.route_figures import plotly_script
from relibra.reporting.html.run_figures import stage_seconds
from relibra.reporting.pages.plan_page import render_plan_page
from relibra.reporting.pages.report_page import SKEW_COLUMNS, render_report, summarize_recording, write_report
from relibra.routing.trace_files import write_trace
from tests.reporting.planned import compared_step
from tests.reporting.recordings import HOSTILE, metrics_row, small_trace

pytest.importorskip("plotly", reason="the report needs plotly: pip install -e '.[report]'")


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


def one_line(text: str) -> str:
    """A text without the line breaks of its template."""
    return re.sub(r"[ \n]+", " ", text)


def views(elements: Elements, slider: str) -> list[str]:
    """The names of the views that a slider chooses from."""
    [names] = [attrs["data-names"] for _, attrs in elements.found if attrs.get("id") == slider]
    return json.loads(names)


def own_page(page: str) -> str:
    """The page without plotly.js, which holds any text one can think of."""
    return page.replace(plotly_script(), "")


def test_report_of_a_run(reported: Path) -> None:
    assert reported.name == "report.html"
    assert reported.stat().st_size < 8_000_000
    elements = Elements(own_page(reported.read_text()))
    titles = re.findall(r'<h2 id="([a-z0-9-]+)-title">', reported.read_text())
    of_routes = ["load", "micro-batches", "sizes", "hottest", "groups", "stability"]
    of_step = ["planned", "levers-1", "loads", "cover", "bytes", "limits", "timeline"]
    assert titles == ["settings", "figures", "learning", "time", *of_routes, *of_step, "glossary"]
    for words in (
        "2 ranks (this run)",
        "Not possible with 8 experts: 32 ranks.",
        "static layout",
        "micro-batches of 64 tokens (the run’s)",
        "1 step without a finished trace left out",
        "3 steps",
        "360 routed tokens",
        "on 2 ranks, in micro-batches of whole samples",
        "Predicted: the last recorded step under the plan below",
    ):
        assert words in one_line(elements.text), words
    plots = {attrs["id"]: attrs for _, attrs in elements.found if attrs.get("class") == "plot"}
    loads = {f"loads-{rows}-{axis}" for rows in ("ranks", "experts") for axis in ("layers", "micro_batches")}
    assert plots.keys() == {f"{name}-plot" for name in ("learning", "seconds", "load", "skew", "stability")} | loads | {
        "timelines"
    }
    assert all(attrs["aria-label"] for attrs in plots.values())
    assert views(elements, "load-view") == ["all steps together", "step 0", "step 1", "step 2"]


def test_names_from_files_stay_text(run_folder: Path) -> None:
    row = metrics_row(2) | {"seconds": {HOSTILE: 1.0}}
    (run_folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    page = own_page(write_report(run_folder).read_text())
    elements = Elements(page)
    assert HOSTILE in elements.text
    assert "<img" not in page
    assert "alert(1)</script>" not in page
    assert not any("onerror" in attrs for _, attrs in elements.found)


def test_page_loads_nothing(reported: Path) -> None:
    page = reported.read_text()
    for tag, attrs in Elements(own_page(page)).found:
        assert "src" not in attrs, tag
        assert tag != "link" or attrs["href"] == "data:,"
    assert not re.search(r'src="http|<link href="http|@import|url\(', own_page(page))
    assert "default-src 'none'" in page


def test_the_page_allows_only_its_own_scripts(reported: Path) -> None:
    for text in (reported.read_text(), render_plan_page(compared_step(), datetime(2026, 1, 2, tzinfo=UTC))):
        [policy] = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
        [allowed] = re.findall(r"script-src ([^;]*)", policy)
        scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
        assert allowed.split() == [f"'sha256-{digest}'" for digest in digests]
        assert len(scripts) >= 2
        attributes = [name for _, attrs in Elements(own_page(text)).found for name in attrs]
        assert not [name for name in attributes if name.startswith("on")], "a handler in an attribute would not run"


def test_same_values_give_the_same_page(run_folder: Path) -> None:
    recording, made = open_recording(run_folder), datetime(2026, 1, 2, 3, 4, tzinfo=UTC)
    first, second = (render_report(recording, summarize_recording(recording), Samples(), made) for _ in range(2))
    assert first == second
    assert "2026-01-02 03:04 UTC" in first


def test_report_of_a_single_trace_with_one_layer(tmp_path: Path) -> None:
    write_trace(small_trace(num_layers=1, num_experts=12), tmp_path / "decode")
    output = write_report(tmp_path / "decode")
    assert output.name == "decode.report.html"
    page = output.read_text()
    assert "Not possible with 12 experts: 8, 32 ranks." in one_line(page)
    assert 'id="load-view"' not in page
    assert 'id="learning"' not in page
    assert "(chosen by the report)" in page


def test_run_without_metrics_and_configuration(run_folder: Path) -> None:
    (run_folder / "metrics.jsonl").unlink()
    (run_folder / "config.json").unlink()
    page = write_report(run_folder, run_folder.parent / "out" / "page.html").read_text()
    assert "<h1>run</h1>" in page
    assert 'id="learning"' not in page


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


@pytest.mark.parametrize("text", ['{"run": ', "[" * 200_000])
def test_a_damaged_configuration_is_refused(run_folder: Path, text: str) -> None:
    (run_folder / "config.json").write_text(text)
    with pytest.raises(TraceError, match=r"config\.json is damaged"):
        write_report(run_folder)


def test_absurd_numbers_are_passed_over(run_folder: Path) -> None:
    huge = "9" * 400
    (run_folder / "config.json").write_text(
        f'{{"parallel": {{"ranks": {huge}}}, "update": {{"micro_batch_tokens": {huge}}}}}'
    )
    rows = [
        f'{{"step": 0, "reward": {huge}, "seconds": {{"rollout": {huge}}}}}',
        f'{{"step": {huge}}}',
        '{"step": 1, "reward": 2}',
    ]
    (run_folder / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    (run_folder / "traces" / f"step-{huge[:200]}").mkdir()
    metrics = read_metrics(run_folder / "metrics.jsonl")
    assert (metrics.steps, metrics.column("reward"), metrics.unreadable) == ([0, 1], [None, 2.0], 1)
    assert "(chosen by the report)" in write_report(run_folder).read_text()


def test_half_a_character_in_a_name_does_not_stop_the_page(run_folder: Path) -> None:
    config = {"run": {"name": "half \ud800"}}
    (run_folder / "config.json").write_text(json.dumps(config))
    row = metrics_row(2) | {"seconds": {"stage \udfff": 1.0}}
    (run_folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    write_trace(replace(small_trace(), source="\ud800", group_names=("\ud801",)), run_folder / "traces" / "step-00004")
    assert "<h1>half \ufffd</h1>" in write_report(run_folder).read_text(encoding="utf-8")


@pytest.mark.parametrize("tokens", [32, 50])
def test_page_and_command_print_the_same_figures(run_folder: Path, tokens: int) -> None:
    """One recording, one number of ranks, one micro-batch size: one answer, the short rest of 120 rows included."""
    for step in (1, 2):
        shutil.rmtree(run_folder / "traces" / f"step-{step:05d}")
    config = {"parallel": {"ranks": 2}, "update": {"micro_batch_tokens": tokens // 2}}
    (run_folder / "config.json").write_text(json.dumps(config))
    text = " ".join(re.sub("<[^>]*>", " ", own_page(write_report(run_folder).read_text())).split())
    options = ("--ranks", "2,8", "--rows-per-micro-batch", str(tokens))
    command = ["trace", "stats", str(run_folder / "traces" / "step-00000"), *options]
    figures = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    for row, name in zip(figures["layouts"], ("2 ranks (this run)", "8 ranks"), strict=True):
        skews = [f"{row[column]:.2f}" for column in SKEW_COLUMNS]
        waiting = " ".join(percent(row["idle_share"]).split())
        assert " ".join([name, *skews, waiting]) in text
    assert f"cosine of a micro-batch and its step, mean {figures['cosine_to_mean']:.3f}" in text
    assert f"the busiest expert gets {figures['step_expert_skew']:.2f}× the mean load" in text


@pytest.mark.parametrize("name", ["config.json/page.html", "n" * 300 + ".html", ""])
def test_output_in_an_impossible_place_is_refused(run_folder: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="--output"):
        write_page(run_folder / name, "a page")


def test_failed_write_keeps_the_old_report(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output, before = run_folder / "report.html", b"the old report"
    output.write_bytes(before)

    def full_disk(descriptor: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(ConfigError, match="no space"):
        write_report(run_folder)
    assert output.read_bytes() == before
    assert not list(run_folder.glob(".*.tmp"))


def test_stage_names_are_not_read_as_markup_by_the_figure() -> None:
    figure = stage_seconds(Metrics(rows=({"step": 0, "seconds": {"<a href='x'>up</a>": 1.0}},)))
    assert figure.data[0].name == "&lt;a href=&#x27;x&#x27;&gt;up&lt;/a&gt;"
