import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
import time
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from relibra import RoutingTrace, TraceError, iterate_trace, read_trace, write_trace
from relibra.routing.synthetic import TraceShape
from relibra.routing.trace import concatenate
from relibra.routing.trace_files import INDEX, TraceIndex, TraceWriter, index_of, read_index, write_index
from tests.routing.traces import assert_same, balanced_trace, traces


@pytest.fixture
def stored(tmp_path):
    """A trace of 9 samples in 3 shards, on disk."""
    trace = balanced_trace(TraceShape(rows_per_sample=[5] * 9, num_layers=3, num_experts=8, top_k=2))
    folder = tmp_path / "trace"
    write_trace(trace, folder, shard_rows=15)
    assert len(list(folder.glob("*.safetensors"))) == 3
    return trace, folder


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(trace=traces(), shard_rows=st.integers(1, 40), max_rows=st.integers(1, 40))
def test_round_trip_in_any_pieces(tmp_path, trace, shard_rows, max_rows):
    folder = tmp_path / "round-trip"
    shutil.rmtree(folder, ignore_errors=True)
    write_trace(trace, folder, shard_rows=shard_rows)
    assert_same(read_trace(folder), trace)
    pieces = list(iterate_trace(folder, max_rows=max_rows))
    assert_same(concatenate(pieces), trace)
    assert all(piece.num_rows <= max_rows or piece.num_samples == 1 for piece in pieces)


def test_several_writers_make_one_trace(tmp_path):
    trace = balanced_trace(TraceShape(rows_per_sample=[5] * 4, num_layers=1, num_experts=8, top_k=2))
    shards = []
    for rank in range(2):
        writer = TraceWriter(tmp_path / "t", shard_prefix=f"rank-{rank}")
        writer.append(trace.select(range(2 * rank, 2 * rank + 2)))
        shards += writer.shards
    with pytest.raises(TraceError, match="not a finished trace"):
        read_trace(tmp_path / "t")
    write_index(tmp_path / "t", index_of(trace, shards))
    assert_same(read_trace(tmp_path / "t"), trace)


def test_a_finished_trace_is_not_overwritten(stored):
    trace, folder = stored
    with pytest.raises(TraceError, match="already holds a trace"):
        write_trace(trace, folder)


def test_a_writer_that_fails_leaves_nothing_readable(tmp_path):
    trace = balanced_trace(TraceShape(rows_per_sample=[5], num_layers=1, num_experts=8, top_k=2))

    def write_and_fail():
        with TraceWriter(tmp_path / "t") as writer:
            writer.append(trace)
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        write_and_fail()
    with pytest.raises(TraceError, match="not a finished trace"):
        read_trace(tmp_path / "t")
    with pytest.raises(TraceError, match="no samples were written"), TraceWriter(tmp_path / "empty"):
        pass


def test_pieces_of_different_models_are_refused(tmp_path):
    trace = balanced_trace(TraceShape(rows_per_sample=[5], num_layers=1, num_experts=8, top_k=2))
    other = balanced_trace(TraceShape(rows_per_sample=[5], num_layers=1, num_experts=16, top_k=2))
    with TraceWriter(tmp_path / "t") as writer:
        writer.append(trace)
        with pytest.raises(TraceError, match="num_experts 16"):
            writer.append(other)


def _shard(folder):
    return sorted(folder.glob("*.safetensors"))[1]


def _rewrite_index(folder, **changes):
    """Change facts in the index and give it a digest that fits, as a malicious or buggy writer would."""
    index = TraceIndex.model_validate(
        {k: v for k, v in json.loads((folder / INDEX).read_text()).items() if k != "digest"}
    )
    write_index(folder, index.model_copy(update=changes))


def _resign(folder, shard):
    """Make the index agree with the bytes of a changed shard, so that only its content can give it away."""
    entries = [
        entry.model_copy(
            update={"size": shard.stat().st_size, "sha256": hashlib.sha256(shard.read_bytes()).hexdigest()}
        )
        if entry.file == shard.name
        else entry
        for entry in read_index(folder).shards
    ]
    _rewrite_index(folder, shards=entries)


def test_truncated_shard(stored):
    _, folder = stored
    os.truncate(_shard(folder), _shard(folder).stat().st_size - 1)
    with pytest.raises(TraceError, match=r"shard .*00001.* bytes, the index says"):
        read_trace(folder)
    _resign(folder, _shard(folder))
    with pytest.raises(TraceError, match="cannot be read as safetensors"):
        read_trace(folder)


@pytest.mark.parametrize("where", [0, 9, 200, -1])
def test_flipped_byte_in_a_shard(stored, where):
    _, folder = stored
    data = bytearray(_shard(folder).read_bytes())
    data[where] ^= 1
    _shard(folder).write_bytes(data)
    with pytest.raises(TraceError, match="does not match its SHA-256"):
        read_trace(folder)


def test_flipped_bytes_in_the_index(stored):
    trace, folder = stored
    original = (folder / INDEX).read_bytes()
    for where in range(0, len(original), 7):
        data = bytearray(original)
        data[where] ^= 1
        (folder / INDEX).write_bytes(data)
        try:
            same = read_trace(folder)
        except TraceError:
            continue
        assert_same(same, trace)  # white space between values is the only byte that may change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace('"version": 1', '"version": 2'), "format version 2: this relibra reads version 1"),
        (lambda text: text.replace("relibra.routing-trace", "something else"), "is not a routing trace"),
        (lambda _: "[1, 2", "damaged"),
        (lambda _: "[" * 200_000, "damaged"),
    ],
)
def test_an_index_of_something_else(stored, change, message):
    index = stored[1] / INDEX
    index.write_text(change(index.read_text()))
    with pytest.raises(TraceError, match=message):
        read_trace(stored[1])


