"""Recordings made to take memory, time, or the process: each is refused in a sentence, or read in little memory."""

import io
import json
import pickle
import struct
import tracemalloc
import zipfile
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from relibra.errors import TraceError
from relibra.routing.import_choices import Format
from relibra.routing.readers import open_trace
from relibra.routing.readers.encodings.excerpts import excerpt
from relibra.routing.readers.encodings.inert_pickle import read_pickle
from relibra.routing.readers.encodings.json_text import MAX_CONTAINERS
from relibra.routing.readers.encodings.nested_lists import array_of_lists
from relibra.routing.readers.formats import ImportRules, RoutedSample, normalise, padded_batch
from relibra.routing.readers.formats.normalise import ImportCounts, iterate_pieces
from tests.routing import recordings as made
from tests.routing.recordings import read, write

RULES = ImportRules(num_experts=made.EXPERTS)
ROWS = np.tile(np.array([1, 2], np.int16), (4, 3, 1))
"""Routes of four tokens."""


def archive(path, value, members=(), protocol=2, **options):
    """Write a torch file around a pickle."""
    content = value if isinstance(value, bytes) else pickle.dumps(value, protocol=protocol)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a/data.pkl", content, **options)
        for name, data in members:
            file.writestr(f"a/data/{name}", data)
    return path


