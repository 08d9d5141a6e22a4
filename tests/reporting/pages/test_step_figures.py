"""Which events of a timeline reach the page."""

from __future__ import annotations

import base64
import gzip
import json

import numpy as np
import pytest

from relibra.reporting.data.step_simulation import choose_ranks
from relibra.reporting.html.step_figures import timeline_values
from relibra.timeline import Event, Timeline


def _timeline(num_ranks: int, layers: int) -> Timeline:
    events = [
        Event("experts", layer, 2, rank, 10 + layer + 0.01 * rank, 0.5 + 0.01 * rank, 100 * rank, "")
        for rank in range(num_ranks)
        for layer in range(layers)
    ]
    return Timeline(events=tuple(events), num_ranks=num_ranks, label="measured")


def _slices(url: str) -> list[dict]:
    """The events of a figure: the page draws what Perfetto opens."""
    kind, _, packed = url.partition(",")
    assert kind == "data:application/gzip;base64"
    trace = json.loads(gzip.decompress(base64.b64decode(packed)))
    return [one for one in trace["traceEvents"] if one["ph"] == "X"]


def test_events_arrive_as_they_were_recorded() -> None:
    facts = timeline_values([("run", _timeline(2, 3))], first_layer=1)
    [one] = facts["files"]
    slices = _slices(one["url"])
    found = sorted((e["pid"], e["args"]["layer"], e["ts"] / 1e6, float(e["args"]["bytes"])) for e in slices)
    expected = [(rank, layer, 10 + layer + 0.01 * rank, 100.0 * rank) for rank in range(2) for layer in range(3)]
    np.testing.assert_allclose(found, expected, atol=1e-9)
    assert {(e["cat"], e["args"]["micro_batch"]) for e in slices} == {("experts", 2)}
    drawn = [start for bars in facts["figure"].data for start in bars.base]
    np.testing.assert_allclose(sorted(drawn), sorted(e["ts"] / 1e6 - 10 for e in slices), atol=1e-9)
    assert len(facts["views"]) == 4
    assert (one["name"], facts["layers"], facts["first"]) == ("run (measured)", [0, 1, 2], 2)


def test_many_ranks_and_events_are_thinned_aloud(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relibra.reporting.html.step_figures.MAX_EVENTS", 10)
    [one] = timeline_values([("run", _timeline(20, 5))], first_layer=1)["files"]
    ranks = {e["pid"] for e in _slices(one["url"])}
    assert (len(_slices(one["url"])), one["shown"], one["of"]) == (10, 10, 100)
    assert (min(ranks), max(ranks)) == (0, 19)


def test_busiest_and_least_busy_ranks_are_chosen() -> None:
    assert choose_ranks([1.0, 9.0, 5.0, 0.0, 4.0], 2) == [1, 3]
    assert choose_ranks([1.0], 6) == [0]


def test_without_events_there_is_no_section() -> None:
    assert timeline_values([("run", Timeline(events=(), num_ranks=1, label="measured"))], first_layer=0) is None
