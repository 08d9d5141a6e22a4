import io
import zipfile
from dataclasses import replace

import numpy as np
import pytest

from relibra import TraceError, write_trace
from relibra.routing.readers import iterate_routes, open_trace
from tests.routing.traces import assert_same


def _ids(rows, E=8, seed=0):
    return np.random.default_rng(seed).random((rows, 2, E)).argsort(-1)[..., :3].astype(np.uint8)


def _saved(path, **arrays):
    np.savez(path, **arrays)
    return path


def test_one_set_with_named_groups(tmp_path):
    sets = {"ids": _ids(7), "seqlen": [3, 4], "dataset": [1, 0], "dataset_names": ["m", "g"]}
    trace = open_trace(_saved(tmp_path / "x.npz", **sets))
    assert trace.rows_per_sample.tolist() == [3, 4]
    assert (trace.group_names, trace.group_ids.tolist()) == (("m", "g"), [1, 0])
    assert (trace.num_experts, trace.source) == (8, "x.npz")
    assert np.array_equal(trace.experts_TLK, _ids(7))


def test_several_sets_become_groups(tmp_path):
    sets = {"law_ids": _ids(5), "law_seqlen": [5], "chat_ids": _ids(4, seed=1), "chat_seqlen": [1, 3], "layers": [1, 2]}
    trace = open_trace(_saved(tmp_path / "x.npz", **sets))
    assert (trace.group_names, trace.group_ids.tolist()) == (("law", "chat"), [0, 1, 1])
    assert trace.layer_ids.tolist() == [1, 2]
    assert trace.offsets.tolist() == [0, 5, 6, 9]


def test_the_number_of_experts_can_be_given(tmp_path):
    path = _saved(tmp_path / "x.npz", ids=_ids(7, E=60), seqlen=[7])
    assert open_trace(path).num_experts % 8 == 0
    assert open_trace(path, num_experts=60).num_experts == 60
    with pytest.raises(TraceError, match="with 5 experts ids end at 4"):
        open_trace(path, num_experts=5)


def _partly(*places):
    ids = _ids(3).astype(int)
    for place in places:
        ids[place] = -1
    return ids


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"a": np.zeros(3)}, "expected 'ids' with 'seqlen'"),
        ({"ids": _ids(3)}, r"no lengths.*numpy\.savez"),
        ({"law_ids": _ids(3)}, "law_ids has no lengths"),
        ({"ids": _ids(3), "seqlen": [2]}, "3 rows, and lengths .* 1 samples sum to 2"),
        ({"ids": _ids(3), "seqlen": [4, -1]}, r"whole numbers in 0\.\.3"),
        # a 64-bit sum that comes out right: once it crashed the interpreter in a compiled loop
        ({"ids": _ids(5), "seqlen": [2**63 - 1, 2**63 - 1, 7]}, "whole numbers"),
        ({"ids": np.zeros((3, 2, 3)), "seqlen": [3]}, "expected integer"),
        ({"ids": np.zeros((0, 2, 3), np.int16), "seqlen": np.zeros(0, int)}, "holds no tokens: record some first"),
        ({"ids": _ids(3)[0], "seqlen": [3]}, "expected integer"),
        ({"ids": np.zeros((3, 2, 3), int), "seqlen": [3]}, "id twice.*rows of -1"),
        ({"ids": _ids(3).astype(int) - 9, "seqlen": [3]}, r"allowed are 0\.\.65535"),
        ({"ids": _ids(3), "seqlen": [3], "dataset": [4], "dataset_names": ["a"]}, "whole numbers"),
        ({"a_ids": _ids(3), "a_seqlen": [3], "b_ids": _ids(3)[:, :1], "b_seqlen": [3]}, "differ in"),
        ({"ids": np.array([{}], dtype=object), "seqlen": [3]}, "cannot be read"),
        ({"ids": _partly((1, 0)), "seqlen": [3]}, r"row 1 is -1 in a part of layers \[0\].*ids\[\(ids < 0\)"),
        ({"ids": _partly((1, 0, 2)), "seqlen": [3]}, r"row 1 is -1 in a part of layers \[0\]"),
        (
            {"ids": _partly(2, np.s_[:, 0]), "seqlen": [3]},
            r"every row of layers \[0\].*ids\[\.\.\., \[1\], :\] with layers=\[1\]",
        ),
        ({"ids": _partly(0, 1, 2), "seqlen": [3]}, "no recorded row"),
        ({"ids": _ids(3), "seqlen": [3], "valid": np.ones(2, bool)}, "for each row"),
        ({"ids": _ids(3), "seqlen": [3], "valid": np.ones(3)}, "for each row"),
        ({"ids": _ids(3)[None], "seqlen": [2, 1]}, "1 samples and 2 lengths"),
        ({"ids": _ids(3)[None], "seqlen": [4]}, r"whole numbers in 0\.\.3"),
        ({"ids": np.zeros((2, 3, 1, 2), int)}, "id twice.*beyond seqlen"),
    ],
)
def test_other_archives_are_refused_with_a_next_step(tmp_path, arrays, message):
    with pytest.raises(TraceError, match=message):
        open_trace(_saved(tmp_path / "x.npz", **arrays))


