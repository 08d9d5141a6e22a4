"""Routes that an engine reports are checked before they are copied: a copy would cast and broadcast them."""

import resource
import signal
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from relibra.errors import TraceError
from relibra.rl.config.settings import TraceSettings
from relibra.rl.run import step_trace
from relibra.rl.run.run_folder import step_folders
from relibra.rl.run.step_trace import StepTraces, record_routes, trace_of
from relibra.routing.trace_files import read_trace
from tests.rl.joined import alone
from tests.rl.made_up import EXPERTS, LAYERS, response_of


def trace(*responses):
    return trace_of(responses, num_experts=EXPERTS, layer_ids=range(LAYERS), source="test")


def test_legal_routes_become_one_trace():
    responses = [response_of(0), response_of(1, length=1)]
    made = trace(*responses)
    made.validate()
    for response, start, stop in zip(responses, made.offsets, made.offsets[1:] - 1, strict=False):
        np.testing.assert_array_equal(made.experts_TLK[start:stop], response.experts_mLK)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda _: None,
        lambda routes: routes[:1],
        lambda routes: routes[:, :1],
        lambda routes: routes[..., :1],
        lambda routes: routes + 0.5,
        lambda routes: routes.astype(np.int64) + 256,
        lambda routes: routes.astype(np.int64) - 9,
        lambda routes: routes + np.uint8(EXPERTS),
    ],
)
@pytest.mark.parametrize("spoilt", [0, 1])
def test_illegal_routes_are_refused_by_sample(spoil, spoilt):
    responses = [response_of(5), response_of(6)]
    responses[spoilt] = replace(responses[spoilt], experts_mLK=spoil(responses[spoilt].experts_mLK))
    with pytest.raises(TraceError, match=r"sample [56]"):
        trace(*responses)


pytestmark = pytest.mark.usefixtures("_leave_group")


def step_traces(run, **kept):
    return StepTraces(run, TraceSettings(**kept), num_experts=EXPERTS, layer_ids=range(LAYERS))


@contextmanager
def full_disk():
    """Let no file grow beyond 64 bytes, as far as this process is concerned."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def written(run):
    return sorted(step for step, _ in step_folders(run / "traces"))


@pytest.mark.parametrize(
    ("keep", "every", "left"), [(2, 5, [0, 5, 10, 11]), (0, 5, []), (3, 10, [0, 9, 10, 11]), (1, 50, [0, 11])]
)
def test_routes_of_latest_and_of_some_other_steps_stay(keep, every, left, tmp_path, monkeypatch):
    monkeypatch.setattr(step_trace, "KEPT_EVERY", every)
    (tmp_path / "traces" / "step-00007.mine").mkdir(parents=True)
    with alone():
        traces = step_traces(tmp_path, keep=keep)
        for step in range(12):
            one = response_of(step)
            [back] = record_routes(step, [one], traces)
            np.testing.assert_array_equal(back.experts_mLK, one.experts_mLK)
            before = written(tmp_path)
            traces.remove_old(step)
            assert set(range(max(0, step - keep), step + 1 if keep else 0)) <= set(before), "a run killed here has them"
    assert written(tmp_path) == left
    assert (tmp_path / "traces" / "step-00007.mine").exists()
    for step in left:
        assert read_trace(tmp_path / "traces" / f"step-{step:05d}").sample_ids.tolist() == [step]


def test_responses_are_written_in_pieces_without_a_full_copy(tmp_path, monkeypatch):
    monkeypatch.setattr(step_trace, "SHARD_ROWS", 20)
    responses = [response_of(s, length=4 + s) for s in range(7)]
    wide = [replace(one, experts_mLK=one.experts_mLK.astype(np.int64)) for one in responses]
    with alone():
        traces = step_traces(tmp_path)
        back = record_routes(0, [responses[0], *wide[1:]], traces)
    whole = read_trace(tmp_path / "traces" / "step-00000")
    shards = sorted((tmp_path / "traces" / "step-00000").glob("*.safetensors"))
    assert len(shards) > 3
    assert traces.written_bytes == sum(path.stat().st_size for path in shards)
    assert whole.sample_ids.tolist() == list(range(7))
    for s, (one, returned) in enumerate(zip(responses, back, strict=True)):
        np.testing.assert_array_equal(whole.experts_TLK[whole.sample_rows(s)][:-1], one.experts_mLK)
        np.testing.assert_array_equal(returned.experts_mLK, one.experts_mLK)
        assert returned.experts_mLK.dtype == np.uint8
    assert np.shares_memory(back[0].experts_mLK, responses[0].experts_mLK)


def test_full_disk_drops_routes_with_one_line_until_it_has_room(tmp_path, caplog):
    with alone():
        traces = step_traces(tmp_path, keep=5)
        with full_disk():
            for step in range(3):
                [back] = record_routes(step, [response_of(step)], traces)
                assert back.experts_mLK is not None, "training goes on with the routes"
        assert written(tmp_path) == []
        [record] = caplog.records
        assert "traces/step-00000 (rank 0: " in record.getMessage()
        assert "File too large" in record.getMessage()
        record_routes(3, [response_of(3)], traces)
    assert written(tmp_path) == [3]
    read_trace(tmp_path / "traces" / "step-00003").validate()


def test_illegal_routes_end_the_run_also_where_none_are_kept(tmp_path):
    one = response_of(0)
    twice = replace(one, experts_mLK=np.zeros_like(one.experts_mLK))
    with alone(), pytest.raises(TraceError):
        record_routes(0, [twice], step_traces(tmp_path, keep=0))
