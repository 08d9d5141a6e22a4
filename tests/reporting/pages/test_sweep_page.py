"""The picture of a sweep: what it draws, and what stands around it on the page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from relibra.reporting.pages.sweep_page import (
    STATIC_VALUE,
    VALUE,
    describe_constants,
    draw_sweep,
    sweep_lines,
)
from tests.reporting.test_report_in_browser import Tab, tab

__all__ = ["tab"]
TITLE = "DeepSeek-V2-Lite on h100x8, simulated"


SETTINGS = ("ranks", "ranks_per_node", "slots", "micro_batch_tokens", "pipeline_stages", "balancer")


def draw(path: Path, given: list[dict[str, Any]], varied: list[str]) -> None:
    draw_sweep(path, given, varied, [name for name in SETTINGS if name not in varied], TITLE)


def rows(ranks: tuple[int, ...] = (2, 8, 32)) -> list[dict[str, Any]]:
    found = []
    for count in ranks:
        for balancer in ("static", "relibra"):
            row = {"ranks": count, "ranks_per_node": min(8, count), "slots": 1, "micro_batch_tokens": 16384}
            row |= {"pipeline_stages": 1, "balancer": balancer, VALUE: 1000.0 * count + (balancer == "relibra")}
            row |= {STATIC_VALUE: 1000.0 * count, "kept_static": balancer == "static"}
            found.append(row)
    return found


def drawn(path: Path, given: list[dict[str, Any]], varied: list[str]) -> tuple[str, dict[str, Any]]:
    """Return the page, and its figure."""
    pytest.importorskip("plotly", reason="the report needs plotly: pip install -e '.[report]'")
    draw(path, given, varied)
    page = re.sub(r"[ \n]+", " ", path.read_text())
    figure = re.search(r'<script type="application/json" id="sweep-plot-figure">(.*?)</script>', page, re.DOTALL)
    assert figure is not None
    return page, json.loads(figure[1])


def test_the_page_names_model_machine_and_constants(tmp_path: Path) -> None:
    page, figure = drawn(tmp_path / "s.html", rows(), ["ranks", "balancer"])
    assert f"<h1>{TITLE}</h1>" in page
    [about] = re.findall(r'<p class="how">(.*?)</p>', page)
    assert TITLE in about
    for name, value in (("ranks per node", "2 to 8"), ("slots", "1"), ("micro batch tokens", "16,384")):
        assert f'<td class="name">{name}</td><td class="number">{value}</td>' in page
    assert "Most tokens per second and rank, simulated: 32,001 with ranks 32, balancer relibra." in page
    assert '<td class="name">relibra</td><td class="number">32,001</td><td class="number">1.000</td>' in page
    assert [trace["name"] for trace in figure["data"]] == ["static", "relibra"]
    assert figure["layout"]["yaxis"]["title"]["text"] == "tokens per second and rank"


@pytest.mark.parametrize(("ranks", "kind"), [((2, 8, 32), "log"), ((6, 8, 12), "linear")])
def test_ticks_stand_at_values_that_occur(tmp_path: Path, ranks: tuple[int, ...], kind: str) -> None:
    _, figure = drawn(tmp_path / "s.html", rows(ranks), ["ranks", "balancer"])
    axis = figure["layout"]["xaxis"]
    assert (axis["tickmode"], axis["tickvals"], axis["type"]) == ("array", list(ranks), kind)
    assert axis["title"]["text"] == "ranks" + " (logarithmic)" * (kind == "log")


@pytest.mark.parametrize("varied", [["balancer"], []])
def test_balancers_alone_are_the_axis(tmp_path: Path, varied: list[str]) -> None:
    given = rows((8,))[: 2 if varied else 1]
    _, figure = drawn(tmp_path / "s.html", given, varied)
    assert figure["layout"]["xaxis"]["type"] == "category"
    assert figure["data"][0]["x"] == ["static", "relibra"][: len(given)]


def test_the_static_layout_is_drawn_where_no_balancer_is_static(tmp_path: Path) -> None:
    given = [row for row in rows() if row["balancer"] != "static"]
    _, figure = drawn(tmp_path / "s.html", given, ["ranks"])
    assert [trace["name"] for trace in figure["data"]] == ["relibra", "static"]
    assert [trace["line"]["dash"] for trace in figure["data"]] == ["solid", "dash"]
    assert figure["data"][1]["y"] == [2000, 8000, 32000]
    for slots, ranks, names in (
        ((1, 4), (8,), ["relibra", "static"]),
        ((1, 4), (2, 8), ["1 slots, relibra", "4 slots, relibra", "static"]),
    ):
        varied = ["ranks"] * (len(ranks) > 1) + ["slots"]
        some = [row | {"slots": count} for row in given for count in slots if row["ranks"] in ranks]
        lines = sweep_lines(some, varied).lines
        assert list(lines) == names
        assert list(lines["static"].values()) == [1000.0 * row for row in ranks] * (3 - len(ranks))
    assert sweep_lines(given[:1], []).lines == {"": {"relibra": 2001.0, "static": 2000.0}}
    draw(tmp_path / "s.png", given, ["ranks"])


def test_a_balancer_that_kept_the_static_layout_is_told(tmp_path: Path) -> None:
    given = [row | {"kept_static": True, VALUE: row[STATIC_VALUE]} for row in rows((8,)) if row["balancer"] != "static"]
    page, _ = drawn(tmp_path / "s.html", given, ["balancer"])
    assert page.count("static (instead of relibra)") == 2


def test_settings_that_were_not_given_are_named() -> None:
    given = [row | {"micro_batch_tokens": None} for row in rows()]
    constants = describe_constants(given, ["slots", "micro_batch_tokens"])
    assert ("micro batch tokens", "of the given schedule") in constants
    assert list(sweep_lines(given, ["ranks", "balancer"]).lines["static"]) == [2, 8, 32]


@pytest.mark.slow
def test_the_page_offers_no_button_that_sends_the_figure_away(tab: Tab, tmp_path: Path) -> None:
    for number, (given, varied) in enumerate(((rows(), ["ranks", "balancer"]), (rows((8,)), ["balancer"]))):
        page = tmp_path / f"{number}.html"
        drawn(page, given, varied)
        for width, phone in ((1280, False), (390, True)):
            tab.open(page, width=width, phone=phone)
            assert tab.complaints() == []
            assert {url.split(":")[0] for url in tab.requests()} <= {"file", "data"}
            assert tab.evaluate("document.querySelectorAll('.modebar-btn, .modebar a').length") == 0
            assert tab.evaluate("document.documentElement.scrollWidth") <= width
    ticks = "[...document.querySelectorAll('.xtick text')].map((one) => one.textContent)"
    tab.open(tmp_path / "0.html", width=1280)
    assert tab.evaluate(ticks) == ["2", "8", "32"]
