"""Schedules of trainers: read as they are, with a sentence for each mistake."""

from dataclasses import replace

import numpy as np
import pytest

from relibra.errors import TraceError
from relibra.routing.micro_batches import select_micro_batches
from relibra.routing.readers import open_trace
from relibra.routing.readers.given_schedule import read_schedule, schedule_of
from relibra.routing.synthetic import TraceShape, domain_trace

GIVEN = {"micro_batch_S": [1, 0, 0, 1, 2, -1], "rank_S": [0, 0, 1, 1, 0, 9], "mini_batch_M": [0, 0, 1]}


@pytest.fixture
def trace():
    shape = TraceShape(rows_per_sample=[4, 5, 6, 7, 8, 9], num_layers=2, num_experts=8, top_k=2)
    return domain_trace(shape, np.random.default_rng(0))


def _written(folder, **arrays):
    path = folder / "schedule.npz"
    np.savez(path, **arrays)
    return path


def test_samples_run_where_the_trainer_put_them(trace, tmp_path):
    demand = schedule_of(trace, read_schedule(_written(tmp_path, **GIVEN)), 2)
    assert demand.micro_batch_S.tolist() == GIVEN["micro_batch_S"]
    assert demand.sum_per_rank(demand.length_S).tolist() == [[5, 6], [4, 7], [8, 0]]
    assert demand.group_M.tolist() == [0, 0, 1]
    assert demand.pairs_LEE is not None
    later = select_micro_batches(demand, 1)
    assert later.group_M.tolist() == [0, 1]
    alone = schedule_of(
        trace, read_schedule(_written(tmp_path, micro_batch_S=np.zeros(6, int), rank_S=np.arange(6))), 6
    )
    assert alone.group_M is None


def test_ids_of_samples_say_their_order(trace, tmp_path):
    trace = replace(trace, sample_ids=np.array([10, 11, 12, 13, 14, 15]))
    backwards = {name: GIVEN[name][::-1] for name in ("micro_batch_S", "rank_S")}
    path = _written(tmp_path, **backwards, sample_ids=[15, 14, 13, 12, 11, 10])
    demand = schedule_of(trace, read_schedule(path), 2)
    assert demand.micro_batch_S.tolist() == GIVEN["micro_batch_S"]


def test_an_archive_of_routes_may_hold_its_schedule(trace, tmp_path):
    routes = {"ids": trace.experts_TLK, "seqlen": np.diff(trace.offsets)}
    path = _written(tmp_path, **routes, **GIVEN, sample_ids=np.arange(6) + 7)
    found = open_trace(path, 8)
    assert np.array_equal(found.experts_TLK, trace.experts_TLK)
    demand = schedule_of(found, read_schedule(path, required=False), 2)
    assert demand.rank_S.tolist() == GIVEN["rank_S"]
    assert read_schedule(_written(tmp_path, **routes), required=False) is None
    assert read_schedule(tmp_path, required=False) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"micro_batch_S": None}, "has no array micro_batch_S: a schedule needs micro_batch_S and rank_S"),
        ({"rank_S": [0.5] * 6}, r"rank_S is float64 \(6,\): expected a vector of whole numbers"),
        ({"micro_batch_S": [[0, 1]]}, "expected a vector of whole numbers"),
        ({"micro_batch_S": [-2, 0, 0, 1, 2, 0]}, r"micro_batch_S holds -2\.\.2: allowed are -1"),
        ({"micro_batch_S": [0, 1]}, "micro_batch_S has 2, rank_S has 6 entries: give one of each per sample"),
        (
            {"micro_batch_S": [0, 1], "rank_S": [0, 1]},
            "has 2 entries for 6 samples of the trace: give one for each",
        ),
        ({"micro_batch_S": [-1] * 6}, "is -1 everywhere"),
        ({"rank_S": [0, 1, 2, 0, 0, 0]}, r"rank_S holds 0\.\.2: with 2 ranks allowed are 0 to 1"),
        ({"rank_S": [0, -1, 1, 0, 0, 0]}, r"rank_S holds -1\.\.1"),
        ({"micro_batch_S": [1, 1, 1, 1, 2, -1]}, "micro-batch 0 has no samples: number micro-batches from 0"),
        ({"mini_batch_M": [0, 0]}, "names micro-batch 2: mini_batch_M has only 2"),
        ({"mini_batch_M": [0, 0, 1, 1]}, "micro-batch 3 has no samples"),
        ({"mini_batch_M": [0, 1, 0]}, r"mini_batch_M is \[0, 1, 0\]: it must rise from 0 without gaps"),
        ({"mini_batch_M": [1, 1, 2]}, "it must rise from 0 without gaps"),
        ({"sample_ids": [0, 1, 2, 3, 4, 4]}, "sample_ids names a sample twice"),
        ({"sample_ids": [0, 1, 2, 3, 4, 6]}, "sample_ids lacks sample 5 of the trace"),
        ({}, "rank 0 has 8 tokens in micro-batch 2|rank 1 has 7 tokens in micro-batch 1|above the limit"),
    ],
)
def test_a_mistake_gets_a_sentence(trace, tmp_path, change, message):
    given = {**GIVEN, **change, **({} if change else {"micro_batch_S": [0, 0, 1, 1, 2, 2]})}
    given["rank_S"] = given["rank_S"] if change else [0, 0, 1, 1, 0, 0]
    path = _written(tmp_path, **{name: array for name, array in given.items() if array is not None})
    with pytest.raises(TraceError, match=message) as found:
        schedule_of(trace, read_schedule(path), 2, rank_tokens=8)
    assert str(path) in str(found.value)


def test_a_trace_that_repeats_an_id_takes_no_schedule_by_ids(trace, tmp_path):
    repeated = replace(trace, sample_ids=np.array([7, 7, 9, 10, 11, 12]))
    path = _written(tmp_path, **GIVEN, sample_ids=np.arange(6) + 7)
    with pytest.raises(TraceError, match="twice"):
        schedule_of(repeated, read_schedule(path), 2)


def test_what_is_no_archive_gets_a_sentence(tmp_path):
    for path, message in ((tmp_path / "none.npz", "does not exist"), (tmp_path, "is not a schedule")):
        with pytest.raises(TraceError, match=message):
            read_schedule(path)
    (tmp_path / "bad.npz").write_bytes(b"no archive")
    with pytest.raises(TraceError, match="cannot be read"):
        read_schedule(tmp_path / "bad.npz")