@pytest.mark.parametrize("rows", [10**13, 10**30])
def test_headers_that_claim_more_than_is_there_are_refused(tmp_path, rows):
    ids, lengths = io.BytesIO(), io.BytesIO()
    np.save(ids, _ids(5))
    np.save(lengths, np.array([5]))
    honest, claim = b"(5, 2, 3), }", f"({rows}, 2, 3), }}".encode()
    forged = ids.getvalue().replace(honest + b" " * (len(claim) - len(honest)), claim)
    assert forged != ids.getvalue()
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("ids.npy", forged)
        archive.writestr("seqlen.npy", lengths.getvalue())
    with pytest.raises(TraceError, match="cannot be read"):
        open_trace(tmp_path / "x.npz")


def test_damaged_archives_are_refused(tmp_path):
    np.savez_compressed(tmp_path / "x.npz", ids=_ids(500), seqlen=np.array([500]))
    data = (tmp_path / "x.npz").read_bytes()
    for cut in (0, 10, len(data) // 2, len(data) - 1):
        (tmp_path / "x.npz").write_bytes(data[:cut])
        with pytest.raises(TraceError, match="cannot be read"):
            open_trace(tmp_path / "x.npz")
    (tmp_path / "x.npz").write_bytes(data[:300] + bytes([data[300] ^ 255]) + data[301:])
    with pytest.raises(TraceError):
        open_trace(tmp_path / "x.npz")


def test_paths_that_are_no_trace(tmp_path):
    (tmp_path / "x.txt").write_text("x")
    with pytest.raises(TraceError, match="is not a trace"):
        open_trace(tmp_path / "x.txt")
    with pytest.raises(TraceError, match="does not exist"):
        open_trace(tmp_path / "y")
    with pytest.raises(TraceError, match="not a finished trace"):
        open_trace(tmp_path)


def test_pieces_of_either_form(tmp_path):
    [trace] = iterate_routes(_saved(tmp_path / "x.npz", ids=_ids(7), seqlen=[3, 4]))
    write_trace(trace, tmp_path / "t")
    [same] = iterate_routes(tmp_path / "t")
    assert_same(trace, same)


def _with_gaps(ids, *rows):
    ids = ids.astype(np.int64)
    ids[list(rows)] = -1
    return ids


def test_rows_of_minus_one_are_rows_without_a_route(tmp_path):
    path = _saved(tmp_path / "x.npz", ids=_with_gaps(_ids(7), 2, 6), seqlen=np.array([3, 4]))
    trace = open_trace(path)
    assert trace.valid_T.tolist() == [True, True, False, True, True, True, False]
    assert np.array_equal(trace.experts_TLK[trace.valid_T], _ids(7)[[0, 1, 3, 4, 5]])
    assert trace.rows_per_sample.tolist() == [3, 4]


@pytest.mark.parametrize("kind", [np.bool_, np.uint8])
def test_a_mask_says_which_rows_were_recorded(tmp_path, kind):
    ids, valid = _ids(4).astype(np.uint16), np.array([1, 0, 1, 1], kind)
    ids[1] = 60_000
    trace = open_trace(_saved(tmp_path / "x.npz", ids=ids, seqlen=np.array([4]), valid=valid))
    assert trace.valid_T.tolist() == [True, False, True, True]
    assert trace.num_experts == 8
    sets = {"a_ids": ids, "a_seqlen": [4], "a_valid": valid, "b_ids": _with_gaps(_ids(2), 0), "b_seqlen": [2]}
    assert open_trace(_saved(tmp_path / "y.npz", **sets)).valid_T.tolist() == [1, 0, 1, 1, 0, 1]


def _padded(*lengths):
    ids = np.full((len(lengths), 5, 2, 3), -1)
    for s, length in enumerate(lengths):
        ids[s, :length] = _ids(length, seed=s)
    return ids


def test_padded_samples_end_at_their_length_or_last_row(tmp_path):
    ids = _padded(2, 5, 0, 3)
    ids[1, 3] = -1
    rows = np.concatenate([_ids(2), _with_gaps(_ids(5, seed=1), 3), _ids(3, seed=3)])
    for path in (_saved(tmp_path / "x.npz", ids=ids), tmp_path / "x.npy"):
        if path.suffix == ".npy":
            np.save(path, ids)
        trace = open_trace(path)
        assert trace.rows_per_sample.tolist() == [2, 5, 0, 3]
        assert np.array_equal(np.where(trace.valid_T[:, None, None], trace.experts_TLK.astype(int), -1), rows)
    zeros = np.where(ids < 0, 0, ids)
    valid = np.ones((4, 5), bool)
    valid[1, 3] = False
    given = open_trace(_saved(tmp_path / "y.npz", ids=zeros, seqlen=[2, 5, 0, 3], valid=valid))
    assert_same(replace(given, source="x.npy"), trace)
    assert open_trace(_saved(tmp_path / "z.npz", ids=ids, seqlen=[3, 5, 0, 3])).valid_T.tolist().count(False) == 2


def test_an_npy_is_one_sample_or_padded_samples(tmp_path):
    np.save(tmp_path / "x.npy", _with_gaps(_ids(5), 4))
    trace = open_trace(tmp_path / "x.npy")
    assert (trace.num_samples, trace.num_rows, trace.valid_T.sum()) == (1, 5, 4)
    data = (tmp_path / "x.npy").read_bytes()
    for damaged in (data[:20], data[:-1], data.replace(b"(5, 2, 3)", b"(9, 2, 3)"), b""):
        (tmp_path / "x.npy").write_bytes(damaged)
        with pytest.raises(TraceError, match=r"cannot be read as an \.npy array"):
            open_trace(tmp_path / "x.npy")