@contextmanager
def at_most(size):
    """Check the memory that is allocated inside."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < size, f"{peak:,} bytes"


def bomb(levels=60):
    """Return a list that holds 2^levels lists, in a few hundred bytes."""
    value = []
    for _ in range(levels):
        value = [value, value]
    return value


def slime_sample(**changes):
    return {"rollout_routed_experts": [[[1, 2]]], "tokens": [1, 2], "response_length": 1, **changes}


def test_views_of_one_storage_are_not_copies_of_it(tmp_path):
    whole = torch.from_numpy(np.tile(ROWS, (8192, 1, 1)))
    tokens = len(whole) // 64
    views = [
        slime_sample(rollout_routed_experts=whole[s * tokens :][:tokens], tokens=[1] * (tokens + 1)) for s in range(64)
    ]
    torch.save({"samples": views}, tmp_path / "a.pt")
    size = (tmp_path / "a.pt").stat().st_size
    read(tmp_path / "a.pt", Format.SLIME)
    with at_most(4 * size):
        trace = read(tmp_path / "a.pt", Format.SLIME)
    assert trace.num_samples == 64
    np.testing.assert_array_equal(trace.experts_TLK[trace.valid_T], whole.numpy())


def test_the_same_data_again_and_again_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("relibra.routing.readers.encodings.torch_archive.FREE_BYTES", 0)
    whole = torch.from_numpy(np.tile(ROWS, (1000, 1, 1)))
    sample = slime_sample(rollout_routed_experts=whole, tokens=[1] * 4001)
    torch.save({"samples": [sample]}, tmp_path / "a.pt")
    assert read(tmp_path / "a.pt", Format.SLIME).num_rows == 4001
    torch.save({"samples": [sample] * 5}, tmp_path / "b.pt")
    with pytest.raises(TraceError, match="the same data"):
        read(tmp_path / "b.pt", Format.SLIME)


def test_a_changed_storage_is_noticed(tmp_path):
    torch.save([torch.from_numpy(ROWS[:, 0].repeat(500, 0))] * 2, tmp_path / "a.pt")
    data = bytearray((tmp_path / "a.pt").read_bytes())
    begin = data.find(ROWS[:, 0].repeat(500, 0).tobytes())
    data[begin + 1000] ^= 1
    (tmp_path / "a.pt").write_bytes(data)
    with pytest.raises(TraceError, match="other bytes than were written"):
        read(tmp_path / "a.pt", Format.MEGATRON)


@pytest.mark.parametrize(
    "program",
    [
        b"\x80\x02}N" + b"2\x86" * 60 + b"Ns.",  # a key whose hash takes 2^60 steps
        b"\x80\x02})" + b"\x85" * 300_000 + b"Ns.",  # a key whose hash takes more stack than there is
        b"\x80\x04\x8f(N" + b"2\x86" * 60 + b"\x90.",  # the same in a set
        b"\x80\x04(N" + b"2\x86" * 60 + b"\x91.",
        b"\x80\x02N" + b"2\x86" * 60 + b"\x8c\x01a\x93.",  # as the name of a module
    ],
)
def test_keys_that_are_tuples_of_tuples(program):
    if program.endswith(b"\x93."):
        with pytest.raises(TraceError, match="expected texts"):
            read_pickle("x", io.BytesIO(program), len(program))
    else:
        assert len(read_pickle("x", io.BytesIO(program), len(program))) == 1


def test_keys_of_pickles_may_be_numbers_or_texts():
    value = {"a": 1, 2: 3, b"b": 4, None: 5, True: 6, 1.5: 7, (1, 2): 8}
    found = read_pickle("x", io.BytesIO(pickle.dumps(value)), 100)
    assert {key: found[key] for key in list(value)[:-1]} == {key: value[key] for key in list(value)[:-1]}
    assert len(found) == 7


@pytest.mark.parametrize("program", [b"\x80\x02(" + b"N)\x81" * 4000 + b"l.", b"\x80\x02(" + b"]" * 20_000 + b"l."])
def test_values_of_a_pickle_take_a_bounded_amount_of_memory(program, monkeypatch):
    assert len(read_pickle("x", io.BytesIO(program), len(program))) > 1
    monkeypatch.setattr("relibra.routing.readers.encodings.inert_pickle.FREE_BYTES", 1 << 18)
    with at_most(1 << 20), pytest.raises(TraceError, match="bytes of memory"):
        read_pickle("x", io.BytesIO(program), len(program))


def test_numbers_of_names_that_share_a_hash_are_refused():
    program = b"N" + b"".join(b"p%d\n" % (n * (2**61 - 1)) for n in range(100)) + b"."
    with pytest.raises(TraceError, match="32 bits"):
        read_pickle("x", io.BytesIO(program), len(program))


@pytest.mark.parametrize("name", ["response_length", "weight_versions", "group_index", "index", "tokens"])
def test_values_of_a_dump_are_shown_in_short(tmp_path, name):
    value = [bomb()] if name == "weight_versions" else bomb()
    path = archive(tmp_path / "a.pt", {"samples": [slime_sample(**{name: value})]})
    if name in ("response_length",):
        with pytest.raises(TraceError, match=r"a response of \[\[\.\.\.\], \[\.\.\.\]\]"):
            read(path, Format.SLIME)
    else:
        assert read(path, Format.SLIME).weight_versions.tolist() == [0]


def test_excerpts_are_short_whatever_the_value():
    for value in (bomb(), tuple(bomb()), {1: bomb()}, 10**6000, "x" * 10**6, b"x" * 10**6, [10**6000] * 3, object()):
        assert len(excerpt(value)) < 500
    assert excerpt([1, "a", None, 2.5]) == "[1, 'a', None, 2.5]"


@pytest.mark.parametrize("format", [Format.SLIME, Format.MEGATRON])
def test_lists_that_repeat_their_lists_are_refused(tmp_path, format):
    ids = [[[1] * 500] * 500] * 500
    value = {"samples": [slime_sample(rollout_routed_experts=ids, tokens=[1] * 501)]}
    path = archive(tmp_path / "a.pt", value if format is Format.SLIME else [ids])
    with at_most(1 << 20), pytest.raises(TraceError, match="repeats its lists"):
        read(path, format)


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ([[1, 2.5]], "float"),
        ([[1, True]], "bool"),
        ([["1", 2]], "str"),
        ([[1], [1, 2]], "different lengths"),
        ([[1, 2], 3], "different lengths"),
        ([[[[[1]]]]], "list"),
        ([[10**30]], "64 bits"),
        ([bomb()], "different lengths|holds"),
    ],
)
def test_lists_of_other_values_than_whole_numbers(lists, message):
    with pytest.raises(TraceError, match=message):
        array_of_lists("x", lists, 100)


@pytest.mark.parametrize("high", [0, 255, 256, 40_000, 70_000, 2**62])
@pytest.mark.parametrize("low", [0, -1])
def test_lists_become_arrays_of_the_same_numbers(low, high):
    lists = [[[low, high]] * 2] * 3
    np.testing.assert_array_equal(array_of_lists("x", lists, 100), np.array(lists))
    assert array_of_lists("x", [[], []], 100).shape == (2, 0)


def test_a_compressed_pickle_is_refused(tmp_path):
    path = archive(tmp_path / "a.pt", {"samples": ["x" * 10**7]}, compress_type=zipfile.ZIP_DEFLATED)
    with at_most(1 << 20), pytest.raises(TraceError, match="compressed"):
        read(path, Format.SLIME)


def test_archives_of_very_many_members_are_refused(tmp_path, monkeypatch):
    path = archive(tmp_path / "a.pt", {"samples": [slime_sample()]}, [(str(n), b"") for n in range(50)])
    assert read(path, Format.SLIME).num_rows == 2
    monkeypatch.setattr("relibra.routing.readers.npz_arrays.MAX_DIRECTORY_BYTES", 2000)
    with pytest.raises(TraceError, match="lists members"):
        read(path, Format.SLIME)


def test_samples_without_tokens_fill_a_piece_too(monkeypatch):
    monkeypatch.setattr(normalise, "PIECE_BYTES", 1 << 15)
    samples = (RoutedSample(where="x", ids_TLK=ROWS[:0]) for _ in range(100))
    assert max(piece.num_samples for piece in iterate_pieces(samples, RULES, ImportCounts(), source="x")) <= 32


def test_the_number_of_samples_is_bounded(tmp_path, monkeypatch):
    for module in (normalise, padded_batch):
        monkeypatch.setattr(module, "MAX_SAMPLES", 10)
    path = write(tmp_path / "a.npz", {"routed_experts": ROWS, "offsets": np.array([0] * 12 + [4])})
    with pytest.raises(TraceError, match="12 samples"):
        read(path, Format.VERL)
    path = archive(tmp_path / "a.pt", {"samples": [slime_sample()] * 11})
    with pytest.raises(TraceError, match="more than 10 samples"):
        read(path, Format.SLIME)


def test_lists_of_empty_lists_in_micro_batches(tmp_path):
    n = 300_000
    head = b"\x91\x9b\xc0\xdd" + struct.pack(">I", n)
    path = write(tmp_path / "a.bin", head + b"\x90" * n + b"\xc0\xc0\xc0\x91\x01\xc0\x91\xa1x\xc0\xc0\xc0")
    with at_most(3 * n), pytest.raises(TraceError, match="booleans"):
        read(path, Format.PRIME_RL)


def test_a_document_of_empty_objects(tmp_path):
    path = write(tmp_path / "a.json", "[" + "{}," * MAX_CONTAINERS + "{}]")
    with at_most(3 * path.stat().st_size), pytest.raises(TraceError, match="JSON lines"):
        read(path, Format.ANSWERS)


def test_names_of_groups_without_characters(tmp_path):
    def member(array, claim=None):
        file = io.BytesIO()
        np.save(file, array)
        if claim is None:
            return file.getvalue()
        header = repr(claim).encode().ljust(117) + b"\n"
        return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header

    names = {"descr": "<U0", "fortran_order": False, "shape": (10**8,)}
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as file:
        file.writestr("ids.npy", member(ROWS))
        file.writestr("seqlen.npy", member(np.array([4])))
        file.writestr("dataset.npy", member(np.array([0])))
        file.writestr("dataset_names.npy", member(None, names))
    with at_most(1 << 20), pytest.raises(TraceError, match="no bytes"):
        open_trace(tmp_path / "x.npz")


def header(values, body=b""):
    """Return a file of safetensors with this header."""
    text = values if isinstance(values, bytes) else json.dumps(values).encode()
    return struct.pack("<Q", len(text)) + text + body


def jagged(**changes):
    return {"routed_experts": ROWS, "offsets": np.array([0, 4]), **changes}


def skyrl(**changes):
    masks = {"attention_mask": np.ones((1, 4), bool), "router_padding_mask": np.zeros((1, 4), bool)}
    return {"rollout_expert_indices": ROWS[None], **masks, **changes}


def pickled(**changes):
    """Return a pickled batch of SkyRL with a changed entry."""
    entry = {"format": "numpy", "data": ROWS[None].tobytes(), "shape": (1, 4, 3, 2), "dtype": "int16", **changes}
    program = pickle.dumps({"batch_dict": {"rollout_expert_indices": entry}})
    return b"\x80\x04cx\ny\n(cx\nz\n" + program[:-1] + b"tR."


def router_trace(ids):
    return [{"step": 0, "block": "decoder", "layer": 0, "num_tokens": 2, "topk": 2, "top_indices": ids}]


NO_TOKENS = {
    **dict.fromkeys(("routed_experts", "rollout_expert_indices"), np.zeros((2, 0, 3, 2), np.int16)),
    **dict.fromkeys(("attention_mask", "responses", "router_padding_mask"), np.zeros((2, 0), np.int64)),
    "input_lengths": np.zeros(2, np.int64),
}
NO_LENGTHS = (
    [np.nan], [1e300], [1.9], [-5], [5], [True], ["x"], [1j], [b"x"], np.zeros(1, "i4,i4"), np.zeros(1, "M8[D]"),
    np.array([2**64 - 1], np.uint64),
)  # fmt: skip
NO_MASKS = (np.array([["a", "b"]]), np.array([[np.nan] * 2]), np.zeros((1, 2), "i4,i4"), np.zeros((1, 2), "M8[D]"))
NO_UTF8 = (
    (
        Format.ANSWERS,
        "a.json",
        b'{\n"meta_info": {"prompt_tokens": 1, "completion_tokens": 1, "weight_version": "\xff"}}',
    ),
    (Format.MEGATRON, "a.jsonl", b'{"step": 0, "block": "\xff", "layer": 0}\n'),
    (Format.VERL, "a.safetensors", header(b'{"\xff":1}')),
    (Format.PRIME_RL, "a.bin", b"\x91\x9b\xc0\x91\xc3\xc0\xc0\xc0\x91\x01\xc0\x91\xa1\xff\xc0\xc0\xc0"),
)


@pytest.mark.parametrize(
    ("format", "name", "content", "message"),
    [
        *((format, name, content, "utf-8") for format, name, content in NO_UTF8),
        *(
            (Format.VERL, "a.npz", jagged(prompt_lengths=np.array(one)), r"prompt_lengths.*whole numbers in 0\.\.4")
            for one in NO_LENGTHS
        ),
        (
            Format.VERL,
            "a.npz",
            jagged(offsets=np.array([0, 1, 4]), prompt_lengths=np.array([3, 1])),
            "sample 0 has a prompt of 3 tokens and 1 in all",
        ),
        (Format.VERL, "a.npz", jagged(routed_experts=ROWS[:, :0]), "layers"),
        *((Format.SKYRL, "a.npz", skyrl(response_mask=mask), "response_mask") for mask in NO_MASKS),
        *(
            (format, "a.npz", NO_TOKENS, "samples with tokens")
            for format in (Format.VERL, Format.SKYRL, Format.NEMO_RL)
        ),
        *(
            (Format.MEGATRON, "a.jsonl", router_trace([[first, 3], [0, 2]]), "whole numbers")
            for first in (1.9, "1", True, None)
        ),
        *(
            (Format.SKYRL, "a.pkl", pickled(**{name: value}), "rollout_expert_indices")
            for name in ("dtype", "shape", "data", "format")
            for value in (bomb(), "int64" * 10, 7)
        ),
        (Format.SKYRL, "a.pkl", b"", "empty"),
        (
            Format.VERL,
            "a.safetensors",
            header({"x": {"dtype": "I64", "shape": [0, 1 << 47, 1 << 47], "data_offsets": [0, 0]}}),
            "no entries",
        ),
        (
            Format.VERL,
            "a.safetensors",
            header({"x": {"dtype": "I64", "shape": [0], "data_offsets": [0, 0]}}),
            "expected routed_experts",
        ),
    ],
)
def test_values_that_are_none_of_the_format_get_a_sentence(tmp_path, format, name, content, message):
    with pytest.raises(TraceError, match=message):
        read(write(tmp_path / name, content), format)


def test_empty_arrays_of_safetensors(tmp_path):
    arrays = {"routed_experts": ROWS[None], "input_lengths": np.array([4])}
    more = {"zz": np.zeros(0, np.int64), "aa": np.zeros((2, 0), np.int32)}
    assert read(write(tmp_path / "a.safetensors", arrays | more), Format.NEMO_RL).num_rows == 4


@pytest.mark.parametrize(
    "routes",
    [
        {"data": "", "shape": [0, 1 << 39, 1 << 39], "dtype": "int64"},
        {"data": "", "shape": [0, 3, 257], "dtype": "int64"},
        {"data": "", "shape": [bool(1)] * 3, "dtype": "int64"},
        {"data": "", "shape": "x" * 5000, "dtype": "int64"},
        {"data": "", "shape": [0, 3, 2], "dtype": ["int64"] * 5000},
        made.npy_base64(np.array(3)),
        made.npy_base64(np.ones((1, 3, 2))),
        made.npy_base64(np.ones((1, 3, 2), bool)),
        [[[1, 2.5]]],
        [[[True, False]]],
        [[["1", "2"]]],
        [[[1, 2]], 3],
    ],
)
@pytest.mark.parametrize("prompt", [False, True])
def test_forms_of_routes_that_are_none(tmp_path, routes, prompt):
    answer = {"choices": [{"routed_experts": routes, "token_ids": [1]}], "usage": {"prompt_tokens": 0}}
    answer |= {"prompt_routed_experts": routes} if prompt else {}
    path = write(tmp_path / "a.json", answer)
    with pytest.raises(TraceError) as found:
        read(path, Format.ANSWERS)
    assert len(str(found.value)) < 600


def test_recorder_files_take_little_more_than_their_ids(tmp_path):
    rng = np.random.default_rng(0)
    passes = [np.tile(made.routes(rng, 50), (40, 1, 1))]
    slots = np.stack([rng.permutation(16) for _ in range(3)])
    torch.save(made.recorder_dump(passes, slots, torch.from_numpy), tmp_path / "a.pt")
    read(tmp_path / "a.pt", Format.SGLANG_RECORDER)
    with at_most(2 * (tmp_path / "a.pt").stat().st_size):
        trace = read(tmp_path / "a.pt", Format.SGLANG_RECORDER)
    np.testing.assert_array_equal(trace.experts_TLK, passes[0])
