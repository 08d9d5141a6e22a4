"""Which events of a timeline reach the page."""

from __future__ import annotations

import base64
import json
import re

import numpy as np
import pytest

from relibra.reporting.data.step_simulation import choose_ranks
from relibra.reporting.pages.timeline_section import timeline_section
from relibra.timeline import Event, Timeline


def _timeline(num_ranks: int, layers: int) -> Timeline:
    events = [
        Event("experts", layer, 2, rank, 10 + layer + 0.01 * rank, 0.5 + 0.01 * rank, 100 * rank, "")
        for rank in range(num_ranks)
        for layer in range(layers)
    ]
    return Timeline(events=tuple(events), num_ranks=num_ranks, label="measured")


def _facts(html: str) -> dict:
    return json.loads(re.search(r'id="timeline-data">(.*?)</script>', html, re.S)[1])


def _array(field: dict) -> np.ndarray:
    kind = {"Float64Array": "<f8", "Float32Array": "<f4", "Uint8Array": "u1", "Int16Array": "<i2"}[field["type"]]
    return np.frombuffer(base64.b64decode(field["data"]), kind)


def test_events_arrive_as_they_were_recorded() -> None:
    [one] = _facts(timeline_section([("run", _timeline(2, 3))], "about", first_layer=1))["timelines"]
    found = sorted(zip(*(_array(one[name]).tolist() for name in ("rank", "layer", "start", "bytes")), strict=True))
    expected = [(rank, layer, layer + 0.01 * rank, 100.0 * rank) for rank in range(2) for layer in range(3)]
    np.testing.assert_allclose(found, expected, atol=1e-9)
    assert one["stages"] == [["experts", 0]]
    assert set(_array(one["micro_batch"]).tolist()) == {2}


def test_many_ranks_and_events_are_thinned_aloud(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relibra.reporting.pages.timeline_section.MAX_EVENTS", 10)
    html = timeline_section([("run", _timeline(20, 5))], "about", first_layer=1)
    [one] = _facts(html)["timelines"]
    assert len(_array(one["start"])) == 10
    assert one["ranks"][0] == 0
    assert one["ranks"][-1] == 19
    assert "Only the first 10 events of run are drawn" in html


def test_busiest_and_least_busy_ranks_are_chosen() -> None:
    assert choose_ranks([1.0, 9.0, 5.0, 0.0, 4.0], 2) == [1, 3]
    assert choose_ranks([1.0], 6) == [0]


def test_without_events_there_is_no_section() -> None:
    assert timeline_section([("run", Timeline(events=(), num_ranks=1, label="measured"))], "", first_layer=0) == ""