def test_missing_shard_and_missing_index(stored):
    _, folder = stored
    _shard(folder).unlink()
    with pytest.raises(TraceError, match=r"shard .*00001.* is missing"):
        read_trace(folder)
    (folder / INDEX).unlink()
    with pytest.raises(TraceError, match=r"no index\.json"):
        read_trace(folder)
    with pytest.raises(TraceError, match="not a finished trace"):
        read_trace(folder / "nowhere")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _: {"layer_ids": [0, 1, 2**40]}, "layer_ids"),
        (lambda _: {"shards": []}, "shards"),
        (lambda _: {"num_experts": 1 << 40}, "num_experts"),
        (lambda shards: {"shards": shards[:1] * 2}, "twice"),
        (
            lambda shards: {"shards": [one.model_copy(update={"file": f"../{one.file}"}) for one in shards]},
            "shards.0.file",
        ),
        (lambda shards: {"shards": [one.model_copy(update={"rows": 1 << 40}) for one in shards]}, "axis T"),
    ],
)
def test_an_index_with_impossible_values(stored, change, message):
    """Also a path out of the folder, and sizes beyond the shard: refused before anything is allocated."""
    _rewrite_index(stored[1], **change(read_index(stored[1]).shards))
    with pytest.raises(TraceError, match=message):
        read_trace(stored[1])


@pytest.mark.parametrize(
    ("name", "where", "value", "said"),
    [
        ("routed_experts", (7, 2, 1), 8, r"sample 4, row 2, layer 2: .* range 0\.\.7"),
        ("offsets", 1, 99, "sample offsets"),
    ],
)
def test_impossible_values_in_a_signed_shard_are_refused(stored, name, where, value, said):
    shard = _shard(stored[1])
    tensors = load_file(shard)
    tensors[name][where] = value
    save_file(tensors, shard)
    _resign(stored[1], shard)
    with pytest.raises(TraceError, match=said):
        read_trace(stored[1])


def test_a_second_writer_does_not_replace_a_finished_trace(tmp_path):
    trace = balanced_trace(TraceShape(rows_per_sample=[5], num_layers=1, num_experts=8, top_k=2))
    slow = TraceWriter(tmp_path / "t", shard_prefix="slow")
    write_trace(trace, tmp_path / "t")
    slow.append(trace)
    with pytest.raises(TraceError, match="already holds a trace"):
        slow.__exit__(None, None, None)
    with pytest.raises(TraceError, match="shard_prefix"):
        TraceWriter(tmp_path / "u", shard_prefix="../t")


@pytest.mark.parametrize("length", [2**63, 2**40, 2**31])
def test_huge_header_is_refused_before_it_is_allocated(stored, length):
    _, folder = stored
    shard = _shard(folder)
    data = bytearray(shard.read_bytes())
    data[:8] = struct.pack("<Q", length)
    shard.write_bytes(data)
    _resign(folder, shard)
    tracemalloc.start()
    with pytest.raises(TraceError, match="cannot be read as safetensors"):
        read_trace(folder)
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()


def test_streaming_holds_one_piece_at_a_time(tmp_path):
    """120 k rows x 8 layers x 4 choices are 4 MB; reading them in pieces of 2 k rows takes a fraction of that."""
    shape = TraceShape(rows_per_sample=[500] * 240, num_layers=8, num_experts=64, top_k=4)
    write_trace(balanced_trace(shape), tmp_path / "t", shard_rows=20_000)
    list(iterate_trace(tmp_path / "t", max_rows=2000))  # warm: compiled kernels and imports are not the trace's
    tracemalloc.start()
    rows = sum(piece.num_rows for piece in iterate_trace(tmp_path / "t", max_rows=2000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert rows == 120_000
    assert peak < 1_000_000


_KILLED_WRITER = """
import sys
import numpy as np
from relibra.routing.synthetic import TraceShape, domain_trace
from relibra.routing.trace_files import TraceWriter
shape = TraceShape(rows_per_sample=[200] * 50, num_layers=8, num_experts=64, top_k=4)
trace = domain_trace(shape, np.random.default_rng(0))
for i in range(10_000):
    with TraceWriter(f"{sys.argv[1]}/{i:05d}", shard_rows=2000) as writer:
        writer.append(trace)
    print(i, flush=True)
"""


def test_a_killed_writer_leaves_whole_traces_or_unreadable_ones(tmp_path):
    writer = subprocess.Popen([sys.executable, "-c", _KILLED_WRITER, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert writer.stdout.readline() == b"0\n"
        time.sleep(0.2)
    finally:
        writer.kill()
        writer.communicate()
    folders = sorted(tmp_path.iterdir())
    assert [read_trace(folder).num_rows for folder in folders[:-1]] == [10_000] * (len(folders) - 1)
    if (folders[-1] / INDEX).exists():
        assert read_trace(folders[-1]).num_rows == 10_000
    else:
        with pytest.raises(TraceError, match="not a finished trace"):
            read_trace(folders[-1])


def test_replaced_source_and_frozen_arrays_survive(tmp_path):
    trace = replace(
        RoutingTrace.from_samples([np.array([[[1, 0]]])], num_experts=2),
        source='quotes " and \n newlines',
        group_names=("ü",),
    )
    write_trace(trace, tmp_path / "t")
    assert_same(read_trace(tmp_path / "t"), trace)
