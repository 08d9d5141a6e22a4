"""What the page says of a training run: its metrics, its samples, and runs that lack some or most of them."""

from __future__ import annotations

import json
import math
import re
from itertools import pairwise
from pathlib import Path

import pytest

from relibra.errors import TraceError
from relibra.reporting.data.metrics import Metrics, read_metrics
from relibra.reporting.data.samples import MAX_CHARACTERS, MAX_STEPS, Samples, read_samples
from relibra.reporting.html.page import render
from relibra.reporting.html.run_figures import section_figures
from relibra.reporting.pages.report_page import SAMPLES_AT_ONCE, write_report
from relibra.reporting.pages.run_values import key_figures, run_values
from relibra.simulation.training_passes import Kept, PredictedIteration
from tests.reporting.recordings import HOSTILE, full_row, sample_row
from tests.reporting.test_report_page import Elements, one_line, own_page

pytest.importorskip("plotly", reason="the report needs plotly: pip install -e '.[report]'")


def _write(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _sections_of(metrics: Metrics) -> str:
    return render("run.html", run=run_values(metrics))


def _sample_browser(samples: Samples) -> str:
    return render("samples.html", samples=samples, samples_at_once=SAMPLES_AT_ONCE)


@pytest.fixture
def full(run_folder: Path) -> Path:
    _write(run_folder / "metrics.jsonl", [full_row(step) for step in range(3)])
    _write(run_folder / "samples.jsonl", [sample_row(step, sample) for step in range(3) for sample in range(4)])
    return run_folder


def test_a_full_run_has_every_section(full: Path) -> None:
    page = own_page(write_report(full).read_text())
    elements = Elements(page)
    ids = [attrs["id"] for tag, attrs in elements.found if tag == "section"]
    assert ids[:8] == ["settings", "figures", "learning", "balance", "values", "mismatch", "update", "time"]
    for words in (
        "reward 0.000 → 0.200",
        "rank skew in training 1.50× → 1.02×",
        "on 2 ranks (this run)",
        "k3_kl is 0.2, harmless is 0 to 0.1",
        "30\u202f% of the batch was idle",
        "run report",
    ):
        assert words in one_line(elements.text), words
    assert sum("data-tokens" in attrs for _, attrs in elements.found) == 12


def test_sections_without_numbers_are_left_out() -> None:
    metrics = Metrics(rows=({"step": 0}, {"step": 1, "reward": None, "evaluation": None, "alarms": None}))
    assert _sections_of(metrics).strip() == ""
    assert _sample_browser(Samples()).strip() == ""


def test_known_addresses_and_waits_without_them_are_key_figures() -> None:
    rows = [list(row) for row in key_figures([Metrics(rows=(full_row(0), full_row(1) | {"known_rows": 0.25}))])]
    found = [figure for name, figure in rows if "known before the step" in name or "live layers wait" in name]
    assert found == ["50.0%", "0.500", "0.250"]


def test_stages_stand_as_measured_beside_predicted() -> None:
    metrics = Metrics(rows=tuple(full_row(step) for step in range(2)))  # rollout 2.0 with 30 % idle, update 1.0
    predicted = PredictedIteration(
        stages={"rollout": 0.5, "update": 1.5}, beside={}, kept=Kept(), bytes=0.0, fits=True
    )  # fmt: skip
    rows = {row[0]: row[1:] for row in run_values(metrics, predicted)["seconds"]}
    assert rows["rollout"] == ["1.40", "45\u202f%", "0.50", "25\u202f%"]
    assert rows["tail"] == ["0.60", "19\u202f%", "–", "–"]
    assert rows["update"] == ["1.00", "32\u202f%", "1.50", "75\u202f%"]
    assert "predicted" not in _sections_of(metrics)
    assert run_values(Metrics(rows=({"step": 0},)), predicted)["seconds"] == []


@pytest.mark.parametrize("key", sorted(full_row(0).keys() - {"step"}))
def test_any_key_may_be_missing_or_odd(key: str) -> None:
    odd = [
        full_row(step) | {key: value} for step, value in enumerate((None, "text", math.nan, {"reward": "x"}, [None, 3]))
    ]
    without = {name: value for name, value in full_row(5).items() if name != key}
    assert "learning" in _sections_of(Metrics(rows=(*odd, without, full_row(6))))


def test_a_run_of_a_dense_model_has_a_report_without_routes(tmp_path: Path) -> None:
    run = tmp_path / "dense"
    run.mkdir()
    rows = [{"step": step, "reward": 0.5, "rank_skew": None, "alarms": []} for step in range(2)]
    _write(run / "metrics.jsonl", rows)
    page = own_page(write_report(run).read_text())
    assert "reward 0.500 → 0.500" in page
    assert 'id="load"' not in page
    assert 'id="balance"' not in page
    (run / "metrics.jsonl").write_text("")
    with pytest.raises(TraceError, match="no finished step"):
        write_report(run)


def test_panels_draw_the_columns_that_a_run_has() -> None:
    rows = tuple(full_row(step) | {"k3_kl": 0.0, "probability_difference": None} for step in range(3))
    metrics = Metrics(rows=rows)
    figures = section_figures([("", metrics)])
    assert [curve.name for curve in figures["mismatch"].data] == ["router disagreement"]
    figure = figures["learning"]
    names = [curve.name for curve in figure.data if curve.name]
    expected = ["reward", "evaluation", "mean length", "95th percentile", "longest", "unfinished"]
    assert names == [*expected, "truncated, of those that ended"]
    evaluation = figure.data[names.index("evaluation") + 2]  # behind the two edges of the band
    assert (evaluation.mode, list(evaluation.y)) == ("markers", [None, 0.6, None])
    domains = [figure.layout[axis].domain for axis in ("yaxis", "yaxis2", "yaxis3")]
    assert domains[0][1] == 1
    assert domains[2][0] == pytest.approx(0)
    assert all(low > high for (low, _), (_, high) in pairwise(domains))


def test_alarms_are_shown_once_with_their_latest_sentence() -> None:
    rows = [{"step": step, "alarms": [f"ess is 0.{step}, harmless is 0.3 to 1: few", HOSTILE]} for step in range(3)]
    page = _sections_of(Metrics(rows=tuple(rows)))
    rows = re.findall('<td class="number">3</td><td class="number">2</td><td class="name">([^<]*)', page)
    assert [row.partition(" ")[0] for row in rows] == ["ess", "&lt;img"] or len(rows) == 2
    assert "ess is 0.2, harmless" in rows[0]
    assert "<script" not in page


def test_texts_of_the_policy_stay_texts(full: Path) -> None:
    messages = [{"role": HOSTILE, "content": "Say </pre></details>" + HOSTILE}, 3, {"role": "user"}]
    rows = [
        sample_row(0, 0, prompt=messages, response=HOSTILE, finish=HOSTILE),
        sample_row(0, 1, response="\x1b[31m\x00 red\x7f"),
        sample_row(0, 2, response="half \ud800"),
    ]
    _write(full / "samples.jsonl", rows)
    page = own_page(write_report(full).read_text(encoding="utf-8"))
    elements = Elements(page)
    assert "Say </pre></details>" + HOSTILE in elements.text
    assert not any(tag == "img" or "onerror" in attrs for tag, attrs in elements.found)
    assert page.count("<details") == page.count("</details>") == 5  # 3 samples, settings, figures of layers
    assert page.count("<pre>") == page.count("</pre>") == 6
    assert "␛[31m␀ red␡" in page


def test_a_very_long_text_keeps_its_start_and_its_end(tmp_path: Path) -> None:
    text = "start " + "x" * 3_000_000 + " \\boxed{42}"
    [sample] = read_samples(_write(tmp_path / "samples.jsonl", [sample_row(0, 0, response=text)])).of_steps
    assert len(sample.response) < MAX_CHARACTERS + 60
    assert sample.response.startswith("start x")
    assert sample.response.endswith("x \\boxed{42}")
    assert "characters left out" in sample.response


def test_rows_that_lack_keys_are_samples_all_the_same(tmp_path: Path) -> None:
    rows = [{"step": 4}, {"step": 4, "reward": None, "tokens": None, "prompt": None, "response": 3, "windows": "x"}]
    path = _write(tmp_path / "samples.jsonl", rows)
    path.write_text(path.read_text() + '[1]\n{"step": true}\n{"step": 5, "resp')
    samples = read_samples(path)
    assert (samples.steps, samples.num_steps, samples.unreadable) == ([4], 1, 2)
    page = _sample_browser(samples)
    assert page.count("no reward") == 2
    assert "data-reward" not in page
    assert 'data-tokens="-1"' in page
    assert "(empty)" in page


def test_many_steps_are_thinned_to_some_evenly_chosen_ones(tmp_path: Path) -> None:
    rows = [sample_row(step, 0) for step in range(200)]
    samples = read_samples(_write(tmp_path / "samples.jsonl", rows))
    assert (len(samples.steps), samples.num_steps) == (MAX_STEPS, 200)
    assert (samples.steps[0], samples.steps[-1]) == (0, 199)
    page = _sample_browser(samples)
    assert f"Steps with samples: 200, shown: {MAX_STEPS}." in " ".join(page.split())
    assert page.count("<option") == 1 + MAX_STEPS + 3
    assert f'data-shown="{SAMPLES_AT_ONCE}"' in page


def test_metrics_read_tables_and_texts(tmp_path: Path) -> None:
    rows = [{"step": 0, "evaluation": {"reward": 1}, "alarms": ["a", 3]}, {"step": 1, "evaluation": 4, "alarms": "b"}]
    metrics = read_metrics(_write(tmp_path / "metrics.jsonl", rows))
    assert metrics.column("evaluation", "reward") == [1.0, None]
    assert metrics.texts("alarms") == [["a"], []]
