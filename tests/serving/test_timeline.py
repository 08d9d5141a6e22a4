"""What workers record while a server runs."""

import json
from concurrent.futures import ThreadPoolExecutor

import httpx

from relibra.serving import worker_timeline
from relibra.serving.layout import WorkerLayout
from relibra.serving.worker_timeline import (
    deployment_timeline,
    timeline_frame,
    worker_recorder,
    write_timeline,
)
from tests.serving.models import greedy_request, write_model
from tests.serving.server_process import relibra_serve


def overlap(some, others):
    """Return the seconds in which one of some spans and one of others run."""
    return sum(max(0.0, min(a + s, b + t) - max(a, b)) for a, s in some for b, t in others)


def test_attention_and_experts_of_two_micro_batches_overlap(tmp_path):
    write_model("Qwen3MoeForCausalLM", tmp_path / "model")
    file, keys = tmp_path / "timeline.json", tmp_path / "keys"
    keys.write_text("sk-one\nsk-two\n")
    options = ("--experts", "2", "--timeline", str(file), "--api-key-from", f"file:{keys}")
    with relibra_serve(tmp_path / "model", *options) as (url, _), ThreadPoolExecutor(8) as pool:

        def ask(number, key="sk-two"):
            body = {"prompt": list(greedy_request(number, 6, 40).prompt), "max_tokens": 40, "ignore_eos": True}
            headers = {"Authorization": f"Bearer {key}"}
            return httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60).status_code

        assert set(pool.map(ask, range(8))) == {200}
        assert ask(0, "sk-three") == 401
    trace = json.loads(file.read_text())
    assert trace["otherData"]["label"] == "measured"
    spans = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            kind = event["pid"], event["cat"], event["args"]["micro_batch"]
            spans.setdefault(kind, []).append((event["ts"], event["dur"]))
    for stage in ("attention", "await experts"):
        assert all((0, stage, m) in spans for m in (0, 1))
    for rank in (1, 2):
        assert (rank, "wait", -1) in spans
        assert all((rank, "experts", m) in spans for m in (0, 1))
    assert overlap(spans[0, "attention", 0], spans[1, "experts", 1] + spans[2, "experts", 1]) > 0
    assert overlap(spans[0, "attention", 1], spans[1, "experts", 0] + spans[2, "experts", 0]) > 0
    assert overlap(spans[0, "attention", 0], spans[0, "attention", 1]) < 1e3, "one of them has the token"


def test_a_worker_keeps_its_latest_events(monkeypatch):
    monkeypatch.setattr(worker_timeline, "MOST_EVENTS", 50)
    layout = WorkerLayout(attention=1, experts=1)
    recorders = [worker_recorder(layout, role, 0) for role in ("attention", "experts")]
    for number in range(55):
        recorders[1].add("experts", start=1e9, seconds=0.0, layer=number)
    timeline = deployment_timeline(layout, [timeline_frame(one) for one in recorders])
    assert (timeline.num_ranks, timeline.label, len(timeline.events)) == (2, "measured", 50)
    assert {event.rank for event in timeline.events} == {1}
    assert timeline.events[0].layer == 5


def test_events_that_went_with_a_worker_are_noted(tmp_path):
    layout = WorkerLayout(attention=1, experts=1)
    frames = [timeline_frame(worker_recorder(layout, role, 0)) for role in ("attention", "experts")]
    frames[0]["origin"], frames[1]["origin"] = 100.0, 107.0
    lines = write_timeline(tmp_path / "t.json", layout, frames, [("experts worker 0", 105.5)])
    assert json.loads((tmp_path / "t.json").read_text())["otherData"]["notes"] == lines[:1]
    assert "experts worker 0 until second 5.5" in lines[0]
    assert len(lines) == 2
    assert len(write_timeline(tmp_path / "t.json", layout, frames, [])) == 1
    assert "notes" not in json.loads((tmp_path / "t.json").read_text())["otherData"]
    [line] = write_timeline(tmp_path / "none.json", layout, [], [("experts worker 0", 105.5)])
    assert "not written" in line
    assert not (tmp_path / "none.json").exists()
